"""`headrace chat` and `headrace generate`: stream answers to a terminal or a pipe."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from headrace.api.common.v1 import answer_pb2, sampling_pb2
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.base.deadline import Deadline
from headrace.base.errors import HeadraceError, StartError
from headrace.cli import render
from headrace.cli.gateway import Access, Event, Gateway, connect, first_model

ANSWER_WITHIN_S = 600.0
HINT = "/reset forgets, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


class Printed:
    """An answer as it goes to standard output: what was written so far, and the finish record."""

    def __init__(self) -> None:
        self.text = ""
        self.finished = answer_pb2.AnswerFinished()

    async def stream(self, answer: AsyncGenerator[Event, None]) -> None:
        """Write the text as it comes; leaving early, in any way, cancels the call."""
        async with aclosing(answer) as events:
            async for event in events:
                if isinstance(event, answer_pb2.AnswerDelta):
                    self.text += event.text
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, answer_pb2.AnswerFinished):
                    self.finished = event


async def generate(
    given: Access,
    prompt: str,
    sampling: sampling_pb2.SamplingParams,
    *,
    model: str | None,
    as_chat: bool,
    timings: bool,
) -> None:
    """One answer to stdout; timings to stderr, so that a pipe gets the text alone."""
    deadline = Deadline.after(ANSWER_WITHIN_S)
    printed = Printed()
    async with connect(given) as gateway:
        name = await first_model(gateway, model, deadline=deadline)
        if as_chat:
            messages = [pb.ChatMessage(role="user", content=prompt)]
            answer = gateway.chat(name, messages, sampling, deadline=deadline)
        else:
            answer = gateway.generate(name, prompt, sampling, deadline=deadline)
        await printed.stream(answer)
    sys.stdout.write("\n")
    sys.stdout.flush()
    if timings:
        console = render.console(stderr=True)
        console.print(render.timings_table(printed.finished))
        console.print(render.finish_line(printed.finished), markup=False)


async def chat(given: Access, sampling: sampling_pb2.SamplingParams, *, model: str | None, system: str | None) -> int:
    """A conversation until end of input; Ctrl-C ends the answer that is streaming, not the conversation.

    1 when input came from a pipe and a turn failed, else 0.
    """
    failures = 0
    async with connect(given) as gateway:
        name = await first_model(gateway, model, deadline=Deadline.after(10))
        opening = [pb.ChatMessage(role="system", content=system)] if system else []
        messages = list(opening)
        lines = _lines_from_terminal(name) if sys.stdin.isatty() else _lines_from_pipe()
        for text in lines:
            if text == "/quit":
                break
            if text == "/reset":
                messages = list(opening)
            elif text.startswith("/"):
                print(f"no command {text!r}: {HINT}", file=sys.stderr)
            elif text:
                messages.append(pb.ChatMessage(role="user", content=text))
                answer = await _turn(gateway, name, messages, sampling)
                if answer is None:
                    failures += 1
                    messages.pop()
                else:
                    messages.append(pb.ChatMessage(role="assistant", content=answer))
    return 1 if failures and not sys.stdin.isatty() else 0


async def _turn(
    gateway: Gateway, model: str, messages: list[pb.ChatMessage], sampling: sampling_pb2.SamplingParams
) -> str | None:
    """One streamed turn; what was written of it when the user stopped it, None when it failed."""
    printed = Printed()
    answer = gateway.chat(model, messages, sampling, deadline=Deadline.after(ANSWER_WITHIN_S))
    turn = asyncio.ensure_future(printed.stream(answer))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, turn.cancel)
    try:
        await turn
    except asyncio.CancelledError:
        sys.stdout.write("\n(stopped)")
    except HeadraceError as error:
        sys.stdout.write("\n" if printed.text else "")
        sys.stdout.flush()
        print(f"headrace chat: {error.message} [{error.code.value}/{error.reason}]", file=sys.stderr)
        return None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    sys.stdout.write("\n")
    sys.stdout.flush()
    return printed.text


def _lines_from_terminal(model: str) -> Iterator[str]:
    """What the user types, stripped; ends at Ctrl-D, or at a second Ctrl-C in a row.

    Waits in the main thread, where line editing and Ctrl-C work. The event loop stands still meanwhile, which costs
    nothing: gRPC answers keepalive pings from threads of its own.
    """
    import readline  # noqa: F401  # gives `input` line editing and history, and is not built everywhere

    print(f"{model}: {HINT}")
    interrupted = False
    while True:
        try:
            with _interrupts():
                line = input("you> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if interrupted:
                print()
                return
            interrupted = True
            print(f"\n(Ctrl-C again leaves; {HINT})")
            continue
        interrupted = False
        yield line.strip()


def _lines_from_pipe() -> Iterator[str]:
    for line in sys.stdin.buffer:
        try:
            yield line.decode().strip()
        except UnicodeDecodeError as error:
            raise StartError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


@contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt at once: asyncio's own handler would only note it for later."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
