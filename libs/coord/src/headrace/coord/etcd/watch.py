"""A prefix of etcd's keys as a map in memory that follows the store and outlives its outages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import structlog

from headrace.base.backoff import Backoff
from headrace.base.errors import HeadraceError
from headrace.coord.etcd.client import Change, EtcdClient

_log = structlog.get_logger(__name__)

_RELIST_S = 180.0
# A watch that lived this long was worth having, so the next failure is a new one.
_HEALTHY_S = 5.0


class PrefixMap:
    """All keys that begin with `prefix`: list, then watch from there; after any doubt list again.

    `run()` keeps it up to date until cancelled. Readers see whole states only: `snapshot` is replaced, never changed,
    and stays the last known one while etcd is away (`connected` is False then).
    """

    def __init__(self, client: EtcdClient, prefix: str, *, relist_s: float = _RELIST_S) -> None:
        self.prefix = prefix
        self.connected = False
        self.synced = asyncio.Event()  # set once the first list is there
        self._client = client
        self._relist_s = relist_s
        self._snapshot: Mapping[str, bytes] = MappingProxyType({})
        self._version = 0
        self._next_version = asyncio.Event()

    @property
    def snapshot(self) -> Mapping[str, bytes]:
        """Key → value; last known good. Empty until `synced`."""
        return self._snapshot

    @property
    def version(self) -> int:
        """0 until `synced`; grows with each change of the snapshot."""
        return self._version

    async def changed(self, after_version: int) -> int:
        """Wait until the version is above `after_version`, and return it."""
        while self._version <= after_version:
            await self._next_version.wait()
        return self._version

    async def run(self) -> None:
        """Follow the store until cancelled; failures of etcd are waited out, with growing delays."""
        backoff = Backoff(first_s=0.1, longest_s=2.0)
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started_s = clock()
                try:
                    await self._follow()
                except HeadraceError as error:
                    self._lose(error)
                    if clock() - started_s > _HEALTHY_S:
                        backoff.reset()
                    await asyncio.sleep(backoff.next_s())
        finally:
            self.connected = False

    async def _follow(self) -> None:
        """List and watch; returns when it is time for a full list, which heals whatever a watch may have missed."""
        listed = await self._client.range(self.prefix)
        self._replace({key: entry.value for key, entry in listed.entries.items()})
        self.synced.set()
        async with self._client.watch(self.prefix, after=listed.revision, prefix=True) as changes:
            self._gain()
            try:
                async with asyncio.timeout(self._relist_s * random.uniform(0.8, 1.2)):
                    async for batch in changes:
                        self._apply(batch)
            except TimeoutError:
                return

    def _gain(self) -> None:
        if not self.connected:
            self.connected = True
            _log.info("prefix_watch_established", prefix=self.prefix, keys=len(self._snapshot))

    def _lose(self, error: HeadraceError) -> None:
        # Once per outage, not once per try.
        if self.connected or not self.synced.is_set():
            _log.warning("prefix_watch_lost", prefix=self.prefix, reason=error.reason, error=error.message)
        self.connected = False

    def _apply(self, batch: Sequence[Change]) -> None:
        values = dict(self._snapshot)
        for change in batch:
            if change.entry is None:
                values.pop(change.key, None)
            else:
                values[change.key] = change.entry.value
        self._replace(values)

    def _replace(self, values: dict[str, bytes]) -> None:
        """The one place where the map changes; a list that found nothing new changes nothing."""
        if self._version and values == self._snapshot:
            return
        self._snapshot = MappingProxyType(values)
        self._version += 1
        passed, self._next_version = self._next_version, asyncio.Event()
        passed.set()
