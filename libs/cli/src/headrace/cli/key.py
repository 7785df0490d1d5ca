"""`headrace key`: API keys, made, listed and revoked."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from headrace.api.control.v1.intent_pb2 import ApiKey
from headrace.base.errors import InvalidRequest, NotFound, StartError
from headrace.bundle import intent, keys
from headrace.cli.gateway import own_key
from headrace.cli.guard import plain_errors, run
from headrace.cli.home import Home
from headrace.cli.intent import etcd_client, etcd_endpoints, grant_key
from headrace.cli.record import listed, table
from headrace.coord.etcd.client import EtcdClient

app = typer.Typer(
    help="API keys: who may ask, for which tenant, with which rights. A change counts everywhere within a second.",
    no_args_is_help=True,
)

ID_DIGITS = 12
_SPAN = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ID = re.compile(r"[0-9a-f]{8,64}")


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="The tenant the key speaks for; limits are the tenant's.")],
    name: Annotated[str, typer.Option(help="For people, e.g. laptop; usage and audit show it.")] = "",
    deployment: Annotated[list[str] | None, typer.Option(help="Allow only this deployment; may be repeated.")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="user (asks models, sees its tenant's usage and audit; the default) or operator (sees those of all "
            "tenants; asks models only with both); may be repeated."
        ),
    ] = None,
    priority: Annotated[
        str, typer.Option(help="The highest class its requests may have: batch, standard or interactive.")
    ] = "standard",
    adapter: Annotated[
        list[str] | None, typer.Option(help="Allow only this adapter, by its digest; may be repeated.")
    ] = None,
    expires_in: Annotated[
        str, typer.Option("--expires-in", help="Refuse it after this time, such as 90m, 12h or 30d (default: never).")
    ] = "",
) -> None:
    """Make an API key and print it, this once: only its hash is stored."""
    with plain_errors("key create"):
        endpoints = etcd_endpoints(Home.default())
        record = ApiKey(
            tenant=tenant,
            name=name,
            deployments=deployment or [],
            roles=role or [],
            priority=priority,
            adapters=adapter or [],
            expires_at=expiry(expires_in, datetime.now(UTC)) if expires_in else "",
        )
    run("key create", create_key(endpoints, record))


@app.command("list")
def list_(
    tenant: Annotated[str, typer.Option(help="Only those of this tenant.")] = "",
) -> None:
    """List the keys there are, by an id that is no secret: the start of the key's hash."""
    with plain_errors("key list"):
        endpoints = etcd_endpoints(Home.default())
    run("key list", list_keys(endpoints, tenant))


@app.command()
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            help="The key, or its id from `key list`; - reads it from standard input, out of sight of the process list."
        ),
    ],
) -> None:
    """Make a key invalid, within a second, at every gateway."""
    with plain_errors("key revoke"):
        endpoints = etcd_endpoints(Home.default())
    run("key revoke", revoke_key(endpoints, sys.stdin.readline().strip() if key == "-" else key))


@app.command()
def show() -> None:
    """Print the local user's key (HEADRACE_KEY_FILE, else the data folder's)."""
    with plain_errors("key show"):
        print(own_key(Home.default()))


def expiry(span: str, now: datetime) -> str:
    """The RFC 3339 time `span` (90m, 12h, 30d) after `now`; StartError shows what a span looks like."""
    found = _SPAN.fullmatch(span)
    if found is None or int(found[1]) == 0:
        raise StartError(f"--expires-in {span!r} is no time such as 90m, 12h or 30d")
    return (now + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])).isoformat(timespec="seconds")


async def create_key(endpoints: Sequence[str], record: ApiKey) -> None:
    """A fresh key with the rights in `record`, printed once."""
    key = intent.new_api_key()
    async with etcd_client(endpoints) as etcd:
        await grant_key(etcd, key, record)
    print(key)


async def list_keys(endpoints: Sequence[str], tenant: str = "") -> None:
    """Print the keys, of one tenant or all."""
    async with etcd_client(endpoints) as etcd:
        found = await listed(etcd, keys.API_KEYS, ApiKey)
    rows = [_row(hashed, record) for hashed, record in found if _is_of(record, tenant)]
    print(table(("ID", "TENANT", "NAME", "CREATED", "EXPIRES", "PRIORITY", "ROLES", "DEPLOYMENTS"), rows))


def _is_of(record: ApiKey | InvalidRequest, tenant: str) -> bool:
    return not tenant or (isinstance(record, ApiKey) and record.tenant == tenant)


def _row(hashed: str, record: ApiKey | InvalidRequest) -> Sequence[str]:
    shown = hashed[:ID_DIGITS]
    if isinstance(record, InvalidRequest):
        return (shown, "?", f"cannot be read: {record.message}", "", "", "", "", "")
    roles, deployments = ",".join(record.roles) or "user", ",".join(record.deployments) or "all"
    priority = record.priority or "standard"
    return (
        shown,
        record.tenant,
        record.name,
        record.created_at,
        record.expires_at or "never",
        priority,
        roles,
        deployments,
    )


async def revoke_key(endpoints: Sequence[str], key: str) -> None:
    """Take the key's record away, named by the key or its id; NotFound when there is none."""
    async with etcd_client(endpoints) as etcd:
        path = await _path_of(etcd, key) if _ID.fullmatch(key) else keys.api_key_key(intent.hash_api_key(key))
        if await etcd.get(path) is None:
            raise NotFound("this key is not known; nothing was revoked")
        await etcd.delete(path)
    print("revoked")


async def _path_of(etcd: EtcdClient, id_: str) -> str:
    paths = list((await etcd.range(keys.API_KEYS + id_)).entries)
    if len(paths) > 1:
        raise StartError(f"{len(paths)} keys have ids that begin with {id_}: give more of it")
    return paths[0] if paths else keys.api_key_key(id_)
