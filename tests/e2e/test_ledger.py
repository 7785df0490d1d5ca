"""What telemetry says that tenants used is what engines made, whatever was killed on the way."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import psutil

from headrace.cli.home import Home, StackRecord
from headrace.testkit.cluster import Cluster
from headrace.testkit.ledger_chaos import Storm, differences, ride_out


async def test_every_request_an_engine_saw_has_one_row_with_its_tokens_whatever_was_killed(cluster: Cluster) -> None:
    after = await ride_out(cluster, Storm(requests=1200))

    assert differences(after) == []
    assert len(after.kills) >= 3, "a gateway, an engine and telemetry were killed"
    assert any(row.recovered for row in after.rows), "a gateway died under running answers"
    assert any(len(row.attempts) > 1 for row in after.rows), "answers moved"
    assert any(row.outcome == "CANCELLED" for row in after.rows), "clients left"
    shown = await _shown_by_the_command(cluster)
    assert [int(each["requests"]) for each in shown] == [after.sums.requests]
    assert [int(each["prompt_tokens"]) for each in shown] == [after.sums.prompt_tokens]
    assert [int(each["output_tokens"]) for each in shown] == [sum(row.output_tokens for row in after.rows)]


async def _shown_by_the_command(cluster: Cluster) -> list[dict[str, str]]:
    """The sums that `headrace usage --json` prints."""
    home = Home(cluster.folder / "home")
    home.create()
    me = psutil.Process()
    home.write_record(
        StackRecord(
            pid=me.pid,
            create_time=me.create_time(),
            addresses=cluster.addresses,
            metrics=cluster.metrics_addresses,
            processes={},
            create_times={},
        )
    )
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace.cli", "usage", "--tenant", "tests", "--json"),
        env=os.environ | {"HEADRACE_HOME": str(home.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        printed, _ = await command.communicate()
    assert command.returncode == 0
    sums: list[dict[str, str]] = json.loads(printed)["sums"]
    return sums
