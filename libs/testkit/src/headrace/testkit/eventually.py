"""Wait for what must become true, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def eventually(check: Callable[[], Any], *, within_s: float = 10.0, every_s: float = 0.02) -> Any:
    """The first truthy result of `check`; AssertionError with the last result, or the last failed assertion.

    `check` may be async, and may raise AssertionError to mean "not yet".
    """
    until = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > until:
            raise AssertionError(f"not within {within_s} s; last: {last!r}")
        await asyncio.sleep(every_s)
