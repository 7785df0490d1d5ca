"""CPU time of an engine step in the gRPC shell: from the worker's event to the gateway's message.

    .venv/bin/python tests/bench/shell_cost.py [--sequences 1,8,32] [--steps 1000] [--rounds 3]

A real engine with the simulated backend, one Attach stream of a client in this process, and steps of 5 ms. Prints
microseconds per step of the shell's threads for each number of decoding sequences, the least of the rounds: a step is
one event in and one message out, whatever the number of sequences. A bare grpc.aio stream of as many messages costs 60
to 90 of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from contestants import free_port

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as rpc
from headrace.base.deadline import Deadline
from headrace.rpc.client import Peer

WARM_STEPS = 100
PROMPT = 40
STEP_MS = 5.0
START_S = 30.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all of its threads, to the nanosecond."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


async def requests(count: int, tokens: int) -> AsyncIterator[pb.AttachRequest]:
    """Hello, then `count` sequences at once; the stream stays open."""
    yield pb.AttachRequest(hello=pb.Hello(gateway_id="bench"))
    for slot in range(count):
        ids = [1 + slot + at for at in range(PROMPT + slot % 16)]  # no two end a block in the same step
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        yield pb.AttachRequest(
            submit=pb.Submit(slot=slot, request_id=f"r{slot}", attempt=1, token_ids=ids, sampling=sampling)
        )
    await asyncio.Event().wait()


async def shell_cost(peer: Peer, pid: int, sequences: int, steps: int) -> float:
    """CPU seconds of one step in the shell."""
    stub = rpc.EngineServiceStub(peer.channel)
    wanted = requests(sequences, WARM_STEPS + steps + 100)
    async with peer.stream(stub.Attach, wanted, deadline=Deadline.never()) as responses:
        seen = 0
        async for response in responses:
            if len(response.step.slots) < sequences:
                continue
            seen += 1
            if seen == WARM_STEPS:
                before = cpu_s(pid)
            if seen == WARM_STEPS + steps:
                return (cpu_s(pid) - before) / steps
    raise RuntimeError("the stream ended by itself")


async def measured(address: str, pid: int, counts: list[int], steps: int, rounds: int) -> dict[str, float]:
    """Microseconds per step, the least of the rounds, by number of sequences."""
    async with Peer(address) as peer:
        async with asyncio.timeout(START_S):
            await peer.channel.channel_ready()
            while not await peer.healthy(deadline=Deadline.after(5)):
                await asyncio.sleep(0.1)
        found: dict[str, float] = {}
        for count in counts:
            costs = [await shell_cost(peer, pid, count, steps) for _ in range(rounds)]
            found[str(count)] = round(min(costs) * 1e6, 1)
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    counts = [int(count) for count in asked.sequences.split(",")]
    address = f"127.0.0.1:{free_port()}"
    settings = ["--backend", "simulated", "--address", address, "--simulate-step-ms", "0"]
    settings += ["--simulate-itl-ms", str(STEP_MS), "--kv-cache-memory-bytes", str(4 << 30)]
    engine = subprocess.Popen([sys.executable, "-m", "headrace.engine", *settings], stderr=subprocess.DEVNULL)
    try:
        print(json.dumps(asyncio.run(measured(address, engine.pid, counts, asked.steps, asked.rounds)), indent=2))
    finally:
        engine.terminate()
        engine.wait(10)


if __name__ == "__main__":
    main()
