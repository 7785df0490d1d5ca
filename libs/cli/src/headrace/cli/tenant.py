"""`headrace tenant`: what each tenant may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from headrace.api.control.v1.intent_pb2 import Tenant
from headrace.base.errors import InvalidRequest, NotFound, StartError
from headrace.bundle import intent, keys
from headrace.cli.guard import plain_errors, run
from headrace.cli.home import Home
from headrace.cli.intent import etcd_client, etcd_endpoints
from headrace.cli.record import change, listed, table

app = typer.Typer(
    help="Tenants: limits over all gateways together, and shares of the fleet. A tenant without a record has no limits "
    "of its own. A change counts at every gateway within a second.",
    no_args_is_help=True,
)

NONE = "none"
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent_requests")
Name = Annotated[str, typer.Argument(help="The tenant, as its keys and tokens name it.")]


@app.command("set")
def set_(
    name: Name,
    requests_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Requests in any 60 s; none takes the limit away.")
    ] = None,
    tokens_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Prompt and answer tokens in any 60 s; none takes it away.")
    ] = None,
    tokens_per_day: Annotated[
        str | None, typer.Option(metavar="N", help="Prompt and answer tokens per UTC day; none takes it away.")
    ] = None,
    max_concurrent_requests: Annotated[
        str | None, typer.Option(metavar="N", help="Requests under way at once; none takes the limit away.")
    ] = None,
    max_output_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Longest answer it may ask for; none takes the limit away.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Its share when the fleet is full, relative to others' (new tenant: 1).")
    ] = None,
    deny: Annotated[
        list[str] | None,
        typer.Option(help="Refuse prompts in which this regular expression is found; may be repeated; none: no more."),
    ] = None,
) -> None:
    """Make or change a tenant; what is left out stays as it is. 0 as a limit lets nothing through."""
    with plain_errors("tenant set"):
        endpoints = etcd_endpoints(Home.default())
        numbers = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "tokens_per_day": tokens_per_day,
            "max_concurrent_requests": max_concurrent_requests,
            "max_output_tokens": max_output_tokens,
        }
        wanted = {field: _number(field, text) for field, text in numbers.items() if text is not None}
    run("tenant set", set_tenant(endpoints, name, wanted, weight=weight, deny=deny))


@app.command()
def show(name: Name) -> None:
    """Show a tenant's limits."""
    with plain_errors("tenant show"):
        endpoints = etcd_endpoints(Home.default())
    run("tenant show", show_tenant(endpoints, name))


@app.command("list")
def list_() -> None:
    """List the tenants that have a record."""
    with plain_errors("tenant list"):
        endpoints = etcd_endpoints(Home.default())
    run("tenant list", list_tenants(endpoints))


@app.command()
def delete(name: Name) -> None:
    """Take a tenant's record away: its keys still work, and it has no limits of its own any more."""
    with plain_errors("tenant delete"):
        endpoints = etcd_endpoints(Home.default())
    run("tenant delete", delete_tenant(endpoints, name))


def _number(field: str, text: str) -> int | None:
    if text == NONE:
        return None
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise StartError(f"--{field.replace('_', '-')} {text!r} is neither a whole number nor none")
    return int(text)


async def set_tenant(
    endpoints: Sequence[str],
    name: str,
    numbers: Mapping[str, int | None],
    *,
    weight: float | None = None,
    deny: Sequence[str] | None = None,
) -> None:
    """Change what is given (None as a number: no limit), keep the rest, and print the outcome."""

    def changed(before: Tenant | None) -> Tenant:
        after = Tenant(name=name)
        if before is not None:
            after.CopyFrom(before)
        for field, number in numbers.items():
            holder = after.limits if field in LIMITS else after
            if number is None:
                holder.ClearField(field)  # type: ignore[arg-type]
            else:
                _assign(holder, field, number)
        if weight is not None:
            after.weight = weight
        if deny is not None:
            del after.denied_patterns[:]
            after.denied_patterns.extend(pattern for pattern in deny if pattern != NONE)
        return after

    async with etcd_client(endpoints) as etcd:
        print(_words(await change(etcd, keys.tenant_key(name), Tenant, changed)))


def _assign(holder: object, field: str, number: int) -> None:
    try:
        setattr(holder, field, number)
    except ValueError:
        raise InvalidRequest(field, f"{number} is too large") from None


async def show_tenant(endpoints: Sequence[str], name: str) -> None:
    """Print it; NotFound when it has no record."""
    async with etcd_client(endpoints) as etcd:
        found = await etcd.get(keys.tenant_key(name))
    if found is None:
        raise NotFound(f"tenant {name!r} has no record, and so no limits of its own")
    print(_words(intent.decode(Tenant, found.value)))


async def list_tenants(endpoints: Sequence[str]) -> None:
    """Print them as a table."""
    async with etcd_client(endpoints) as etcd:
        found = await listed(etcd, keys.TENANTS, Tenant)
    head = ("TENANT", "REQUESTS/MIN", "TOKENS/MIN", "TOKENS/DAY", "CONCURRENT", "MAX OUTPUT", "WEIGHT", "DENIED")
    print(table(head, [_row(name, record) for name, record in found]))


def _row(name: str, record: Tenant | InvalidRequest) -> Sequence[str]:
    if isinstance(record, InvalidRequest):
        return (name, f"cannot be read: {record.message}", "", "", "", "", "", "")
    facts = _facts(record)
    patterns = str(len(record.denied_patterns)) if record.denied_patterns else ""
    return name, *(facts[field] for field in (*LIMITS, "max_output_tokens", "weight")), patterns


def _facts(tenant: Tenant) -> dict[str, str]:
    """Each number in words; "" where there is no limit."""
    limits = {f: str(getattr(tenant.limits, f)) if tenant.limits.HasField(f) else "" for f in LIMITS}  # type: ignore[arg-type]
    return limits | {
        "max_output_tokens": str(tenant.max_output_tokens) if tenant.HasField("max_output_tokens") else "",
        "weight": f"{tenant.weight:g}" if tenant.HasField("weight") else "1",
    }


def _words(tenant: Tenant) -> str:
    lines = [f"tenant {tenant.name}"]
    lines += [f"  {field.replace('_', ' '):24} {value or 'no limit'}" for field, value in _facts(tenant).items()]
    lines += [f"  {'denied':24} {pattern}" for pattern in tenant.denied_patterns]
    return "\n".join(lines)


async def delete_tenant(endpoints: Sequence[str], name: str) -> None:
    """Delete its record; NotFound when there is none."""
    async with etcd_client(endpoints) as etcd:
        if await etcd.get(keys.tenant_key(name)) is None:
            raise NotFound(f"tenant {name!r} has no record; nothing was deleted")
        await etcd.delete(keys.tenant_key(name))
    print("deleted")
