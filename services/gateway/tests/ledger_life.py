"""One life of a gateway, as far as the ledger sees it: argv: folder, address of telemetry, life, requests, file.

Serves requests at random and tells the file what its clients got, as clients see it: after the note, so that a kill
may come between. The file: `o ID` opened, `t ID N` N tokens handed over, `c ID` closed.
"""

import asyncio
import os
import random
import sys
import time

from headrace.base.errors import Exhausted
from headrace.gateway.ledger import Ledger, TelemetrySink
from headrace.rpc.client import Peer


async def serve(ledger, name, chance, tell):
    account = ledger.open(
        request_id=name,
        tenant=f"tenant-{chance.randrange(3)}",
        credential="laptop",
        model="smol",
        bundle_digest="ab" * 16,
        admitted_unix_ns=time.time_ns(),
    )
    tell(f"o {name}")
    try:
        with account:
            account.prompt(10)
            for attempt in range(1, chance.choice((1, 1, 1, 2, 3)) + 1):
                account.attempt(attempt, f"engine-{attempt}", attempt)
                for _ in range(chance.randrange(5)):
                    tokens = chance.randrange(1, 20)
                    account.tokens(attempt, tokens)
                    tell(f"t {name} {tokens}")
                    if chance.random() < 0.3:
                        await asyncio.sleep(chance.random() * 0.01)
                account.attempt_ended(attempt, "OK")
            if chance.random() < 0.1:
                raise Exhausted("over", reason="QUOTA")
            if chance.random() < 0.1:
                raise asyncio.CancelledError
    except (Exhausted, asyncio.CancelledError):
        pass
    tell(f"c {name}")


async def live(folder, address, life, requests, path):
    output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chance = random.Random(int(life))
    ledger = Ledger(folder, TelemetrySink(Peer(address)), f"gateway-{life}")
    ledger.start()
    running = asyncio.create_task(ledger.run())
    numbers = iter(range(int(requests)))

    async def client():
        for number in numbers:
            await serve(ledger, f"{life}-{number}", chance, lambda line: os.write(output, f"{line}\n".encode()))
            await asyncio.sleep(chance.random() * 0.002)

    await asyncio.gather(*(client() for _ in range(64)))
    running.cancel()
    await asyncio.wait({running})
    await ledger.close(5.0)


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:]))
