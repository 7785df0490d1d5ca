"""Keys in etcd: other processes' data is found under them, so they are part of the contract."""

from __future__ import annotations

from headrace.bundle import keys


def test_keys_are_the_documented_ones() -> None:
    assert keys.bundle_key("ab") == "/headrace/v1/bundles/ab"
    assert keys.deployment_key("m") == "/headrace/v1/deployments/m"
    assert keys.api_key_key("00") == "/headrace/v1/keys/00"
    assert keys.leader_key("controller") == "/headrace/v1/leader/controller/"


def test_a_name_comes_back_out_of_its_key() -> None:
    assert keys.name_in(keys.deployment_key("smollm2"), keys.DEPLOYMENTS) == "smollm2"
