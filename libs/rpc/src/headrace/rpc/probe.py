"""`python -m headrace.rpc.probe HOST:PORT [SERVICE]`: exit 0 when it says SERVING; for container health checks."""

from __future__ import annotations

import asyncio
import sys

from headrace.base.deadline import Deadline
from headrace.rpc.client import Peer


async def probe(address: str, service: str = "") -> bool:
    """Whether `address` answers SERVING for `service` within 2 s."""
    async with Peer(address) as peer:
        return await peer.healthy(service, deadline=Deadline.after(2))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit(__doc__)
    raise SystemExit(0 if asyncio.run(probe(*sys.argv[1:])) else 1)
