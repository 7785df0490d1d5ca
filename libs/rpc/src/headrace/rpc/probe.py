"""`python -m headrace.rpc.probe [--edge] HOST:PORT [SERVICE]`: exit 0 when it says SERVING; for health checks.

Speaks TLS as HEADRACE_TLS_* say, or with --edge, for a gateway, as HEADRACE_GATEWAY_EDGE_TLS_* say.
"""

from __future__ import annotations

import asyncio
import sys

from headrace.base.deadline import Deadline
from headrace.base.tls import TlsSettings
from headrace.rpc.client import Peer


async def probe(address: str, service: str = "", tls: TlsSettings | None = None) -> bool:
    """Whether `address` answers SERVING for `service` within 2 s."""
    async with Peer(address, tls=tls) as peer:
        return await peer.healthy(service, deadline=Deadline.after(2))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--edge"]
    if not 1 <= len(words) <= 2:
        raise SystemExit(__doc__)
    edge = TlsSettings.edge_from_environ() if "--edge" in sys.argv else None
    raise SystemExit(0 if asyncio.run(probe(words[0], "".join(words[1:]), edge)) else 1)
