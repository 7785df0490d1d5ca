"""The board on which engines post their heartbeats and routers read them.

One hash, engine id → record: epoch, sequence and server time as 20 decimal digits each, then the payload. Decimals,
because Lua's numbers are doubles and an epoch in nanoseconds needs 61 bits; of equal length, so that they compare as
strings. Each operation is one script, and each stamp is the server's own clock: no two machines' clocks are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from redis.asyncio import Redis

from headrace.coord.redis.script_line import ScriptLine
from headrace.coord.redis.store import TIMEOUT_S, redis_errors

KEY = "headrace:v1:replicas"
RETENTION_S = 600

_DIGITS = 20
_HEADER = 3 * _DIGITS

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
"""

_WRITE = (
    _NOW
    + """
local id, epoch, sequence, payload, retention_ms = unpack(ARGV)
local old = redis.call('HGET', KEYS[1], id)
if old then
  local old_epoch, old_sequence, old_at = string.sub(old, 1, 20), string.sub(old, 21, 40), string.sub(old, 41, 60)
  if epoch < old_epoch then return {'lower_epoch', old_at} end
  if epoch == old_epoch and sequence == old_sequence then return {'repeated', old_at} end
  if epoch == old_epoch and sequence < old_sequence then return {'late', old_at} end
end
local at = string.format('%020.0f', now)
redis.call('HSET', KEYS[1], id, epoch .. sequence .. at .. payload)
redis.call('PEXPIRE', KEYS[1], retention_ms)
return {'stored', at}
"""
)

# A stamp from the future means that the server's clock was set back. Such a record would look fresh until the clock
# has caught up, its engine dead or not; a living engine writes again within one period, so it is dropped.
_READ = (
    _NOW
    + """
local all, kept = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local at = tonumber(string.sub(all[i + 1], 41, 60))
  if not at or now - at > tonumber(ARGV[1]) or at - now > 1000000 then
    redis.call('HDEL', KEYS[1], all[i])
  else
    table.insert(kept, all[i])
    table.insert(kept, all[i + 1])
  end
end
return {string.format('%020.0f', now), kept}
"""
)

_REMOVE = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old or string.sub(old, 1, 20) > ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Outcome(Enum):
    """What the board did with a heartbeat."""

    STORED = b"stored"
    REPEATED = b"repeated"  # this very heartbeat is there already; its age was not renewed
    LATE = b"late"  # a newer one of the same process is there
    LOWER_EPOCH = b"lower_epoch"  # a newer process has this engine's id: the writer's life is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Answer to a write; `at_us` is the server's stamp of the record now on the board."""

    outcome: Outcome
    at_us: int

    @property
    def accepted(self) -> bool:
        """Whether this heartbeat is the one on the board."""
        return self.outcome in (Outcome.STORED, Outcome.REPEATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An engine's newest heartbeat; its age is `board.now_us - record.at_us`, both of the server's clock."""

    engine_id: str
    epoch: int
    sequence: int
    at_us: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """All heartbeats at server time `now_us`, by engine id. Stale ones stay for RETENTION_S, to be seen as stale.

    `malformed` counts entries that no engine of ours wrote: one of them must not hide all the others.
    """

    now_us: int
    records: tuple[Record, ...]
    malformed: int = 0


class ReplicaBoard:
    """The board in `redis`. Each method raises Unavailable within a second when Redis does not answer."""

    def __init__(self, redis: Redis) -> None:
        self._write = redis.register_script(_WRITE)
        # The one that is called ten times a second for ever.
        self._read = ScriptLine(redis, _READ, timeout_s=TIMEOUT_S)
        self._remove = redis.register_script(_REMOVE)

    async def write(self, engine_id: str, epoch: int, sequence: int, payload: bytes) -> Written:
        """Post a heartbeat, unless a newer one is there. Safe to repeat: same epoch and sequence change nothing."""
        arguments: list[str | bytes | int] = [engine_id, _digits(epoch), _digits(sequence), payload, RETENTION_S * 1000]
        with redis_errors():
            outcome, at = await self._write(keys=[KEY], args=arguments)
        return Written(outcome=Outcome(outcome), at_us=int(at))

    async def read(self) -> Board:
        """Everything on the board; drops records older than RETENTION_S."""
        with redis_errors():
            now, flat = await self._read.call(KEY.encode(), [b"%d" % (RETENTION_S * 1_000_000)])
        unpacked = [_unpack(engine_id, packed) for engine_id, packed in zip(flat[::2], flat[1::2], strict=True)]
        records = sorted((r for r in unpacked if r is not None), key=lambda record: record.engine_id)
        return Board(now_us=int(now), records=tuple(records), malformed=len(unpacked) - len(records))

    async def remove(self, engine_id: str, epoch: int) -> bool:
        """Take an engine off the board, unless a newer process has its id by now. Whether one was taken off."""
        with redis_errors():
            return bool(await self._remove(keys=[KEY], args=[engine_id, _digits(epoch)]))


def _digits(number: int) -> str:
    text = f"{number:0{_DIGITS}d}"
    if number < 0 or len(text) > _DIGITS:
        raise ValueError(f"{number} is not an unsigned 64-bit number")
    return text


def _unpack(engine_id: bytes, packed: bytes) -> Record | None:
    epoch, sequence, at = (packed[i : i + _DIGITS] for i in range(0, _HEADER, _DIGITS))
    try:
        return Record(
            engine_id=engine_id.decode(),
            epoch=int(epoch),
            sequence=int(sequence),
            at_us=int(at),
            payload=packed[_HEADER:],
        )
    except ValueError:  # a name that is no UTF-8, or digits that are none
        return None
