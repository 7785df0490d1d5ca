"""`headrace key`, `tenant` and `issuer` as typed, against a real etcd."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from headrace.api.control.v1.intent_pb2 import ApiKey, Deployment, Issuer, Tenant
from headrace.base.errors import StartError
from headrace.bundle import intent, keys
from headrace.cli.intent import etcd_client
from headrace.cli.key import expiry
from headrace.cli.main import main
from headrace.coord.embedded import EmbeddedEtcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd.start(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


Run = Callable[..., str]


@pytest.fixture
def headrace(server: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; its output, or with `fails` what it said of its failure."""
    monkeypatch.setenv("HEADRACE_ETCD_ENDPOINTS", server.endpoint)

    def run(*args: str, fails: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["headrace", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == (1 if fails else 0), err
        return str(err if fails else out).strip()

    return run


async def stored(server: EmbeddedEtcd, path: str, kind: type) -> object:
    async with etcd_client([server.endpoint]) as etcd:
        found = await etcd.get(path)
        return intent.decode(kind, found.value) if found else None


def read(server: EmbeddedEtcd, path: str, kind: type) -> object:
    import asyncio

    return asyncio.run(stored(server, path, kind))


def test_a_key_is_shown_once_stored_as_a_hash_and_can_be_revoked(headrace: Run, server: EmbeddedEtcd) -> None:
    key = headrace(
        *("key", "create", "--tenant", "acme", "--name", "ci", "--deployment", "m", "--role", "user"),
        *("--role", "operator", "--priority", "batch", "--adapter", "f" * 32, "--expires-in", "30d"),
    )
    hashed = intent.hash_api_key(key)
    record = read(server, keys.api_key_key(hashed), ApiKey)
    assert isinstance(record, ApiKey)
    assert (record.tenant, record.name, list(record.deployments)) == ("acme", "ci", ["m"])
    assert (list(record.roles), record.priority, list(record.adapters)) == (["user", "operator"], "batch", ["f" * 32])
    left = datetime.fromisoformat(record.expires_at) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    told = headrace("key", "list", "--tenant", "acme")
    assert hashed[:12] in told
    assert "batch" in told
    assert key not in told
    assert hashed[:12] not in headrace("key", "list", "--tenant", "other")
    assert headrace("key", "revoke", key) == "revoked"
    assert read(server, keys.api_key_key(hashed), ApiKey) is None
    assert "nothing was revoked" in headrace("key", "revoke", key, fails=True)


def test_a_key_that_nobody_has_any_more_is_revoked_by_its_id(headrace: Run, server: EmbeddedEtcd) -> None:
    hashed = intent.hash_api_key(headrace("key", "create", "--tenant", "lost"))
    assert headrace("key", "revoke", hashed[:12]) == "revoked"
    assert read(server, keys.api_key_key(hashed), ApiKey) is None
    assert "nothing was revoked" in headrace("key", "revoke", hashed[:12], fails=True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--tenant", "a/b"), "tenant: must be"),
        (("--tenant", "a", "--priority", "urgent"), "priority: must be one of batch, standard, interactive"),
        (("--tenant", "a", "--role", "root"), "roles[0]: must be one of user, operator"),
        (("--tenant", "a", "--expires-in", "soon"), "90m, 12h or 30d"),
        (("--tenant", "a", "--deployment", "A B"), "deployments[0]: must be a deployment's name"),
    ],
)
def test_a_key_with_rights_that_mean_nothing_is_not_made(headrace: Run, args: tuple[str, ...], said: str) -> None:
    assert said in headrace("key", "create", *args, fails=True)


@pytest.mark.parametrize("span", ["", "0h", "-1h", "1w", "h", "1.5h", "9999999d"])
def test_a_span_is_a_number_and_a_unit(span: str) -> None:
    with pytest.raises(StartError):
        expiry(span, datetime.now(UTC))


def test_a_tenants_limits_are_set_kept_and_taken_away_one_by_one(headrace: Run, server: EmbeddedEtcd) -> None:
    headrace("tenant", "set", "acme", "--requests-per-minute", "60", "--weight", "2", "--deny", "secret", "--deny", "x")
    said = headrace("tenant", "set", "acme", "--tokens-per-day", "0", "--max-output-tokens", "100")
    assert "no limit" in said
    record = read(server, keys.tenant_key("acme"), Tenant)
    assert isinstance(record, Tenant)
    assert (record.limits.requests_per_minute, record.weight) == (60, 2.0)
    assert record.limits.HasField("tokens_per_day")
    assert list(record.denied_patterns) == ["secret", "x"]
    assert headrace("tenant", "show", "acme") == said
    assert "acme" in headrace("tenant", "list")
    headrace("tenant", "set", "acme", "--requests-per-minute", "none", "--deny", "none", "--max-output-tokens", "none")
    record = read(server, keys.tenant_key("acme"), Tenant)
    assert isinstance(record, Tenant)
    assert not record.limits.HasField("requests_per_minute")
    assert not record.HasField("max_output_tokens")
    assert list(record.denied_patterns) == []
    assert headrace("tenant", "delete", "acme") == "deleted"
    assert "no limits of its own" in headrace("tenant", "show", "acme", fails=True)
    assert "nothing was deleted" in headrace("tenant", "delete", "acme", fails=True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("a/b",), "name: must be"),
        (("a", "--weight", "0"), "weight: must be above 0"),
        (("a", "--weight", "nan"), "weight: must be above 0"),
        (("a", "--requests-per-minute", "many"), "neither a whole number nor none"),
        (("a", "--requests-per-minute", "-1"), "neither a whole number nor none"),
        (("a", "--max-output-tokens", "99999999999"), "is too large"),
        (("a", "--max-output-tokens", "0"), "max_output_tokens: must be at least 1"),
        (("a", "--deny", "("), "denied_patterns[0]: is no regular expression"),
    ],
)
def test_terms_that_mean_nothing_are_not_written(headrace: Run, args: tuple[str, ...], said: str) -> None:
    assert said in headrace("tenant", "set", *args, fails=True)
    assert read_nothing(headrace)


