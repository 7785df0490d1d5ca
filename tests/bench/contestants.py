"""The servers that are compared: how each is started with its best flags, asked, measured and ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from checkpoint import load_reference
from stream_client import Heard, post_stream

from headrace.api.common.v1 import sampling_pb2
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1 import inference_service_pb2_grpc as inference_grpc
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError
from headrace.base.turns import take_usual_turns
from headrace.cli.intent import Wanted
from headrace.rpc.client import Peer
from headrace.testkit.cluster import DEPLOYMENT, Cluster

CONTEXT = 8192
"""The model's own limit, in tokens."""

LLAMA_SERVER = "HEADRACE_BENCH_LLAMA_SERVER"
VLLM_PYTHON = "HEADRACE_BENCH_VLLM_PYTHON"


class NotStarted(Exception):
    """A server that ended or never answered; the text holds the end of its log."""


class Contestant:
    """A server under test.

    `start` leaves it able to answer `streams` requests at once of up to `context` tokens each, with the flags that are
    best for that; `ask` streams one greedy answer of exactly `tokens`.
    """

    name = ""
    keeps_running = False
    """True for a server that takes too long to start each round; it is frozen while others are measured."""

    async def start(self, streams: int, context: int) -> None:
        raise NotImplementedError

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        raise NotImplementedError

    def pids(self) -> list[int]:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def processes(self) -> list[psutil.Process]:
        """All processes of the server, children included."""
        found = {}
        for pid in self.pids():
            try:
                top = psutil.Process(pid)
                found |= {p.pid: p for p in (top, *top.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
        return list(found.values())

    def cpu_s(self) -> float:
        """CPU seconds used so far, user and system."""
        times = [p.cpu_times() for p in self.processes()]
        return sum(t.user + t.system for t in times)

    def memory_bytes(self) -> int:
        """Proportional set size, so that shared and mapped pages count once."""
        return sum(p.memory_full_info().pss for p in self.processes())

    def freeze(self) -> None:
        """Stop all its processes, so that nothing of it disturbs the others."""
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        """Let them go on."""
        for process in self.processes():
            process.resume()


class Served(Contestant):
    """One process that is started by a command and listens on a port."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object

    def _spawn(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(os.environ) | dict(environ),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=take_usual_turns,  # the short ones are the client's
        )

    async def _until_answering(self, within_s: float) -> None:
        began = time.perf_counter()
        while True:
            try:
                await self.ask([504, 288, 260], 1)
                return
            except (OSError, RuntimeError, HeadraceError, asyncio.IncompleteReadError, ValueError, IndexError):
                if self._process is None or self._process.poll() is not None or time.perf_counter() - began > within_s:
                    self._log.seek(0)
                    raise NotStarted(f"did not start:\n{self._log.read().decode()[-3000:]}") from None
                await asyncio.sleep(0.02)

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    async def stop(self) -> None:
        family = self.processes()
        if self._process:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, 20)
            except subprocess.TimeoutExpired:
                pass
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self._process = None


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LlamaServer(Served):
    """llama.cpp's own server, flags as its users recommend for many slots on a CPU."""

    name = "llama.cpp"

    def __init__(self, binary: str, model: Path) -> None:
        super().__init__()
        self._binary, self._model = binary, model

    async def start(self, streams: int, context: int) -> None:
        self.port = free_port()
        slots = ["-np", str(streams), "-c", str(streams * context), "--no-kv-unified", "-cb", "-fa", "on"]
        batch = ["-t", "2", "-tb", "2", "-b", "2048", "-ub", "512", "--no-context-shift", "--threads-http", "2"]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--no-webui"]
        self._spawn([self._binary, "-m", str(self._model), *slots, *batch, *where], {})
        await self._until_answering(60)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        body = {
            "prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_tokens": True,
        }  # fmt: skip
        heard = Heard(time.perf_counter())
        async for event in post_stream(self.port, "/completion", body):
            heard.note(event.get("tokens", ()) if not event.get("stop") else ())
        return heard

    def version(self) -> str:
        shown = subprocess.run([self._binary, "--version"], capture_output=True, text=True, timeout=20)
        return (shown.stdout + shown.stderr).strip().splitlines()[0]


class Vllm(Served):
    """vLLM's CPU build in its own virtual environment."""

    name = "vLLM-CPU"
    keeps_running = True

    def __init__(self, python: str, folder: Path) -> None:
        super().__init__()
        self._python, self._folder = python, folder

    async def start(self, streams: int, context: int) -> None:
        self.port = free_port()
        site = next(Path(self._python).parent.parent.glob("lib/python3*/site-packages"))
        preload = [str(p) for p in (*site.glob("**/libtcmalloc_minimal*.so*"), *site.glob("torch*/**/libgomp*.so*"))][
            :2
        ]
        command = [
            self._python, "-m",
            # The `vllm` command asks for a version that the CPU wheel does not have.
            "vllm.entrypoints.openai.api_server",
            "--model", str(self._folder), "--dtype", "bfloat16",
            "--max-model-len", str(CONTEXT), "--max-num-seqs", "32", "--max-num-batched-tokens", "2048",
            "--block-size", "128", "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "m",
        ]  # fmt: skip
        environ = {
            "LD_PRELOAD": ":".join(preload), "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_ATTN_SPLIT_KV": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        self._spawn(command, environ)
        await self._until_answering(400)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        heard = Heard(time.perf_counter())
        async for event in post_stream(self.port, "/v1/completions", body):
            for choice in event.get("choices", ()):
                heard.note(choice.get("token_ids") or ())
        return heard

    def version(self) -> str:
        command = [self._python, "-c", "from importlib.metadata import version; print(version('vllm_cpu'))"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


class Engine(Served):
    """Headrace's engine alone: text in, text out over gRPC."""

    name = "Headrace engine"

    def __init__(self, model: Path, precision: str) -> None:
        super().__init__()
        self._model, self._precision = model, precision
        self._peer: Peer | None = None

    async def start(self, streams: int, context: int) -> None:
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        settings = ["--model", str(self._model), "--precision", self._precision, "--address", address]
        self._spawn([sys.executable, "-m", "headrace.engine", *settings], {})
        self._peer = Peer(address)
        await self._until_answering(60)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        assert self._peer is not None
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = engine_pb.GenerateRequest(token_ids=prompt, sampling=sampling)
        stub = engine_grpc.EngineServiceStub(self._peer.channel)
        heard = Heard(time.perf_counter())
        async with self._peer.stream(stub.Generate, request, deadline=Deadline.after(600)) as events:
            async for event in events:
                heard.note(event.delta.token_ids)
        return heard

    async def stop(self) -> None:
        if self._peer:
            await self._peer.close()
        await super().stop()

    def version(self) -> str:
        from importlib.metadata import version

        return version("headrace-engine")


class Suite(Contestant):
    """All of Headrace: gateway, router, controller, telemetry, engine, etcd and Redis, as `headrace up` runs them."""

    name = "Headrace suite"

    def __init__(self, model: Path, precision: str) -> None:
        self._model, self._precision = model, precision
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._cluster: Cluster | None = None
        self._peer: Peer | None = None

    async def start(self, streams: int, context: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        cluster = self._cluster = Cluster(Path(self._folder.name))
        wanted = Wanted(deployment=DEPLOYMENT, replicas=1, precision=self._precision, model=str(self._model))
        await cluster.start_stores(wanted)
        for kind in ("telemetry", "router", "controller", "gateway"):
            cluster.start_service(kind)
        await cluster.until_serving("telemetry", "router", "controller", "gateway")
        await cluster.until_ready(f"{DEPLOYMENT}-1")
        self._peer = Peer(cluster.addresses["gateway"])
        await self.ask([504, 288, 260], 1)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        assert self._peer is not None
        assert self._cluster is not None
        sampling = sampling_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = pb.GenerateRequest(model=DEPLOYMENT, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        stub = inference_grpc.InferenceServiceStub(self._peer.channel)
        metadata = {"authorization": f"Bearer {self._cluster.api_key}"}
        heard = Heard(time.perf_counter())
        call = self._peer.stream(stub.Generate, request, deadline=Deadline.after(600), metadata=metadata)
        async with call as events:
            async for event in events:
                heard.note(event.delta.token_ids)
        return heard

    def pids(self) -> list[int]:
        assert self._cluster is not None
        return [
            *(child.pid for child in self._cluster.children.values()), self._cluster.etcd.pid, self._cluster.redis.pid
        ]  # fmt: skip

    async def stop(self) -> None:
        if self._peer:
            await self._peer.close()
        if self._cluster:
            await self._cluster.close()
        if self._folder:
            self._folder.cleanup()

    def version(self) -> str:
        from importlib.metadata import version

        return version("headrace-gateway")


class HuggingFace(Contestant):
    """transformers' generate in a process of its own, float32, one request at a time: what people try first."""

    name = "HF generate"
    keeps_running = True

    def __init__(self, source: Path) -> None:
        self._source = source
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self, streams: int, context: int) -> None:
        command = [sys.executable, __file__, str(self._source)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 20,
            preexec_fn=take_usual_turns,
        )
        await self.ask([504, 288, 260], 1)

    async def ask(self, prompt: Sequence[int], tokens: int) -> Heard:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        heard = Heard(time.perf_counter())
        async with self._turn:
            self._process.stdin.write(f"{tokens} {' '.join(map(str, prompt))}\n".encode())
            while (line := (await self._process.stdout.readline()).decode().strip()) != "end":
                heard.note([int(line)])
        return heard

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    async def stop(self) -> None:
        if self._process and self._process.returncode is None:
            self.thaw()
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()

    def version(self) -> str:
        from importlib.metadata import version

        return version("transformers")


def found(precision: str, source: Path, gguf: Path, folder: Path) -> list[Contestant]:
    """Everything that can be compared at `precision` on this machine; what is missing is said."""
    here: list[Contestant] = [Engine(gguf, precision), Suite(gguf, precision)]
    llama = os.environ.get(LLAMA_SERVER) or shutil.which("llama-server")
    if llama:
        here.append(LlamaServer(llama, gguf))
    else:
        print(f"llama.cpp left out: no llama-server on PATH, and {LLAMA_SERVER} names none")
    vllm = os.environ.get(VLLM_PYTHON)
    if precision != "bfloat16":
        return here
    if vllm:
        here.append(Vllm(vllm, folder))
    else:
        print(f"vLLM left out: {VLLM_PYTHON} does not name the Python of an environment that has vllm-cpu")
    here.append(HuggingFace(source))
    return here


def _serve_hugging_face(source: Path) -> None:
    """Answer lines of "tokens id id …" with one line per token as it is made, then "end"."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Lines(BaseStreamer):  # type: ignore[misc]
        prompt = True

        def put(self, value: torch.Tensor) -> None:
            if not self.prompt:
                print(int(value.reshape(-1)[-1]), flush=True)
            self.prompt = False

        def end(self) -> None:
            print("end", flush=True)

    model = load_reference(source)
    for line in sys.stdin:
        tokens, *ids = map(int, line.split())
        inputs = torch.tensor([ids])
        model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, streamer=Lines(),
        )  # fmt: skip


if __name__ == "__main__":
    _serve_hugging_face(Path(sys.argv[1]))
