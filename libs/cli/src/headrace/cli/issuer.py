"""`headrace issuer`: whose signed tokens (JWT, OpenID Connect) are accepted instead of API keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace.api.control.v1.intent_pb2 import Issuer
from headrace.base.errors import InvalidRequest, NotFound
from headrace.bundle import keys
from headrace.cli.guard import plain_errors, run
from headrace.cli.home import Home
from headrace.cli.intent import etcd_client, etcd_endpoints
from headrace.cli.record import change, listed, table

app = typer.Typer(
    help="Token issuers: clients may send `authorization: Bearer <JWT>` signed by one of them instead of an API key. "
    "A change counts at every gateway within a second.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="The issuer's name here, e.g. company-sso.")]


@app.command("set")
def set_(
    name: Name,
    issuer: Annotated[str, typer.Option(help="The `iss` claim of its tokens, to the letter.")],
    audience: Annotated[list[str], typer.Option(help="Accept tokens with this `aud` claim; may be repeated.")],
    jwks: Annotated[
        str, typer.Option(metavar="URL|FILE", help="Its public keys: an https:// URL, or a file on every gateway.")
    ],
    tenant_claim: Annotated[str, typer.Option(help="The claim that names the tenant.")] = "tenant",
    roles_claim: Annotated[str, typer.Option(help="The claim that lists roles: user, operator.")] = "roles",
    priority: Annotated[
        str, typer.Option(help="The highest class of its requests: batch, standard or interactive.")
    ] = "standard",
    deployment: Annotated[list[str] | None, typer.Option(help="Allow only this deployment; may be repeated.")] = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Let it speak for this tenant only; may be repeated. Then no operators.")
    ] = None,
) -> None:
    """Accept an issuer's tokens, or replace what was said of it before."""
    with plain_errors("issuer set"):
        endpoints = etcd_endpoints(Home.default())
        record = Issuer(
            name=name,
            issuer=issuer,
            audiences=audience,
            jwks=jwks if "://" in jwks else str(Path(jwks).absolute()),
            tenant_claim=tenant_claim,
            roles_claim=roles_claim,
            priority=priority,
            deployments=deployment or [],
            tenants=tenant or [],
        )
    run("issuer set", set_issuer(endpoints, record))


@app.command("list")
def list_() -> None:
    """List the issuers whose tokens are accepted."""
    with plain_errors("issuer list"):
        endpoints = etcd_endpoints(Home.default())
    run("issuer list", list_issuers(endpoints))


@app.command()
def delete(name: Name) -> None:
    """Accept an issuer's tokens no longer."""
    with plain_errors("issuer delete"):
        endpoints = etcd_endpoints(Home.default())
    run("issuer delete", delete_issuer(endpoints, name))


async def set_issuer(endpoints: Sequence[str], record: Issuer) -> None:
    """Write the record, validated."""
    async with etcd_client(endpoints) as etcd:
        await change(etcd, keys.issuer_key(record.name), Issuer, lambda before: record)
    print(f"tokens of {record.issuer} for {', '.join(record.audiences)} are accepted")


async def list_issuers(endpoints: Sequence[str]) -> None:
    """Print them as a table."""
    async with etcd_client(endpoints) as etcd:
        found = await listed(etcd, keys.ISSUERS, Issuer)
    head = ("NAME", "ISSUER", "AUDIENCES", "KEYS", "TENANT CLAIM", "TENANTS", "DEPLOYMENTS", "PRIORITY")
    print(table(head, [_row(name, record) for name, record in found]))


def _row(name: str, record: Issuer | InvalidRequest) -> Sequence[str]:
    if isinstance(record, InvalidRequest):
        return (name, f"cannot be read: {record.message}", "", "", "", "", "", "")
    return (
        name,
        record.issuer,
        ",".join(record.audiences),
        record.jwks,
        record.tenant_claim or "tenant",
        ",".join(record.tenants) or "all",
        ",".join(record.deployments) or "all",
        record.priority or "standard",
    )


async def delete_issuer(endpoints: Sequence[str], name: str) -> None:
    """Delete its record; NotFound when there is none."""
    async with etcd_client(endpoints) as etcd:
        if await etcd.get(keys.issuer_key(name)) is None:
            raise NotFound(f"issuer {name!r} is not known; nothing was deleted")
        await etcd.delete(keys.issuer_key(name))
    print("deleted")
