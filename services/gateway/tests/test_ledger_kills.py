"""Real processes killed at random: every request is one row, with the tokens its client got."""

import json
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from headrace.testkit.eventually import eventually

LIVES, REQUESTS = 8, 10_000


class Telemetry:
    """`python -m headrace.telemetry` on one address, over as many lives as it takes."""

    def __init__(self, folder, log):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.folder = folder
        self._log = log
        self._process = None

    def start(self):
        command = [
            sys.executable,
            "-m",
            "headrace.telemetry",
            "--data-dir",
            str(self.folder),
            "--address",
            self.address,
        ]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stderr=log)

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def rows(self):
        """All rows, read from the file of a telemetry that is gone."""
        with duckdb.connect(str(self.folder / "telemetry.duckdb"), read_only=True) as connection:
            return connection.execute(
                "SELECT request_id, output_tokens, recovered, outcome, attempts FROM usage"
            ).fetchall()


@pytest.fixture
def telemetry(tmp_path):
    service = Telemetry(tmp_path / "telemetry", tmp_path / "telemetry.log")
    service.start()
    yield service
    service.kill()


class Life(subprocess.Popen):
    """One life of a gateway's ledger, killed at the block's end."""

    def __init__(self, *arguments):
        script = Path(__file__).with_name("ledger_life.py")
        super().__init__([sys.executable, str(script), *map(str, arguments)])

    def __exit__(self, *_):
        self.kill()
        self.wait(10)


def told(path):
    """What clients got: requests opened, tokens handed over, requests closed."""
    opened, tokens, closed = set(), Counter(), set()
    for line in path.read_text().splitlines():
        kind, name, *count = line.split(" ")
        if kind == "o":
            opened.add(name)
        elif kind == "t":
            tokens[name] += int(count[0])
        else:
            closed.add(name)
    return opened, tokens, closed


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def written(path, number, process):
    """Wait until the file has more lines, or its writer is done."""
    await eventually(lambda: lines(path) > number or process.poll() is not None, within_s=60, every_s=0.005)


async def test_ten_thousand_requests_over_lives_that_are_killed_are_one_row_each_with_every_token(tmp_path, telemetry):
    """Gateways and telemetry are killed at random; judged by what clients were told and what telemetry's file says."""
    chance, clients = random.Random(7), tmp_path / "clients"
    each = REQUESTS // (LIVES - 2)
    for life in range(LIVES):
        with Life(tmp_path / "ledger", telemetry.address, life, each, clients) as process:
            if life == LIVES - 1:
                assert process.wait(90) == 0
                break
            # The first line of a life comes after the recovery; a request makes 5 or so.
            await written(clients, lines(clients) + chance.randrange(each * 4, each * 5), process)
            if life % 2:
                telemetry.kill()
                telemetry.start()
    telemetry.kill()
    opened, tokens, closed = told(clients)
    rows = telemetry.rows()
    ids = [row[0] for row in rows]
    assert len(opened) >= REQUESTS
    assert len(ids) == len(set(ids))
    # A kill may come between the opening and its being told: one request per life at most.
    assert opened <= set(ids)
    assert len(set(ids) - opened) < LIVES
    unfinished = {row[0] for row in rows if row[2]}
    assert unfinished
    assert not unfinished & closed
    early = 0
    for name, counted, recovered, outcome, attempts in rows:
        assert counted == sum(attempt["output_tokens"] for attempt in json.loads(attempts)) or recovered
        assert (outcome == "GATEWAY_LOST") is recovered
        if counted != tokens[name]:
            # Noted, and killed before it was handed over.
            assert recovered
            assert tokens[name] < counted < tokens[name] + 20
            early += 1
    assert early < LIVES
