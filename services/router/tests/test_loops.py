"""The view loop against boards that misbehave as no real Redis can be made to on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from structlog.testing import capture_logs

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.base.errors import Unavailable
from headrace.coord.redis.replica_board import Board, Record
from headrace.router import loops
from headrace.router.core.prefix_index import PrefixIndex
from headrace.router.core.router import Router
from headrace.router.core.rules import Rules


class ScriptedBoard:
    """Plays one answer per read, then the last one for ever."""

    def __init__(self, *answers: Callable[[], Board]) -> None:
        self._answers = list(answers)

    async def read(self) -> Board:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return answer()


def board(phase: pb.Phase = pb.PHASE_WARMING, sequence: int = 1) -> Callable[[], Board]:
    payload = pb.Heartbeat(engine_id="a", epoch=1, sequence=sequence, phase=phase).SerializeToString()
    return lambda: Board(
        now_us=10, records=(Record(engine_id="a", epoch=1, sequence=sequence, at_us=10, payload=payload),)
    )


def raising(error: Exception) -> Callable[[], Board]:
    def answer() -> Board:
        raise error

    return answer


async def steps(reader: object, n: int) -> tuple[Router, list[str]]:
    rules = Rules(freshness_s=10.0)
    router = Router(rules_of=lambda name: rules, index=PrefixIndex(10), chance=lambda: 0.0, longest_s=10.0)
    now = iter(range(1000))
    loop = loops.ViewLoop(router, reader, period_s=0.1, clock=lambda: next(now) / 100, read=lambda: None)  # type: ignore[arg-type]
    with capture_logs() as lines:
        for _ in range(n):
            await loop.step()
    return router, [str(line["event"]) for line in lines]


async def test_each_change_of_a_replica_is_one_line_and_silence_means_no_change():
    router, events = await steps(
        ScriptedBoard(board(), board(), board(pb.PHASE_DRAINING, 2), lambda: Board(now_us=10, records=())), 6
    )
    assert events == ["board_read_began", "replica_changed", "replica_changed", "replica_changed"]
    assert not router.view.sightings


async def test_a_lost_board_is_one_line_and_its_return_another():
    lost = raising(Unavailable("Redis does not serve"))
    router, events = await steps(ScriptedBoard(board(), lost, lost, lost, board()), 6)
    assert events == ["board_read_began", "replica_changed", "board_read_failed", "board_read_began"]
    assert not router.view.degraded


async def test_something_on_the_board_that_is_no_record_degrades_the_view_and_does_not_end_the_loop():
    router, events = await steps(ScriptedBoard(board(), raising(ValueError("invalid literal"))), 2)
    assert events[-1] == "board_read_failed"
    assert router.view.degraded
    assert router.view.sightings


async def test_a_read_that_hangs_is_given_up(monkeypatch):
    class Hanging:
        async def read(self) -> Board:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    monkeypatch.setattr(loops, "READ_TIMEOUT_S", 0.01)
    router, events = await steps(Hanging(), 1)
    assert events == ["board_read_failed"]
    assert router.view.degraded
