"""What every test process needs, whichever tests it runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Read once, when torch is first imported: its threads otherwise spin at the end of every parallel region, and on a busy
# machine of two cores tests of seconds take minutes. The engine's worker does the same for itself.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# What a shell starts in the background ignores Ctrl-C, and so would the commands that the tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _denormals_come_back() -> Iterator[None]:
    """A model flushes denormals to zero for its whole process, which in a test's process is everybody else's, too."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)
