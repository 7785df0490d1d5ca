"""Faults that strike processes: a host process stands for the shell, so that it can be frozen and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

SOON = 20.0

HOST = """
import asyncio, subprocess, sys
from headrace.base.deadline import Deadline
from headrace.engine.core.sampling_plan import SamplingPlan
from headrace.engine.worker.client import WorkerClient, WorkerConfig
from headrace.engine.worker.config import BackendName

async def main(fault, keep_socket):
    client = WorkerClient()
    config = WorkerConfig(backend=BackendName.SIMULATED, fault=fault, simulate_step_ms=0.0, simulate_itl_ms=20.0,
                          simulate_prefill_tokens_per_s=1e6)
    await client.start(config, timeout_s=20.0)
    print("worker", client.pid, flush=True)
    if keep_socket:
        end = client._transport.get_extra_info("socket").fileno()
        print("keeper", subprocess.Popen(["sleep", "60"], pass_fds=(end,)).pid, flush=True)
    client.submit([1, 2, 3], SamplingPlan(max_tokens=50), deadline=Deadline.after(60))

    def say(event):
        for token in event.token_ids:
            print("token", token, flush=True)

    await client.follow(say)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class Host:
    process: subprocess.Popen[str]
    worker_pid: int

    def tokens(self, count: int) -> list[int]:
        assert self.process.stdout is not None
        return [int(self.process.stdout.readline().split()[1]) for _ in range(count)]

    def keeper(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline().split()[1])

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readlines()


@contextmanager
def host(fault: str, *, keep_socket: bool = False) -> Iterator[Host]:
    command = [sys.executable, "-c", HOST, fault, "yes" if keep_socket else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            worker_pid = int(process.stdout.readline().split()[1])
            yield Host(process, worker_pid)
        finally:
            process.kill()
    eventually(lambda: state(worker_pid) in "ZX")  # a worker never outlives its shell


def state(pid: int) -> str:
    """The process's state letter; X when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def eventually(condition: Callable[[], bool], within_s: float = SOON) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_worker_dies_with_its_parent_though_nothing_closes_the_socket() -> None:
    with host("", keep_socket=True) as it:
        keeper_pid = it.keeper()
        try:
            it.process.kill()
            it.process.wait(SOON)
            eventually(lambda: state(it.worker_pid) in "ZX")
        finally:
            os.kill(keeper_pid, signal.SIGKILL)


def test_death_after_n_tokens_takes_shell_and_worker_and_the_n_tokens_were_heard() -> None:
    with host("die_after_tokens=5") as it:
        assert len(it.rest()) == 5
        assert it.process.wait(SOON) == -signal.SIGKILL
        eventually(lambda: state(it.worker_pid) in "ZX")


def test_death_after_no_token_waits_for_the_first_sequence() -> None:
    with host("die_after_tokens=0") as it:
        assert it.rest() == []
        assert it.process.wait(SOON) == -signal.SIGKILL


def test_frost_after_n_tokens_stops_both_and_they_go_on_when_continued() -> None:
    with host("freeze_after_tokens=4") as it:
        before = it.tokens(4)
        eventually(lambda: state(it.process.pid) == "T" and state(it.worker_pid) == "T")
        for pid in (it.process.pid, it.worker_pid):
            os.kill(pid, signal.SIGCONT)
        assert len(before + it.tokens(46)) == 50


def test_garbage_after_n_tokens_lies_outside_the_vocabulary() -> None:
    with host("garbage_after_tokens=3") as it:
        tokens = it.tokens(6)
    assert [token < 49_152 for token in tokens] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(("fault", "least_s"), [("", 0.8), ("slow=3", 2.4)])
def test_a_slow_replica_takes_at_least_that_many_times_as_long(fault: str, least_s: float) -> None:
    with host(fault) as it:
        it.tokens(1)
        began = time.monotonic()
        it.tokens(40)
        # Simulated steps sleep: they may take longer on a busy machine, never shorter.
        assert time.monotonic() - began >= least_s
