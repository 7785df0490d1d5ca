"""What a slot says at any instant is what was noted before it."""

import asyncio
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.telemetry.v1 import telemetry_service_pb2 as pb
from headrace.base.errors import Exhausted
from headrace.gateway.core.account import (
    MOST_ATTEMPTS,
    MOST_USAGE_BODY,
    SLOT_BYTES,
    Damaged,
    Kind,
    Slot,
    read_slot,
)
from headrace.gateway.ledger.account import Account
from headrace.gateway.ledger.records import GATEWAY_LOST, body_of, opening


@pytest.fixture
def memory():
    return memoryview(bytearray(SLOT_BYTES))


def begun(memory, done=lambda slot: None, **changes):
    known = {
        "request_id": "r1",
        "tenant": "acme",
        "credential": "laptop",
        "model": "smol",
        "bundle_digest": "ab" * 16,
        "admitted_unix_ns": 17,
        "gateway_id": "g1",
    }
    slot = Slot(memory)
    slot.open(Kind.USAGE, opening(**{**known, **changes}))
    return Account(slot, done)


def record(memory, extra=()):
    return pb.UsageRecord.FromString(body_of(read_slot(memory), extra, found_ns=99))


NOTES = st.lists(
    st.one_of(
        st.tuples(st.just("tokens"), st.integers(1, 16), st.integers(1, 2000)),
        st.tuples(st.just("attempt"), st.integers(1, 16), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("ended"), st.integers(1, 16), st.sampled_from(["OK", "BROKEN", "x" * 40])),
        st.tuples(st.just("close"), st.sampled_from(["OK", "CANCELLED", "é" * 60]), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(notes=NOTES)
def test_after_any_notes_the_slot_has_every_token_once_and_the_attempts_in_order(notes):
    memory = memoryview(bytearray(SLOT_BYTES))
    account = begun(memory)
    account.prompt(100)
    total, shares, epochs, closed = 0, {}, {}, None
    for kind, first, second in notes:
        if kind == "tokens":
            account.tokens(first, second)
            if closed is None:
                total += second
                if first in shares:
                    shares[first] += second
        elif kind == "attempt":
            account.attempt(first, f"engine-{first}", second)
            if closed is None and first not in shares:
                shares[first], epochs[first] = 0, second
        elif kind == "ended":
            account.attempt_ended(first, second)
        else:
            account.close(first)
            closed = closed or first
        seen = record(memory)  # as after a kill right here
        assert (seen.output_tokens, seen.prompt_tokens) == (total, 100)
        assert seen.recovered is (closed is None)
        assert closed is None or closed.startswith(seen.outcome)
        kept = list(shares.items())[:MOST_ATTEMPTS]
        assert [(a.attempt, a.output_tokens) for a in seen.attempts] == kept
        assert all(a.epoch == epochs[a.attempt] and a.engine_id == f"engine-{a.attempt}" for a in seen.attempts)


def test_attempts_beyond_the_slots_room_are_in_the_record_of_a_living_gateway(memory):
    slots = []
    account = begun(memory, slots.append)
    for number in range(1, MOST_ATTEMPTS + 4):
        account.attempt(number, f"e{number}", number)
        account.tokens(number, 2)
        account.attempt_ended(number, "BROKEN")
    account.close("OK")
    seen = record(memory, slots[0].extra.values())
    assert [(a.attempt, a.output_tokens, a.outcome) for a in seen.attempts] == [
        (number, 2, "BROKEN") for number in range(1, MOST_ATTEMPTS + 4)
    ]
    assert seen.output_tokens == 2 * (MOST_ATTEMPTS + 3)


def test_an_unfinished_request_becomes_a_record_that_says_so(memory):
    account = begun(memory)
    account.prompt(7)
    account.cached(3)
    account.attempt(1, "e1", 5)
    account.attempt_ended(1, "BROKEN")
    account.attempt(2, "e2", 6)
    account.tokens(2, 4)
    seen = record(memory)
    assert (seen.outcome, seen.recovered, seen.ended_unix_ns) == (GATEWAY_LOST, True, 99)
    assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens) == (7, 3, 4)
    assert [a.outcome for a in seen.attempts] == ["BROKEN", GATEWAY_LOST]
    assert (seen.request_id, seen.tenant, seen.gateway_id, seen.admitted_unix_ns) == ("r1", "acme", "g1", 17)


def test_the_longest_names_fit_a_slot(memory):
    text = "é" * 300
    body = opening(
        request_id=text,
        tenant=text,
        credential=text,
        model=text,
        bundle_digest=text,
        admitted_unix_ns=2**63 - 1,
        gateway_id=text,
    )
    assert len(body) <= MOST_USAGE_BODY


def test_a_slot_used_again_keeps_nothing_of_its_last_request(memory):
    account = begun(memory)
    account.prompt(7)
    account.attempt(1, "an engine with a long name", 5)
    account.tokens(1, 4)
    account.close("CANCELLED")
    begun(memory, request_id="r2")
    seen = record(memory)
    assert seen == pb.UsageRecord(
        request_id="r2",
        tenant="acme",
        credential="laptop",
        model="smol",
        bundle_digest="ab" * 16,
        admitted_unix_ns=17,
        gateway_id="g1",
        outcome=GATEWAY_LOST,
        ended_unix_ns=99,
        recovered=True,
    )


@settings(max_examples=200, deadline=None)
@given(where=st.integers(0, SLOT_BYTES - 1), size=st.integers(1, 600), with_what=st.binary(min_size=1, max_size=8))
def test_a_slot_written_halfway_is_found_out_or_still_names_its_request(where, size, with_what):
    memory = memoryview(bytearray(SLOT_BYTES))
    begun(memory).tokens(1, 3)
    body = read_slot(memory).body
    torn = bytearray(memory)
    torn[where : where + size] = (with_what * size)[: len(torn[where : where + size])]
    try:
        entry = read_slot(memoryview(torn))
    except Damaged:
        return
    assert entry is None or entry.body == body


def test_an_empty_body_with_a_right_checksum_is_not_taken_for_a_record_of_another_kind(memory):
    numbers = memory.cast("Q")
    numbers[0], numbers[1], numbers[2] = 1, 7, zlib.crc32(b"")
    with pytest.raises(Damaged):
        read_slot(memory)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "OK"),
        (Exhausted("no", reason="QUOTA"), "QUOTA"),
        (asyncio.CancelledError(), "CANCELLED"),
        (GeneratorExit(), "CANCELLED"),
        (KeyError("bug"), "INTERNAL"),
    ],
)
def test_a_block_closes_the_account_once_by_how_it_ends(memory, error, outcome):
    ended = []

    def use():
        with begun(memory, ended.append) as account:
            account.tokens(1, 1)
            if error is not None:
                raise error
        return account

    if error is None:
        use().close("LATE")
    else:
        with pytest.raises(type(error)):
            use()
    assert len(ended) == 1
    assert record(memory).outcome == outcome
