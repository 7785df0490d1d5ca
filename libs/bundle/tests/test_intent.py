"""Intent in and out of etcd."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.control.v1.intent_pb2 import ApiKey, Bundle, Deployment, Issuer, Limits, Tenant
from headrace.base.errors import InvalidRequest
from headrace.bundle.intent import decode, default_sampling, encode, hash_api_key, new_api_key, validate_deployment

DIGEST = "0123456789abcdef" * 2
BUNDLE = Bundle(
    model_path="/models/a",
    weights_digest=DIGEST,
    tokenizer_digest=DIGEST,
    display_name="a",
    precision="float32",
    max_model_len=8192,
    engine_version="0.1.0",
    sampling_defaults={"temperature": "0.7", "stop": '["x"]'},
)
DEPLOYMENT = Deployment(
    name="smollm2-135m", bundle_digest=DIGEST, replicas=2, backend="model", engine_settings={"max_num_seqs": "8"}
)
API_KEY = ApiKey(
    tenant="acme",
    name="laptop",
    created_at="2026-01-02T03:04:05Z",
    deployments=["smollm2-135m"],
    roles=["user", "operator"],
    priority="interactive",
    adapters=[DIGEST],
    expires_at="2027-01-02T03:04:05+00:00",
)
TENANT = Tenant(
    name="acme",
    limits=Limits(requests_per_minute=0, tokens_per_day=5),
    weight=0.5,
    max_output_tokens=9,
    denied_patterns=["(?i)secret"],
)
ISSUER = Issuer(
    name="sso",
    issuer="https://login.example",
    audiences=["headrace"],
    jwks="https://login.example/jwks",
    tenant_claim="org",
    roles_claim="scope",
    priority="batch",
    deployments=["smollm2-135m"],
    tenants=["acme"],
)


@pytest.mark.parametrize("intent", [BUNDLE, DEPLOYMENT, API_KEY, TENANT, ISSUER])
def test_what_is_written_is_read_back_as_readable_json(intent: Bundle | Deployment | ApiKey | Tenant | Issuer) -> None:
    value = encode(intent)
    assert decode(type(intent), value) == intent
    assert set(json.loads(value)) == {field.name for field, _ in intent.ListFields()}


def test_scaling_to_zero_is_intent_too() -> None:
    deployment = Deployment(name="a", bundle_digest=DIGEST, replicas=0, backend="simulated")
    assert decode(Deployment, encode(deployment)).replicas == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "-a"}, "name"),
        ({"name": "a" * 64}, "name"),
        ({"name": 3}, "name"),
        ({"bundle_digest": "xyz"}, "bundle_digest"),
        ({"replicas": -1}, "replicas"),
        ({"replicas": "many"}, "replicas"),
        ({"replicas": 1001}, "replicas"),
        ({"backend": ""}, "backend"),
        ({"backend": "cuda"}, "backend"),
        ({"engine_settings": {"--max-num-seqs": "3"}}, "engine_settings['--max-num-seqs']"),
        ({"engine_settings": 3}, "engine_settings"),
    ],
)
def test_a_deployment_that_cannot_be_acted_upon_names_its_field(change: dict[str, object], field: str) -> None:
    good = json.loads(encode(DEPLOYMENT))
    with pytest.raises(InvalidRequest) as caught:
        decode(Deployment, json.dumps(good | change).encode())
    assert caught.value.field == field
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights_digest": ""}, "weights_digest"),
        ({"tokenizer_digest": "A" * 32}, "tokenizer_digest"),
        ({"precision": "float16"}, "precision"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"display_name": ""}, "display_name"),
        ({"sampling_defaults": {"top_p": "high"}}, "sampling_defaults['top_p']"),
        ({"sampling_defaults": {"top_q": "1"}}, "sampling_defaults['top_q']"),
        ({"sampling_defaults": {"top_k": "-1"}}, "sampling_defaults['top_k']"),
        ({"quantized_by": "x"}, "quantized_by"),
    ],
)
def test_a_bundle_that_cannot_be_served_names_its_field(change: dict[str, object], field: str) -> None:
    good = json.loads(encode(BUNDLE))
    with pytest.raises(InvalidRequest) as caught:
        decode(Bundle, json.dumps(good | change).encode())
    assert caught.value.field == field
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"created_at": "yesterday"}, "created_at"),
        ({"created_at": "2026-13-02T03:04:05Z"}, "created_at"),
        ({"deployments": ["ok", "Not/Ok"]}, "deployments[1]"),
        ({"roles": ["user", "root"]}, "roles[1]"),
        ({"priority": "urgent"}, "priority"),
        ({"adapters": ["xyz"]}, "adapters[0]"),
        ({"expires_at": "never"}, "expires_at"),
    ],
)
def test_an_api_key_that_cannot_be_used_names_its_field(change: dict[str, object], field: str) -> None:
    good = json.loads(encode(API_KEY))
    with pytest.raises(InvalidRequest) as caught:
        decode(ApiKey, json.dumps(good | change).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "a/b"}, "name"),
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": "NaN"}, "weight"),
        ({"weight": "Infinity"}, "weight"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"denied_patterns": ["ok", "("]}, "denied_patterns[1]"),
        ({"denied_patterns": [""]}, "denied_patterns[0]"),
        ({"denied_patterns": ["x" * 1001]}, "denied_patterns[0]"),
        ({"denied_patterns": ["x"] * 101}, "denied_patterns"),
        ({"limits": {"tokens_per_day": -1}}, "limits"),
    ],
)
def test_a_tenant_that_cannot_be_acted_upon_names_its_field(change: dict[str, object], field: str) -> None:
    good = json.loads(encode(TENANT))
    with pytest.raises(InvalidRequest) as caught:
        decode(Tenant, json.dumps(good | change).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "A"}, "name"),
        ({"issuer": ""}, "issuer"),
        ({"audiences": []}, "audiences"),
        ({"audiences": [""]}, "audiences[0]"),
        ({"jwks": ""}, "jwks"),
        ({"jwks": "http://login.example/jwks"}, "jwks"),
        ({"jwks": "http://127.0.0.1@login.example/jwks"}, "jwks"),
        ({"jwks": "http://localhost.example/jwks"}, "jwks"),
        ({"jwks": "relative/jwks.json"}, "jwks"),
        ({"roles_claim": "x" * 101}, "roles_claim"),
        ({"priority": "urgent"}, "priority"),
        ({"tenants": ["ok", "a/b"]}, "tenants[1]"),
    ],
)
def test_an_issuer_that_cannot_be_trusted_names_its_field(change: dict[str, object], field: str) -> None:
    good = json.loads(encode(ISSUER))
    with pytest.raises(InvalidRequest) as caught:
        decode(Issuer, json.dumps(good | change).encode())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "jwks", ["/etc/headrace/jwks.json", "http://127.0.0.1:8080/jwks", "http://[::1]/", "https://a"]
)
def test_keys_may_come_from_a_file_this_machine_or_over_https(jwks: str) -> None:
    issuer = Issuer()
    issuer.CopyFrom(ISSUER)
    issuer.jwks = jwks
    assert decode(Issuer, encode(issuer)) == issuer


def test_what_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(Deployment(name="a", bundle_digest=DIGEST, backend="model", replicas=5000))
    assert caught.value.field == "replicas"


def test_a_newer_writers_field_does_not_break_an_older_reader() -> None:
    newer = json.loads(encode(DEPLOYMENT)) | {"traffic": {"canary": 5}}
    assert decode(Deployment, json.dumps(newer).encode()) == DEPLOYMENT


@given(st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]":,0name', max_size=40).map(str.encode)))
def test_garbage_is_refused_and_never_raises_anything_else(value: bytes) -> None:
    for kind in (Bundle, Deployment, ApiKey, Tenant, Issuer):
        with pytest.raises(InvalidRequest):
            decode(kind, value)


def test_deeply_nested_garbage_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        decode(Deployment, b"[" * 200_000)


def test_sampling_defaults_are_absent_where_the_bundle_has_none() -> None:
    found = default_sampling(BUNDLE)
    assert found.temperature == pytest.approx(0.7)
    assert list(found.stop) == ["x"]
    assert not found.HasField("top_p")


def test_a_valid_deployment_passes() -> None:
    validate_deployment(DEPLOYMENT)


def test_api_keys_are_random_and_only_their_hash_is_needed_to_know_them() -> None:
    keys = {new_api_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"hr_[A-Za-z0-9_-]{43}", key) for key in keys)
    key = keys.pop()
    assert hash_api_key(key) == hash_api_key(key)
    assert re.fullmatch(r"[0-9a-f]{64}", hash_api_key(key))
    assert hash_api_key(key) not in {hash_api_key(other) for other in keys}
    assert hash_api_key("\ud800")  # what a client sends as a key need not be one
