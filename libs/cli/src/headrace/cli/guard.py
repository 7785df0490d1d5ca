"""How a command ends: its exit status, and one line for whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import typer

from headrace.base.errors import HeadraceError, StartError

INTERRUPTED = 130
READER_GONE = 141
"""Statuses as shells have them: 128 + SIGINT, 128 + SIGPIPE."""


@contextlib.contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Guard 3 of 3: a failure is one line on stderr and status 1, never a traceback."""
    try:
        yield
    except StartError as error:
        _fail(f"headrace {command}: {error}")
    except HeadraceError as error:
        again = f"; try again in {error.retry_after_s:.1f} s" if error.retry_after_s else ""
        _fail(f"headrace {command}: {error.message} [{error.code.value}/{error.reason}]{again}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(READER_GONE) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if os.environ.get("HEADRACE_LOG_LEVEL") == "debug":
            raise
        said = " ".join(str(error).split())
        _fail(f"headrace {command}: {type(error).__name__}: {said} (HEADRACE_LOG_LEVEL=debug shows where)")


def _fail(line: str) -> None:
    print(line, file=sys.stderr)
    raise typer.Exit(1)


def run(command: str, work: Coroutine[Any, Any, int | None]) -> None:
    """Run `work` as the command; its result, if any, is the exit status."""
    with plain_errors(command):
        status = asyncio.run(work)
        if status:
            raise typer.Exit(status)
