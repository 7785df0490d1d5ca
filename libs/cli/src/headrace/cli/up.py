"""`headrace up`: start the stack, wait until it can generate, show one answer if asked, stay until told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import StartError
from headrace.base.tls import TlsSettings
from headrace.cli import render
from headrace.cli.gateway import Access, connect
from headrace.cli.home import Home
from headrace.cli.readiness import Readiness
from headrace.cli.stack import LocalStack, StackSettings

DEMO_TOKENS = 96
DEMO_WITHIN_S = 120.0
LOOK_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `headrace up` was asked to do; `ready_within_s` bounds the wait for the first replica."""

    stack: StackSettings
    demo: bool
    once: bool
    prompt: str
    ready_within_s: float = 300.0


class Ticker:
    """Progress lines with the seconds since the command began."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        try:
            self._console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {escape(text)}")
        except OSError:
            pass  # the terminal was closed: the drain that follows matters more than its telling


class Orders:
    """What the user's signals ask for: stop, and with Ctrl-C while stopping, hurry."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self.stop = asyncio.Event()
        self.hurried = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: signal.Signals) -> None:
        # A closing terminal sends several kinds at once; only an impatient user sends SIGINT once more.
        if self.stop.is_set() and number is signal.SIGINT:
            self.hurried = True
            self._stack.hurry()
        self.stop.set()

    async def heeded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or until told to stop; raises what it raises."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
        if not working.cancelled():
            working.result()


async def up(home: Home, settings: UpSettings) -> int:
    """Run it; returns the exit status. Whatever goes wrong, nothing of the stack is left running."""
    console = render.console()
    ticker = Ticker(console)
    stack = LocalStack(home, settings.stack, ticker)
    orders = Orders(stack)
    await stack.start()
    try:
        await orders.heeded(_serve(stack, settings, console, ticker))
    finally:
        orders.stop.set()
        killed = await stack.stop()
    if orders.hurried or killed:
        ticker(f"stopped, not cleanly: {', '.join(killed) or 'running answers'} had to be cut off")
        return 1
    ticker("stopped")
    return 0


async def _serve(stack: LocalStack, settings: UpSettings, console: Console, ticker: Ticker) -> None:
    await _until_able(stack, settings, ticker)
    access = Access(address=stack.addresses["gateway"], api_key=stack.api_key, tls=TlsSettings.edge_from_environ())
    if settings.demo:
        await demo(access, settings.stack.wanted.deployment, settings.prompt, console)
    if settings.once:
        return
    _say_how(stack, console)
    await stack.watch()


async def _until_able(stack: LocalStack, settings: UpSettings, ticker: Ticker) -> None:
    """Wait until the gateway serves and a replica of the wanted deployment is ready, telling each change."""
    deadline = Deadline.after(settings.ready_within_s)
    told: set[str] = set()
    async with Readiness(
        stack.addresses, settings.stack.wanted.deployment, replicas=stack.replicas, tls=stack.tls
    ) as readiness:
        while True:
            failed = stack.failed_start()
            if failed:
                raise StartError(failed)
            states, ready = await readiness.look()
            for state in states:
                if state not in told:
                    told.add(state)
                    ticker(state)
            if ready:
                return
            if deadline.remaining_s() < 0:
                raise StartError(f"not ready after {settings.ready_within_s:.0f} s: {'; '.join(states)}")
            await asyncio.sleep(LOOK_PERIOD_S)


async def demo(access: Access, model: str, prompt: str, console: Console) -> None:
    """One prompt through the gateway: the answer as it streams, then where the time went."""
    console.print(f"\n[bold]you[/bold]  {escape(prompt)}")
    console.print("[bold]answer[/bold]  ", end="")
    finished = answer_pb2.AnswerFinished()
    messages = [pb.ChatMessage(role="user", content=prompt)]
    sampling = sampling_pb2.SamplingParams(max_tokens=DEMO_TOKENS)
    async with connect(access) as gateway:
        answer = gateway.chat(model, messages, sampling, deadline=Deadline.after(DEMO_WITHIN_S))
        async with aclosing(answer) as events:
            async for event in events:
                if isinstance(event, answer_pb2.AnswerDelta):
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, answer_pb2.AnswerFinished):
                    finished = event
    console.print("\n")
    console.print(render.timings_table(finished))
    console.print(render.inter_token_line(finished), markup=False)
    console.print(render.finish_line(finished), markup=False)


def _say_how(stack: LocalStack, console: Console) -> None:
    scheme = "https" if TlsSettings.edge_from_environ().serves else "http"
    console.print(
        f"""
Headrace is up. From another terminal:
  headrace chat                     talk to it (streams)
  headrace generate "Once upon"     continue a text
  headrace status                   services, deployments, replicas
  headrace logs engine -f           what a service says
  headrace down                     stop everything (or press Ctrl-C here)
gRPC: {stack.addresses["gateway"]}  (headrace.api.inference.v1.InferenceService, reflection on)
HTTP: {scheme}://{stack.http_address}/v1  (OpenAI's protocol; this is the base URL of its clients)
API key: in {stack.home.key_file}   send it as  authorization: Bearer <key>
""",
        markup=False,
    )
