"""The worker process: ``python -m headrace.engine.worker SOCKET_FD PARENT_PID``, started by `WorkerClient`."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import socket
import sys

from headrace.base.errors import StartError
from headrace.base.turns import take_usual_turns
from headrace.engine.worker.assembly import assemble
from headrace.engine.worker.connection import Connection, ShellGone
from headrace.engine.worker.messages import Configure, Failed, StartFailed

_PR_SET_PDEATHSIG = 1


def main(socket_fd: int, parent_pid: int) -> int:
    """Serve until the shell closes its end (0), or cannot start (1); any exception is told to the shell and raised."""
    _die_with(parent_pid)
    take_usual_turns()  # the shell's short ones are inherited, and this process computes
    shell = Connection(socket.socket(fileno=socket_fd))
    try:
        _serve(shell)
    except ShellGone:
        return 0
    except StartError as error:
        shell.send(StartFailed(text=str(error)))
        return 1
    except Exception as error:
        shell.send(Failed(text=f"{type(error).__name__}: {error}"))
        raise
    return 0


def _serve(shell: Connection) -> None:
    (message,) = shell.receive(math.inf)
    if not isinstance(message, Configure):
        raise TypeError(f"the first message must be Configure, not {type(message).__name__}")
    loop, ready = assemble(message.config)
    # What lives from here on is small and free of cycles, and a full collection takes tens of milliseconds of a step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    shell.send(ready)
    try:
        loop.serve(shell)
    finally:
        loop.close()


def _die_with(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, even in the middle of a long step that reads no socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
