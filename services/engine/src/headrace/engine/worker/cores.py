"""How many threads may compute."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use at once: its affinity, or a container's quota if that is less (at least 1).

    More threads than that wait for each other's time slices at every layer (vllm#10971).
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2 here
        return cores
