"""The one loop: read the board, update the view, say what changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.base.errors import HeadraceError, Unavailable
from headrace.coord.redis.replica_board import Board
from headrace.coord.redis.replica_board import Record as BoardRecord
from headrace.observe.log import get_logger
from headrace.router import metrics
from headrace.router.adapters.heartbeat import seen_in
from headrace.router.core.replica import EngineId, Replica, Unreadable
from headrace.router.core.router import Router
from headrace.router.core.view import Reading, Record, State
from headrace.router.ports import BoardReader, Clock

log = get_logger(__name__)

READ_TIMEOUT_S = 1.0
"""Above the Redis client's own socket timeouts (0.3 s), for whatever they do not cover."""


class ViewLoop:
    """Keeps a router's view up to date; `first_read` is set once the board has been read, `read` called each time."""

    def __init__(
        self, router: Router, board: BoardReader, *, period_s: float, clock: Clock, read: Callable[[], None]
    ) -> None:
        self._read_done = read
        self._router = router
        self._board = board
        self._period_s = period_s
        self._clock = clock
        self._states: dict[EngineId, State] = {}
        self._reading_works: bool | None = None
        self.first_read = asyncio.Event()

    async def run(self) -> None:
        """Read every period until cancelled."""
        while True:
            started = self._clock()
            await self.step()
            await asyncio.sleep(max(0.0, started + self._period_s - self._clock()))

    async def step(self) -> None:
        """One period."""
        asked_at = self._clock()
        try:
            board = await self._read()
        except HeadraceError as error:
            self._failed(error)
        else:
            self._succeeded(board, asked_at)
        now = self._clock()
        self._tell_changes(now)
        metrics.show_view(self._router, now, list(self._states.values()))

    async def _read(self) -> Board:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await self._board.read()
        except TimeoutError as error:
            raise Unavailable(f"Redis did not answer within {READ_TIMEOUT_S} s") from error
        except ValueError as error:
            raise Unavailable(f"the board holds something that is no record: {error}") from error

    def _failed(self, error: HeadraceError) -> None:
        if self._reading_works is not False:
            log.warning("board_read_failed", error=error.message, reason=error.reason)
        self._reading_works = False
        self._router.unobserved(self._clock())
        metrics.count_read("failed")

    def _succeeded(self, board: Board, asked_at: float) -> None:
        if not self._reading_works:
            log.info("board_read_began", records=len(board.records), view_age_s=self._view_age_s(asked_at))
        self._reading_works = True
        self._router.observed(self._reading(board, asked_at), self._clock())
        self.first_read.set()
        self._read_done()

    def _view_age_s(self, now: float) -> float | None:
        read_at = self._router.view.read_at
        return None if read_at is None else round(now - read_at, 3)

    def _reading(self, board: Board, asked_at: float) -> Reading:
        records = tuple(
            Record(seen=self._seen(r), age_s=(board.now_us - r.at_us) / 1e6, payload=r.payload) for r in board.records
        )
        metrics.count_read("ok")
        if board.malformed:
            metrics.count_unreadable()
        return Reading(asked_at=asked_at, records=records)

    def _seen(self, record: BoardRecord) -> Replica | Unreadable:
        known = self._router.view.sightings.get(EngineId(record.engine_id))
        if known and known.payload == record.payload and known.seen.epoch == record.epoch:
            return known.seen  # read more often than written: nothing new to decode
        seen = seen_in(record)
        if isinstance(seen, Unreadable):
            metrics.count_unreadable()
            if not known or not isinstance(known.seen, Unreadable):  # once, not four times a second
                log.warning("heartbeat_not_understood", engine=seen.engine_id, sequence=seen.sequence, why=seen.why)
        return seen

    def _tell_changes(self, now: float) -> None:
        """One line per replica whose state changed; None stands for "not on the board"."""
        states = self._router.view.states(now, lambda deployment: self._router.rules_of(deployment).freshness_s)
        for engine_id in sorted(states.keys() | self._states.keys()):
            before, after = self._states.get(engine_id), states.get(engine_id)
            if before is not after:
                log.info("replica_changed", engine=engine_id, before=_word(before), after=_word(after))
        self._states = states


def _word(state: State | None) -> str | None:
    return state.value if state else None
