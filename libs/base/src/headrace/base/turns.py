"""How soon a process gets its turn on a core that a computing one holds.

Linux gives each runnable thread slices of 3 ms, and since 6.12 one that asks for shorter ones need not wait for the end
of another's. A token crosses three processes on its way to a client; beside a model that computes on every core each of
them would wait for the rest of a slice.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SHORT_NS = 200_000
"""Slice of a process that works for fractions of a millisecond at a time."""

# struct sched_attr of linux/sched/types.h: size, policy, flags, nice, priority, runtime, deadline, period, two clamps.
_ATTR = struct.Struct("<IIQiIQQQII")
_SET, _GET = {"x86_64": (314, 315), "aarch64": (274, 275)}.get(platform.machine(), (0, 0))
_ORDINARY = 0  # SCHED_OTHER


def take_short_turns(pid: int = 0) -> None:
    """Let a process's main thread, and threads and children it starts later, go first for a moment; 0 is this one.

    Asks for no privilege. Where the system knows no such thing nothing changes.
    """
    _set_slice(pid, SHORT_NS)


def take_usual_turns(pid: int = 0) -> None:
    """Take back `take_short_turns`: for a process that computes for milliseconds at a time."""
    _set_slice(pid, 0)


def slice_ns(pid: int = 0) -> int:
    """A process's slice in nanoseconds, its own or the system's; 0 where the system does not tell."""
    attr = ctypes.create_string_buffer(_ATTR.size)
    if _GET == 0 or _libc().syscall(_GET, pid, attr, _ATTR.size, 0) != 0:
        return 0
    return int(_ATTR.unpack(attr.raw)[5])


def stand_back(by: int = 5) -> None:
    """Let others go first for good, when they want the core: for what nobody waits for."""
    os.nice(by)


def _set_slice(pid: int, nanoseconds: int) -> None:
    if _SET == 0 or os.uname().sysname != "Linux" or os.sched_getscheduler(pid) != _ORDINARY:
        return
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    attr = _ATTR.pack(_ATTR.size, _ORDINARY, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    _libc().syscall(_SET, pid, ctypes.create_string_buffer(attr, len(attr)), 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
