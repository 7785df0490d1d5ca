"""A deadline that moves with every message and seldom passes."""

from __future__ import annotations

import asyncio

from headrace.base.alarm import Alarm


async def test_an_alarm_rings_once_at_the_time_set_last() -> None:
    loop = asyncio.get_running_loop()
    alarm, rang = Alarm(), asyncio.Queue[float]()
    began = loop.time()
    alarm.set(0.01, lambda: rang.put_nowait(0.0))
    alarm.set(0.05, lambda: rang.put_nowait(loop.time()))

    async with asyncio.timeout(5):
        assert await rang.get() - began >= 0.05
    assert rang.empty()


async def test_an_alarm_may_be_set_earlier_than_before() -> None:
    alarm, rang = Alarm(), asyncio.Event()
    alarm.set(60, rang.set)
    alarm.set(0.01, rang.set)

    async with asyncio.timeout(5):
        await rang.wait()


async def test_an_alarm_that_was_stopped_does_not_ring_until_it_is_set_again() -> None:
    alarm, rang, other = Alarm(), [], asyncio.Event()
    alarm.set(0.01, lambda: rang.append(1))
    alarm.stop()
    await asyncio.sleep(0.03)
    assert rang == []

    alarm.set(0.01, other.set)
    async with asyncio.timeout(5):
        await other.wait()


async def test_an_alarm_that_was_closed_leaves_no_timer_behind() -> None:
    loop = asyncio.get_running_loop()
    alarm = Alarm()
    alarm.set(60, lambda: None)
    assert [timer.cancelled() for timer in loop._scheduled] == [False]  # type: ignore[attr-defined]
    alarm.close()
    assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]
