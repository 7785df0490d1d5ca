"""When a process looks for garbage: seldom through everything, because meanwhile no stream gets on.

A full collection looks at every object that lives. A gateway's start leaves 90,000 (25 to 40 ms on an idle core), each
request that waits or streams another 160 (110 to 130 ms for 1,100 of them), and by itself Python begins one whenever a
quarter more have grown old: every second, when many requests are refused. So what the start has made is left out for
good, young objects are given time to end by themselves, and full collections come by the clock, at most 0.5 % of it.
"""

from __future__ import annotations

import asyncio
import gc
import time

YOUNG = (5_000, 4, 2**31 - 1)
"""Objects made and not ended until the young ones are looked at, 3 ms at most; the last: never everything by itself."""
LEAST_S, MOST_S = 5.0, 60.0
SHARE = 0.005


def set_aside() -> None:
    """Leave what lives now out of all later collections, and leave full ones to `collect_forever`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG)


def take_back() -> None:
    """Collect everything, what was set aside, too."""
    gc.unfreeze()
    gc.collect()


def pause_s(took_s: float) -> float:
    """Seconds from the end of a full collection that took `took_s` to the next."""
    return min(MOST_S, max(LEAST_S, took_s / SHARE))


async def collect_forever() -> None:
    """Full collections, until cancelled. What ends late are cycles that grew old: calls of long streams, mostly."""
    wait_s = LEAST_S
    while True:
        await asyncio.sleep(wait_s)
        began = time.perf_counter()
        gc.collect()
        wait_s = pause_s(time.perf_counter() - began)
