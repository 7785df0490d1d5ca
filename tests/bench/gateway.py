"""What the gateway itself costs: a real gateway, etcd and Redis, in front of an engine that costs nothing.

    .venv/bin/python tests/bench/gateway.py [--quick] [--only NAME …] [--json FILE]

The gateway has core 0 to itself as far as the machine lets it; engine, router and client share the others. CPU times
are those of the gateway's process, all its threads; on a busy machine they say more than tokens per second do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bundle.shipped import shipped_model_path
from headrace.testkit.cluster import DEPLOYMENT, Cluster
from headrace.text.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from gateway_client import Target

HERE = Path(__file__).parent
WORDS = "The headrace brings steady water to the mill and the wheel turns evenly all day long. "
MOST_TOKENS = 4000
"""Of an answer: more than are streamed while all streams are being opened and measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One gateway between its neighbours."""

    target: Target
    gateway_pid: int
    engine: str
    pace: subprocess.Popen[str]
    vocabulary: Any
    quick: bool

    def client(self, do: str, **asked: Any) -> dict[str, Any]:
        """One measurement."""
        asked |= {"do": do, "target": asdict(self.target)}
        command = [sys.executable, str(HERE / "gateway_client.py"), json.dumps(asked)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
        return dict(json.loads(done.stdout))

    def set_period(self, seconds: float) -> None:
        """The time between two steps of the engine."""
        assert self.pace.stdin is not None
        self.pace.stdin.write(f"{seconds}\n")
        self.pace.stdin.flush()

    def streams(self, protocol: str, count: int, rate: int) -> dict[str, Any]:
        """`count` streams that the engine serves with `rate` tokens a second, all together."""
        seconds = 4.0 if self.quick else 10.0
        self.set_period(count / rate)
        return self.client(
            "streams",
            protocol=protocol,
            count=count,
            seconds=seconds,
            most_tokens=MOST_TOKENS,
            gateway_pid=self.gateway_pid,
        )

    def engine_alone(self) -> dict[str, Any]:
        """That the engine is not what is measured."""
        self.set_period(0.0)
        return self.client("engine_speed", engine=self.engine, count=256, seconds=3.0)

    def first_tokens(self) -> dict[str, Any]:
        """What the gateway adds to the first token of a 1,000-token prompt."""
        self.set_period(0.005)
        text = ""
        while len(self.vocabulary.encode(text)) < 1000:
            text += WORDS
        return self.client("first_tokens", engine=self.engine, calls=100 if self.quick else 400, text=text)

    def memory(self) -> dict[str, Any]:
        """Memory over many requests, a fifth of which the client leaves."""
        self.set_period(0.002)
        count = 10_000 if self.quick else 100_000
        return self.client(
            "requests",
            count=count,
            concurrency=64,
            tokens=8,
            disconnects=0.2,
            gateway_pid=self.gateway_pid,
            warm_up=count // 5,
        )


MEASUREMENTS: Mapping[str, Any] = {
    "engine alone, 256 slots": Bench.engine_alone,
    "gRPC, 256 streams, 5,000 tokens/s": lambda bench: bench.streams("grpc", 256, 5_000),
    "gRPC, 256 streams, 10,000 tokens/s": lambda bench: bench.streams("grpc", 256, 10_000),
    "gRPC, 256 streams, 30,000 tokens/s": lambda bench: bench.streams("grpc", 256, 30_000),
    "SSE, 256 streams, 10,000 tokens/s": lambda bench: bench.streams("sse", 256, 10_000),
    "SSE, 256 streams, 30,000 tokens/s": lambda bench: bench.streams("sse", 256, 30_000),
    "gRPC, 1,500 streams, 10,000 tokens/s": lambda bench: bench.streams("grpc", 1500, 10_000),
    "first token, 1,000-token prompt": Bench.first_tokens,
    "requests, 20 % left": Bench.memory,
}


TARGETS = (
    ("gRPC, 256 streams, 30,000 tokens/s", "tokens_per_s", 10_000, 1),
    ("gRPC, 256 streams, 30,000 tokens/s", "tokens_per_core_second", 10_000, 1),
    ("gRPC, 1,500 streams, 10,000 tokens/s", "starved", 0, -1),
    ("first token, 1,000-token prompt", "added_ttft_ms", 3.0, -1),
    ("requests, 20 % left", "rss_growth_mb", 20.0, -1),
)
"""Measurement, value, bound; 1: at least that, -1: at most."""


@contextmanager
def neighbours(bundle_digest: str, vocabulary: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Engine and router; yields their address and what takes the pace."""
    command = [sys.executable, str(HERE / "gateway_neighbours.py"), bundle_digest, str(vocabulary)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"], process
        finally:
            process.terminate()


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started here stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def measured(names: list[str], *, quick: bool) -> dict[str, Any]:
    """All measurements named, against one gateway."""
    first, *others = sorted(os.sched_getaffinity(0))
    vocabulary = load_tokenizer(str(shipped_model_path()))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, on_cores(set(others) or {first}):
        cluster = Cluster(Path(folder))
        try:
            await cluster.start_stores()
            with neighbours(cluster.bundle_digest, vocabulary.vocab_size) as (address, pace):
                cluster.addresses["router"] = address
                with on_cores({first}):
                    child = cluster.start_service("gateway")
                await cluster.until_serving("gateway")
                http_port = int(cluster.http_addresses["gateway"].rpartition(":")[2])
                bench = Bench(
                    target=Target(cluster.addresses["gateway"], http_port, cluster.api_key, DEPLOYMENT),
                    gateway_pid=child.pid,
                    engine=address,
                    pace=pace,
                    vocabulary=vocabulary,
                    quick=quick,
                )
                for name in names:
                    found[name] = await asyncio.to_thread(MEASUREMENTS[name], bench)
                    show(name, found[name])
        except subprocess.CalledProcessError:
            print((cluster.logs / "gateway.log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            await cluster.close()
    return found


def show(name: str, values: Mapping[str, Any]) -> None:
    """One measurement as lines of a table."""
    print(name)
    for key, value in values.items():
        shown = f"{value:,.2f}" if isinstance(value, float) else value
        print(f"  {key:<26}{shown!s:>14}" if not isinstance(value, list) else f"  {key:<26}{value}")
    sys.stdout.flush()


def judge(found: Mapping[str, Any]) -> None:
    """How what was measured stands to its target."""
    for name, key, bound, sign in TARGETS:
        if name in found:
            value = found[name][key]
            met = "met" if sign * (value - bound) >= 0 else "MISSED"
            print(f"{met:<8}{name}: {key} {value:,.1f}, {'at least' if sign > 0 else 'at most'} {bound:,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="10,000 requests instead of 100,000, shorter windows")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="measurements whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    chosen = [n for n in MEASUREMENTS if not given.only or any(part in n for part in given.only)]
    results = asyncio.run(measured(chosen, quick=given.quick))
    judge(results)
    if given.json:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
