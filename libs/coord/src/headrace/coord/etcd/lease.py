"""A lease with a local end: whoever holds it knows when to stop, even if etcd cannot be asked."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import structlog

from headrace.base.backoff import Backoff
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.coord.etcd.client import EtcdClient

_log = structlog.get_logger(__name__)

_REVOKE_S = 1.0


class Lease:
    """A lease granted on entering, renewed in between, revoked on leaving.

        async with Lease(client, ttl_s=10) as lease:
            await client.put(key, value, lease.lease_id)
            await lease.lost.wait()

    It ends locally `ttl` after the last renewal *was sent*, on this process's monotonic clock, so not later than it
    runs out in etcd. Etcd may still end it early (an operator, a lost store): what must not happen twice needs a fence
    besides. A lost lease stays lost; a new grant is the owner's business.
    """

    def __init__(self, client: EtcdClient, ttl_s: int) -> None:
        self.lease_id = 0
        self.lost = asyncio.Event()
        self._client = client
        self._ttl_s = ttl_s
        self._ends = Deadline.after(0.0)
        self._keeper: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether it holds at this instant. Exact even where a blocked event loop could not set `lost` in time."""
        return not self.lost.is_set() and self._ends.remaining_s() > 0

    async def __aenter__(self) -> Self:
        """Grant it. Raises as the client does."""
        sent_s = time.monotonic()
        granted = await self._client.grant_lease(self._ttl_s)
        self.lease_id = granted.lease_id
        self._ends = Deadline(sent_s + granted.ttl_s)
        self._keeper = asyncio.create_task(self._keep(), name=f"lease-{self.lease_id:x}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Revoke it, so that waiting heirs need not wait for its end; that is a courtesy, and may fail."""
        was_alive = self.alive
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            if not self._keeper.cancelled():
                self._keeper.result()
        if was_alive:
            await self._revoke()

    async def _keep(self) -> None:
        """Renew at half of what remains; after a failure sooner, until the local end."""
        backoff = Backoff(first_s=0.1, longest_s=1.0)
        pause_s = self._ends.remaining_s() / 2
        try:
            while (remaining_s := self._ends.remaining_s()) > 0:
                await asyncio.sleep(min(pause_s, remaining_s))
                try:
                    if not await self._renew():
                        return
                    backoff.reset()
                    pause_s = self._ends.remaining_s() / 2
                except HeadraceError as error:
                    _log.warning("lease_renewal_failed", lease=f"{self.lease_id:x}", error=error.message)
                    pause_s = backoff.next_s()
            _log.warning("lease_expired", lease=f"{self.lease_id:x}")
        finally:
            self.lost.set()

    async def _renew(self) -> bool:
        """Ask etcd once; False when it is over."""
        sent_s = time.monotonic()
        ttl_s = await self._client.renew_lease(self.lease_id, deadline=self._ends)
        # An answer after the local end comes too late: the holder may have been told that it is over.
        if ttl_s <= 0 or self._ends.remaining_s() <= 0:
            _log.warning("lease_gone", lease=f"{self.lease_id:x}")
            return False
        self._ends = Deadline(sent_s + ttl_s)
        return True

    async def _revoke(self) -> None:
        try:
            async with asyncio.timeout(_REVOKE_S):
                await self._client.revoke_lease(self.lease_id)
        except (HeadraceError, TimeoutError) as error:
            _log.info("lease_revoke_failed", lease=f"{self.lease_id:x}", error=str(error))
