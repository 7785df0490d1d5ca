"""All real processes, on private ports, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.testkit.cluster import Cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """An empty cluster; the test starts what it needs, everything ends with the test."""
    made = Cluster(tmp_path)
    killed: list[str] = []
    try:
        yield made
    finally:
        killed = await made.close()
    assert killed == [], "every process drains within its time"


@pytest.fixture
async def fleet(cluster: Cluster) -> Cluster:
    """Stores, telemetry, router and gateway; the test adds its engines."""
    await cluster.start_stores()
    for kind in ("telemetry", "router", "gateway"):
        cluster.start_service(kind)
    await cluster.until_serving("telemetry", "router", "gateway")
    return cluster
