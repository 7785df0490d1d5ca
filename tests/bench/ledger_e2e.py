"""The ledger against what engines made, at length: ``python tests/bench/ledger_e2e.py --requests 10000``

All real processes; clients leave, gateways, engines and telemetry are killed and started again. Ends with status 1 and
a list when any of it does not agree; `tests/e2e/test_ledger.py` is the same, shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from headrace.testkit.cluster import Cluster
from headrace.testkit.ledger_chaos import STEADY, Aftermath, Storm, differences, ride_out


async def run(storm: Storm) -> int:
    """Ride out the storm and print what came of it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            after = await ride_out(cluster, storm)
        finally:
            await cluster.close()
    found = differences(after)
    print(f"{storm.requests} requests in {time.perf_counter() - began:.0f} s, killed: {dict(after.kills)}")
    _describe(after)
    print("\n".join(found) if found else "no difference")
    return 1 if found else 0


def _describe(after: Aftermath) -> None:
    rows, heard = after.rows, after.heard
    answered, left = sum(h.finished is not None for h in heard), sum(h.left for h in heard)
    print(f"clients: {answered} answered, {left} left, {dict(Counter(h.error for h in heard if h.error))} asked again")
    several, recovered = sum(len(row.attempts) > 1 for row in rows), sum(row.recovered for row in rows)
    outcomes = dict(Counter(row.outcome for row in rows).most_common())
    print(f"rows: {len(rows)}, {outcomes}, {recovered} recovered, {several} of several attempts")
    noted = Counter[str]()
    for row in rows:
        for attempt in row.attempts:
            noted[attempt.engine_id] += attempt.output_tokens
    for engine in STEADY:
        made = after.engine_tokens[engine]
        print(
            f"{engine}: made {made} tokens, the ledger has {noted[engine]}; {made - noted[engine]} were on their way to"
            " gateways that died"
        )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    raise SystemExit(asyncio.run(run(Storm(requests=given.requests, kills=given.kills, seed=given.seed))))


if __name__ == "__main__":
    main()
