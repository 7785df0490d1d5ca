"""What the suite costs beside its engine alone: ``.venv/bin/python tests/bench/overhead.py [--rounds 5]``.

Both are started once and take turns of a few seconds, one frozen while the other answers, in the order A B B A …: the
speed of a machine's memory drifts by more within a minute than the suite costs. Printed are, for 1, 8 and 32 streams,
the ratio of throughputs and the difference of the median times to first token: median and spread over the pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

from comparison import spread
from contestants import Contestant, Engine, Suite
from workload import Prompts, closed_loop

from headrace.base.turns import take_short_turns
from headrace.bundle.shipped import shipped_model_path
from headrace.text.tokenizer import load_tokenizer

TOKENS, PROMPT_TOKENS = 128, 200
AWAKE_S = 1.0
"""After a thaw: heartbeats are as old as the frost, and a router looks ten times a second."""


async def turn(server: Contestant, prompts: Prompts, streams: int) -> dict[str, Any]:
    """One server's turn: every stream has two answers, a single one three."""
    server.thaw()
    await asyncio.sleep(AWAKE_S)
    await server.ask(prompts.take(1, 20)[0], 2)
    asked = prompts.take(max(3, 2 * streams), PROMPT_TOKENS)
    facts = (await closed_loop(server, asked, streams, TOKENS)).facts()
    server.freeze()
    return facts


async def compare(rounds: int, sizes: list[int], precision: str) -> dict[str, dict[str, list[float]]]:
    """Ratios and differences, by number of streams."""
    model = shipped_model_path()
    prompts = Prompts(load_tokenizer(model))
    engine, suite = Engine(model, precision), Suite(model, precision)
    found: dict[str, dict[str, list[float]]] = {}
    await engine.start(max(sizes), 512)
    engine.freeze()
    try:
        await suite.start(max(sizes), 512)
        suite.freeze()
        for streams in sizes:
            seen: dict[str, list[float]] = {"throughput": [], "ttft_ms": [], "engine_tokens_per_s": []}
            for number in range(rounds):
                pair = (engine, suite) if number % 2 == 0 else (suite, engine)
                facts = {server.name: await turn(server, prompts, streams) for server in pair}
                alone, whole = facts[engine.name], facts[suite.name]
                seen["throughput"].append(whole["tokens_per_s"] / alone["tokens_per_s"])
                seen["ttft_ms"].append(whole["ttft_ms"]["p50"] - alone["ttft_ms"]["p50"])
                seen["engine_tokens_per_s"].append(alone["tokens_per_s"])
            found[str(streams)] = seen
            print(
                f"{streams:2} streams: suite / engine {spread(seen['throughput'], 3)}, TTFT p50"
                f" {statistics.median(seen['ttft_ms']):+.1f} ms ({min(seen['ttft_ms']):+.1f} to"
                f" {max(seen['ttft_ms']):+.1f}), engine {spread(seen['engine_tokens_per_s'], 0)} tokens/s",
                flush=True,
            )
    finally:
        for server in (engine, suite):
            server.thaw()
            await server.stop()
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    given = parser.parse_args()
    take_short_turns()  # a client of its own machine would not wait for a core that the server computes on
    found = asyncio.run(compare(given.rounds, [int(n) for n in given.streams.split(",")], given.precision))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
