"""Reading and changing single records of intent in etcd, for the commands that do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.api.control.v1.intent_pb2 import ApiKey, Issuer, Tenant
from headrace.base.errors import InvalidRequest, Unavailable
from headrace.bundle import intent, keys
from headrace.coord.etcd.client import EtcdClient

CHANGE_TRIES = 5
Record = TypeVar("Record", ApiKey, Tenant, Issuer)


async def change(etcd: EtcdClient, path: str, kind: type[Record], changed: Callable[[Record | None], Record]) -> Record:
    """Write what `changed` makes of the present record (None: there is none), validated; nobody's change is lost."""
    for _ in range(CHANGE_TRIES):
        found = await etcd.get(path)
        after = changed(intent.decode(kind, found.value) if found else None)
        value = intent.encode(after)
        if await (
            etcd.compare_and_put(path, value, found.mod_revision) if found else etcd.create_if_absent(path, value)
        ):
            return after
    raise Unavailable("this record is being changed by others all the time: nothing was written")


async def listed(etcd: EtcdClient, prefix: str, kind: type[Record]) -> list[tuple[str, Record | InvalidRequest]]:
    """Every record under `prefix` by its name there; what is wrong with one that cannot be read."""
    found: list[tuple[str, Record | InvalidRequest]] = []
    for path, entry in sorted((await etcd.range(prefix)).entries.items()):
        try:
            found.append((keys.name_in(path, prefix), intent.decode(kind, entry.value)))
        except InvalidRequest as error:
            found.append((keys.name_in(path, prefix), error))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, for people and for `awk`: an empty cell is a dash."""
    cells = [[cell or "-" for cell in row] for row in (head, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    return "\n".join("  ".join(cell.ljust(widths[n]) for n, cell in enumerate(row)).rstrip() for row in cells)
