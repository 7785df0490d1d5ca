"""How many of a deployment's ready replicas are saturated, as far as it is known.

Unknown is a third answer: taken for idle it would let a full fleet wait for ever, taken for full it would start
replicas without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.controller.core.decision import Reason, Why
from headrace.controller.core.fleet import EngineId, Heartbeat, Intent, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullness:
    """`saturated` is None when it is not known; `reasons` say so when it should be, and when all are saturated."""

    saturated: int | None = None
    reasons: tuple[Reason, ...] = ()


def fullness(intent: Intent | None, ready: Sequence[tuple[EngineId, Heartbeat]]) -> Fullness:
    """Of the `ready` replicas with their newest heartbeats; those of another bundle than the wanted one get no requests
    any more, and do not count."""
    if not isinstance(intent, Wanted):
        return Fullness()
    ready = [(e, beat) for e, beat in ready if beat.bundle_digest == intent.spec.bundle_digest]
    if not ready:
        return Fullness()
    silent = [engine_id for engine_id, beat in ready if beat.load is None]
    if silent:
        text = f"{', '.join(sorted(silent))} does not say how loaded it is: saturation is not known"
        return Fullness(reasons=(Reason(why=Why.LOAD_UNKNOWN, text=text),))
    saturated = sum(beat.load is not None and beat.load.reaches(intent.saturation) for _, beat in ready)
    if saturated < len(ready):
        return Fullness(saturated=saturated)
    text = f"SATURATED: as much waits at every ready replica ({saturated}) as may"
    return Fullness(saturated=saturated, reasons=(Reason(why=Why.SATURATED, text=text),))
