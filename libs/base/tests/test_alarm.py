"""Timers that are set more often than they ring."""

from __future__ import annotations

import asyncio
import math
import time

import uvloop

from headrace.base.alarm import Alarm, Soonest


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


def test_alarms_set_anew_within_half_a_millisecond_ring_on_the_services_own_loop() -> None:
    async def rung() -> int:
        rang: list[int] = []
        for n in range(20):
            alarm = Alarm()
            alarm.set(0.0002, lambda: rang.append(1))
            alarm.set(0.0001 * (n % 3), lambda: rang.append(1))
            await asyncio.sleep(0.003)
            alarm.close()
        return len(rang)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(rung()) == 20


async def test_the_soonest_of_the_instants_asked_for_rings_once_and_the_others_are_forgotten() -> None:
    rang: list[float] = []
    soonest = Soonest(lambda: rang.append(time.monotonic()))
    began = time.monotonic()
    for delay_s in (60.0, 0.02, 0.03):
        soonest.by(began + delay_s)
    assert soonest.at == began + 0.02
    await asyncio.sleep(0.06)
    assert len(rang) == 1
    assert rang[0] - began >= 0.018
    assert soonest.at == math.inf


async def test_what_was_stopped_does_not_ring_and_may_be_asked_again() -> None:
    rang: list[int] = []
    soonest = Soonest(lambda: rang.append(1))
    soonest.by(time.monotonic() + 0.01)
    soonest.stop()
    await asyncio.sleep(0.03)
    assert not rang
    soonest.by(time.monotonic() + 60)
    soonest.by(time.monotonic() + 0.001)
    await asyncio.sleep(0.03)
    assert rang == [1]


def test_instants_within_half_a_millisecond_are_kept_on_the_services_own_loop() -> None:
    async def rung() -> int:
        rang: list[int] = []
        for n in range(20):
            soonest = Soonest(lambda: rang.append(1))
            soonest.by(time.monotonic() + 0.0003)
            soonest.by(time.monotonic() + 0.0001 * (n % 3))
            await asyncio.sleep(0.003)
        return len(rang)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(rung()) == 20