def read_nothing(headrace: Run) -> bool:
    return len(headrace("tenant", "list").splitlines()) == 1


def test_an_issuer_is_accepted_listed_and_taken_away(headrace: Run, server: EmbeddedEtcd) -> None:
    headrace(
        *("issuer", "set", "sso", "--issuer", "https://login.example", "--audience", "headrace"),
        *("--jwks", "https://login.example/jwks", "--tenant", "acme", "--priority", "batch"),
    )
    record = read(server, keys.issuer_key("sso"), Issuer)
    assert isinstance(record, Issuer)
    assert (list(record.audiences), list(record.tenants), record.priority) == (["headrace"], ["acme"], "batch")
    assert "https://login.example/jwks" in headrace("issuer", "list")
    assert headrace("issuer", "delete", "sso") == "deleted"
    assert "nothing was deleted" in headrace("issuer", "delete", "sso", fails=True)


@pytest.mark.parametrize(
    "jwks", ["http://login.example/jwks", "ftp://login.example/jwks", "http://127.0.0.1.evil/jwks"]
)
def test_keys_that_anybody_on_the_way_could_replace_are_refused(headrace: Run, jwks: str) -> None:
    args = ("issuer", "set", "sso", "--issuer", "i", "--audience", "a", "--jwks", jwks)
    assert "jwks: must be an https:// URL" in headrace(*args, fails=True)


def test_a_deployment_is_for_the_tenants_named_until_it_is_for_all_and_can_be_deleted(
    headrace: Run, server: EmbeddedEtcd
) -> None:
    made = headrace("apply", "--name", "m", "--replicas", "0", "--tenant", "acme", "--prefixes", "shared")
    assert made.endswith(", for acme only, prefixes shared among its tenants")
    stored_now = read(server, keys.deployment_key("m"), Deployment)
    assert (list(stored_now.tenants), stored_now.shared_prefixes) == (["acme"], True)
    wrong = headrace("apply", "--name", "m", "--tenant", "a", "--all-tenants", fails=True)
    assert "--tenant and --all-tenants exclude each other" in wrong
    assert "'mine' is neither own nor shared" in headrace("apply", "--name", "m", "--prefixes", "mine", fails=True)
    opened = headrace("apply", "--name", "m", "--all-tenants", "--prefixes", "own")
    assert "only" not in opened
    assert "shared" not in opened
    assert headrace("delete", "m").startswith("deleted: m;")
    assert read(server, keys.deployment_key("m"), Deployment) is None
    assert "there is no deployment 'm'; there are: none" in headrace("delete", "m", fails=True)
