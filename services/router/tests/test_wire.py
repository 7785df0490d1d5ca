"""The edge: bad requests name the field at fault."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.api.routing.v1 import routing_service_pb2 as pb
from headrace.base.errors import Exhausted, InvalidRequest
from headrace.router.adapters import wire
from headrace.router.core.candidates import Considered
from headrace.router.core.eligibility import Verdict
from headrace.router.core.estimate import Estimate
from headrace.router.core.placement import Placed, Reason, Refused
from headrace.router.core.replica import EngineId
from headrace.router.core.rules import Policy


def request(**changes: Any) -> pb.PlaceRequest:
    usual: dict[str, Any] = {
        "request_id": "req-1842",
        "attempt": 1,
        "deployment": "chat",
        "bundle_digest": "sb-27",
        "prompt_tokens": 140,
        "max_tokens": 80,
    }
    return pb.PlaceRequest(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"attempt": 0}, "attempt"),
        ({"deployment": ""}, "deployment"),
        ({"bundle_digest": ""}, "bundle_digest"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"exclusions": [pb.Exclusion(engine_id="a"), pb.Exclusion(epoch=7)]}, "exclusions[1].engine_id"),
        ({"block_hashes": b"x" * 17, "block_size": 16}, "block_hashes"),
        ({"block_hashes": b"x" * 16}, "block_size"),
        ({"block_hashes": b"x" * 16 * 9, "block_size": 16}, "block_hashes"),
    ],
)
def test_a_bad_request_names_its_field(changes: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        wire.attempt(request(**changes))
    assert caught.value.field == field


def test_an_empty_adapter_means_none():
    assert wire.attempt(request()).adapter is None
    assert wire.attempt(request(adapter="lora-1")).adapter == "lora-1"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_can_be_told_on_the_wire(a_replica, verdict: Verdict):
    considered = (Considered(engine_id=EngineId("a"), verdict=verdict, age_s=0.1),)
    placed = Placed(
        replica=a_replica(),
        policy=Policy.LEAST_LOADED,
        estimate=Estimate(queue_s=0.1, prefill_s=0.2, decode_s=0.3),
        considered=considered,
    )
    message = wire.placed_message(placed, degraded=False, brief=False)
    assert message.considered[0].verdict != pb.VERDICT_UNSPECIFIED
    assert message.estimate.total_s == pytest.approx(0.6)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_refusal_becomes_an_error_with_its_reason_and_only_a_misfit_has_no_retry_hint(an_attempt, reason: Reason):
    error = wire.refusal_error(Refused(reason=reason), an_attempt(), degraded=True, retry_after_s=1.0)
    assert error.reason == reason.value
    assert error.metadata["degraded"] == "true"
    lasting = (Reason.CONTEXT_EXCEEDED, Reason.TENANT_NOT_PERMITTED)
    assert (error.retry_after_s is None) == (reason in lasting)


def test_block_hashes_are_cut_at_sixteen_bytes_and_exclusions_name_lives():
    asked = wire.attempt(
        request(
            block_hashes=b"a" * 16 + b"b" * 16,
            block_size=16,
            exclusions=[pb.Exclusion(engine_id="e", epoch=7)],
            tenant="acme",
        )
    )
    assert asked.hashes == [b"a" * 16, b"b" * 16]
    assert asked.excluded == {("e", 7)}
    assert (asked.tenant, asked.sequences) == ("acme", 1)


@pytest.mark.parametrize(("wait_s", "hint_s"), [(2.5, 2.5), (0.0, 0.05), (900.0, 30.0), (None, 1.0)])
def test_a_saturated_fleet_is_exhausted_and_the_hint_is_the_estimated_wait(an_attempt, wait_s, hint_s):
    refused = Refused(reason=Reason.SATURATED, wait_s=wait_s)
    error = wire.refusal_error(refused, an_attempt(), degraded=False, retry_after_s=1.0)
    assert isinstance(error, Exhausted)
    assert (error.reason, error.retry_after_s) == ("SATURATED", hint_s)
