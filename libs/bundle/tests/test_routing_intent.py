"""A deployment's routing and tenants: what the router could not act upon is refused before it is stored."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.api.control.v1.intent_pb2 import Deployment, Routing, Saturation
from headrace.base.errors import InvalidRequest
from headrace.bundle.intent import decode, encode


def a_deployment(**changes: Any) -> Deployment:
    return Deployment(name="chat", bundle_digest="0" * 32, replicas=1, backend="simulated", **changes)


def test_routing_and_tenants_come_back_as_they_were_written():
    written = a_deployment(
        tenants=["acme", "Zenith.2"],
        routing=Routing(
            policy="least_loaded",
            freshness_s=2.0,
            slow_start_s=30.0,
            saturation=Saturation(waiting=0.5, pressure=0.9, reserve=0.25),
        ),
    )
    assert decode(Deployment, encode(written)) == written


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"routing": Routing(policy="fastest")}, "routing.policy"),
        ({"routing": Routing(freshness_s=0.0)}, "routing.freshness_s"),
        ({"routing": Routing(freshness_s=math.nan)}, "routing.freshness_s"),
        ({"routing": Routing(slow_start_s=-1.0)}, "routing.slow_start_s"),
        ({"routing": Routing(saturation=Saturation(waiting=-1.0))}, "routing.saturation.waiting"),
        ({"routing": Routing(saturation=Saturation(pressure=1.5))}, "routing.saturation.pressure"),
        ({"routing": Routing(saturation=Saturation(reserve=0.6))}, "routing.saturation.reserve"),
        ({"tenants": ["acme", "no spaces"]}, "tenants[1]"),
    ],
)
def test_what_no_router_could_act_upon_names_its_field(changes: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        encode(a_deployment(**changes))
    assert caught.value.field == field
