"""Run as a script between us and a server: ask the kernel to kill this process with its parent, then exec.

    python tether.py PARENT_PID BINARY [ARGUMENT...]

A script instead of Popen's `preexec_fn`, because Python code between fork and exec can deadlock in a process with
threads, and every process with gRPC has threads. Costs 15 ms. The setting survives exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the server."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    # A parent that died before the call above sends no signal any more; by then we have another parent.
    if os.getppid() != parent:
        sys.exit("the parent died during the start")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
