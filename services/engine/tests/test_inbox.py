"""What the shell reads of its worker: every report once, in order, and no more at a time than it takes."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import uvloop

from headrace.engine.core.finish import Finish, FinishReason
from headrace.engine.core.step import Hold
from headrace.engine.worker.inbox import Inbox
from headrace.engine.worker.messages import LongStep, StepEvent, decode, encode, payload_bytes


def report(number: int) -> StepEvent:
    return StepEvent(sequence_ids=[number], token_ids=[7], finishes=())


async def connected() -> tuple[Inbox, socket.socket]:
    ours, theirs = socket.socketpair()
    inbox = Inbox()
    await asyncio.get_running_loop().create_connection(lambda: inbox, sock=ours)
    return inbox, theirs


async def test_reports_come_in_order_however_the_bytes_are_cut() -> None:
    inbox, worker = await connected()
    stream = b"".join(encode(report(number)) for number in range(50)) + encode(LongStep(may_take_s=1.5))
    for at in range(0, len(stream), 37):
        worker.send(stream[at : at + 37])
        await asyncio.sleep(0)
    got = [await inbox.next() for _ in range(51)]
    assert got[:50] == [report(number) for number in range(50)]
    assert got[50] == LongStep(may_take_s=1.5)
    worker.close()
    assert await inbox.next() is None


async def test_reports_that_came_before_the_end_are_still_there_after_it() -> None:
    inbox, worker = await connected()
    worker.send(encode(report(1)) + encode(report(2))[:9])
    worker.close()
    assert await inbox.next() == report(1)
    assert await inbox.next() is None


async def test_a_reader_that_lags_holds_the_worker_back_and_loses_nothing() -> None:
    inbox, worker = await connected()
    count, sent = 20_000, threading.Event()

    def work() -> None:
        for number in range(count):
            worker.sendall(encode(report(number)))
        sent.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for number in range(100):  # the loop runs all the while, and could read everything
        await asyncio.sleep(0.002)
        assert (await inbox.next()) == report(number)
    assert not sent.is_set()
    for number in range(100, count):
        assert (await inbox.next()) == report(number)
    await asyncio.to_thread(thread.join)
    worker.close()


async def test_one_that_follows_has_each_report_in_the_turn_in_which_it_was_read() -> None:
    inbox, worker = await connected()
    worker.send(encode(report(0)))
    await asyncio.sleep(0.01)  # what came before anybody followed is first
    got: list[object] = []

    def take(given: object) -> bool:
        got.append(given)
        return not isinstance(given, LongStep)

    following = asyncio.ensure_future(inbox.follow(take))
    for number in range(1, 200):
        worker.send(encode(report(number)))
    worker.send(encode(LongStep(may_take_s=1.5)) + encode(report(200)))
    async with asyncio.timeout(5):
        await following
    assert got == [*(report(number) for number in range(200)), LongStep(may_take_s=1.5)]
    assert await inbox.next() == report(200)  # after its last it is told nothing more
    worker.close()


def test_what_a_follower_raises_ends_its_following_under_both_loops() -> None:
    def take(given: object) -> bool:
        raise LookupError("no such sequence")

    async def one() -> None:
        inbox, worker = await connected()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with worker:
            asyncio.get_running_loop().call_soon(worker.send, encode(report(3)))
            async with asyncio.timeout(5):
                with pytest.raises(LookupError, match="no such sequence"):
                    await inbox.follow(take)

    asyncio.run(one())
    uvloop.run(one())


async def test_following_ends_with_the_other_end() -> None:
    inbox, worker = await connected()
    got: list[object] = []
    worker.send(encode(report(1)))
    worker.close()
    async with asyncio.timeout(5):
        await inbox.follow(lambda given: not got.append(given))  # type: ignore[func-returns-value]
    assert got == [report(1)]


def test_it_reads_under_the_loop_that_services_run_on() -> None:
    async def one() -> object:
        inbox, worker = await connected()
        with worker:
            worker.send(encode(report(3)))
            return await inbox.next()

    assert uvloop.run(one()) == report(3)


def test_an_event_survives_the_wire_whole_and_a_plain_one_takes_few_bytes() -> None:
    full = StepEvent(
        sequence_ids=[1, 2],
        token_ids=[3, 4],
        finishes=(Finish(sequence_id=2, reason=FinishReason.STOP),),
        hold=Hold.BLOCKS,
        preemptions=1,
        drafted=2,
        accepted=1,
    )
    guessed = StepEvent(
        sequence_ids=[5, 5, 1 << 40], token_ids=[1, 2, 3], finishes=(), hold=Hold.PREFIX, drafted=70_000, accepted=1
    )
    nothing = StepEvent(sequence_ids=[], token_ids=[], finishes=())
    for event in (full, report(9), guessed, nothing):
        frame = encode(event)
        assert decode(frame[4:]) == event
        assert payload_bytes(frame[:4]) == len(frame) - 4
    assert len(encode(report(9))) < 40
