"""Where a request stands among others: how urgent it is, and with whom it may share cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """Classes of requests: a lower one waits behind higher ones and is preempted first."""

    BATCH = 1
    STANDARD = 2
    INTERACTIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A request's class, and the parts of its prefix identity: its isolation domain and its adapter's content."""

    priority: Priority = Priority.STANDARD
    isolation_domain: str = ""
    adapter_digest: str = ""


USUAL = Placement()
