"""Board records: what adds up becomes a replica, what does not is unreadable and says why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.coord.redis.replica_board import Record
from headrace.router.adapters.heartbeat import seen_in
from headrace.router.core.replica import Phase, Rates, Replica, Unreadable


def record(payload: bytes | None = None, **changes: Any) -> Record:
    usual: dict[str, Any] = {
        "engine_id": "a",
        "epoch": 7,
        "sequence": 3,
        "address": "127.0.0.1:1",
        "deployment": "chat",
        "bundle_digest": "sb-27",
        "adapters": ["lora-1"],
        "phase": pb.PHASE_READY,
        "waiting_prefill_tokens": 60,
        "running": 2,
        "free_blocks": 90,
        "total_blocks": 100,
        "block_size": 16,
        "max_model_len": 8192,
        "max_num_seqs": 32,
        "prefill_tokens_per_s": 500.0,
        "itl_ms": 22.0,
    }
    heartbeat = pb.Heartbeat(**{k: v for k, v in {**usual, **changes}.items() if v is not None})
    given = heartbeat.SerializeToString() if payload is None else payload
    return Record(engine_id="a", epoch=7, sequence=3, at_us=0, payload=given)


def test_a_whole_heartbeat_becomes_a_replica():
    seen = seen_in(record())
    assert isinstance(seen, Replica)
    assert (seen.engine_id, seen.epoch, seen.sequence, seen.phase) == ("a", 7, 3, Phase.READY)
    assert (seen.adapters, seen.waiting_prefill_tokens, seen.free_blocks) == (frozenset({"lora-1"}), 60, 90)
    assert seen.rates == Rates(prefill_tokens_per_s=500.0, itl_s=0.022)


@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "itl_ms"])
@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_absent_or_impossible_is_unknown(field: str, value: float | None):
    seen = seen_in(record(**{field: value}))
    assert isinstance(seen, Replica)
    assert seen.rates is None


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (record(b"\xff\xff\xff"), "not a heartbeat message"),
        (record(b""), "filed under another replica"),
        (record(engine_id="b"), "filed under another replica"),
        (record(epoch=8), "filed under another replica"),
        (record(phase=99), "phase 99 is not known"),
        (record(phase=None), "phase 0 is not known"),
        (record(free_blocks=101), "101 of 100 blocks free"),
        (record(pressure=1.5), "pressure 1.5"),
        (record(pressure=math.nan), "pressure nan"),
        (record(max_num_seqs=None), "ready without max_num_seqs"),
        (record(address=None, block_size=None), "ready without address, block_size"),
    ],
)
def test_a_heartbeat_that_does_not_add_up_is_unreadable_and_says_why(broken: Record, why: str):
    seen = seen_in(broken)
    assert isinstance(seen, Unreadable)
    assert why in seen.why
    assert (seen.engine_id, seen.epoch, seen.sequence) == ("a", 7, 3)


def test_a_warming_engine_may_not_know_its_sizes_yet():
    seen = seen_in(
        record(phase=pb.PHASE_WARMING, total_blocks=None, free_blocks=None, block_size=None, max_model_len=None)
    )
    assert isinstance(seen, Replica)
    assert seen.context_limit is None


def test_rates_by_length_and_batch_are_taken_in_order_and_impossible_ones_left_out():
    seen = seen_in(
        record(
            prefill_rates=[
                pb.PrefillRate(tokens=1024, tokens_per_s=900.0),
                pb.PrefillRate(tokens=256, tokens_per_s=500.0),
                pb.PrefillRate(tokens=64, tokens_per_s=math.nan),
            ],
            batch_latencies=[
                pb.BatchLatency(sequences=1, itl_ms=20.0),
                pb.BatchLatency(sequences=4, itl_ms=0.0),
                pb.BatchLatency(sequences=8, itl_ms=30.0),
            ],
        )
    )
    assert isinstance(seen, Replica)
    assert seen.rates is not None
    assert seen.rates.prefill_by_length == ((256, 500.0), (1024, 900.0))
    assert seen.rates.itl_by_batch == ((1, 0.020), (8, 0.030))
