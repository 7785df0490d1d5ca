"""The real process: killed, locked out, without space, restarted."""

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import asynccontextmanager

import pytest

from headrace.base.errors import Unavailable
from headrace.observe.export import ExportSettings
from headrace.observe.tracing import Tracing, record_span

UNLIMITED = resource.RLIM_INFINITY


class Process:
    """One `python -m headrace.telemetry` whose log a test can read."""

    def __init__(self, data_dir, log, *, address="127.0.0.1:0", extra=(), **popen):
        self.log = log
        command = [sys.executable, "-m", "headrace.telemetry", "--data-dir", str(data_dir), "--address", address]
        with open(log, "wb") as stderr:
            self.popen = subprocess.Popen([*command, *extra], stderr=stderr, cwd="/", **popen)

    @property
    def events(self):
        lines = self.log.read_text().splitlines()
        return {line["event"]: line for line in map(json.loads, (text for text in lines if text.startswith("{")))}

    async def address(self, eventually):
        await eventually(lambda: "server_started" in self.events or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.log.read_text()
        return self.events["server_started"]["address"]

    async def ended(self, eventually):
        await eventually(lambda: self.popen.poll() is not None)
        return self.popen.returncode


@pytest.fixture
def start(tmp_path):
    """Start processes that end with the test, each with a log of its own."""
    started = []

    def begin(data_dir=tmp_path / "data", **options):
        started.append(Process(data_dir, tmp_path / f"log-{len(started)}", **options))
        return started[-1]

    yield begin
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(10)


@asynccontextmanager
async def traced(address):
    export = ExportSettings(period_s=0.02, longest_backoff_s=0.2)
    tracing = Tracing("gateway", "g1", address, export=export)
    await tracing.start()
    try:
        yield
    finally:
        await tracing.shutdown()


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def test_what_could_be_read_before_kill_9_can_be_read_after_the_next_start(
    start, connect, export_request, eventually
):
    first = start()
    async with connect(await first.address(eventually)) as client:
        for trace in range(1, 21):
            await client.export(export_request(*((trace, n, {}) for n in range(1, 101))))
        await eventually(lambda: client.find(trace_id=f"{20:032x}"))
        # Killed in the middle of writing more.
        await client.export(export_request(*((99, n, {}) for n in range(1, 5001))))
        first.popen.kill()
    await first.ended(eventually)
    second = start()
    async with connect(await second.address(eventually)) as client:
        for trace in range(1, 21):
            assert len((await client.get(trace_id=f"{trace:032x}")).spans) == 100
        await client.export(export_request((100, 1, {})))
        await eventually(lambda: client.find(trace_id=f"{100:032x}"))


async def test_a_stop_signal_writes_what_waits_and_ends_with_status_0(start, connect, export_request, eventually):
    first = start(extra=["--flush-period-s", "0.2"])
    async with connect(await first.address(eventually)) as client:
        await client.export(export_request((1, 1, {})))
        first.popen.send_signal(signal.SIGTERM)
        assert await first.ended(eventually) == 0
    second = start()
    async with connect(await second.address(eventually)) as client:
        assert len((await client.get(trace_id=f"{1:032x}")).spans) == 1


async def test_its_own_calls_make_no_spans(start, connect, export_request, eventually):
    process = start(extra=["--metrics-address", f"127.0.0.1:{unused_port()}"])
    async with connect(await process.address(eventually)) as client:
        await client.export(export_request((1, 1, {})))
        await eventually(lambda: client.find(trace_id=f"{1:032x}"))
        assert [t.trace_id for t in await client.traces(limit=1000)] == [f"{1:032x}"]
    url = f"http://{process.events['metrics_served']['address']}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    assert "headrace_telemetry_spans_received_total 1.0" in page
    assert "headrace_telemetry_spans_stored_total 1.0" in page


async def test_services_go_on_while_it_is_away_and_their_newest_spans_arrive_when_it_is_back(
    start, connect, eventually
):
    address = f"127.0.0.1:{unused_port()}"
    first = start(address=address)
    await first.address(eventually)
    async with traced(address), connect(address) as client:
        record_span("before", 1, 2, "", {"headrace.request_id": "before"})
        await eventually(lambda: client.find(request_id="before"))
        first.popen.kill()
        await first.ended(eventually)
        started = time.perf_counter()
        for n in range(1000):
            record_span("meanwhile", 1, 2, "", {"headrace.request_id": f"meanwhile-{n}"})
        assert time.perf_counter() - started < 1.0
        await start(address=address).address(eventually)
        async with connect(address) as client_again:
            await eventually(lambda: client_again.find(request_id="meanwhile-999"))
            assert await client_again.find(request_id="before")
            record_span("after", 1, 2, "", {"headrace.request_id": "after"})
            await eventually(lambda: client_again.find(request_id="after"))


async def one_line_of(process, eventually):
    assert await process.ended(eventually) == 1
    [line] = process.log.read_text().splitlines()
    return line


async def test_a_data_folder_in_use_is_one_line_that_names_the_process(start, eventually):
    first = start()
    await first.address(eventually)
    line = await one_line_of(start(), eventually)
    assert line.startswith("headrace telemetry: ")
    assert f"telemetry.duckdb is in use by process {first.popen.pid};" in line


async def test_no_space_at_the_start_is_one_line(start, eventually):
    # A limit on file size fails writes at the same place as a full disk does.
    process = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, UNLIMITED)))
    line = await one_line_of(process, eventually)
    assert "telemetry.duckdb: " in line
    assert "free space" in line


async def test_no_space_later_costs_spans_and_it_recovers_when_there_is_space(
    start, connect, export_request, eventually
):
    process = start(extra=["--metrics-address", "127.0.0.1:0"])
    async with connect(await process.address(eventually)) as client:
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (8192, UNLIMITED))
        await client.export(export_request(*((1, n, {"text": "x" * 100}) for n in range(1, 501))))
        await eventually(lambda: "span_write_failed" in process.events)
        assert await client.find(trace_id=f"{1:032x}") is None
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        await client.export(export_request((2, 1, {})))
        await eventually(lambda: client.find(trace_id=f"{2:032x}"))
        await eventually(lambda: "span_write_recovered" in process.events)
    url = f"http://{process.events['metrics_served']['address']}/metrics"
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    assert 'headrace_telemetry_spans_dropped_total{reason="write_failed"} 500.0' in page


async def test_without_a_data_folder_it_says_what_is_missing(eventually):
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "headrace.telemetry"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "--data-dir (or HEADRACE_TELEMETRY_DATA_DIR) is required" in done.stderr


async def test_usage_that_was_acknowledged_survives_kill_9_right_after(start, connect, eventually):
    first = start()
    async with connect(await first.address(eventually)) as client:
        for batch in range(10):
            await client.record_usage(f"r{batch}-{number}" for number in range(100))
        first.popen.kill()
    await first.ended(eventually)
    second = start()
    async with connect(await second.address(eventually)) as client:
        assert await client.record_usage(["r9-99"]) == 0
        assert await client.requests() == 1000


async def test_no_space_for_usage_is_told_to_its_sender_and_costs_nothing(start, connect, eventually):
    process = start()
    async with connect(await process.address(eventually)) as client:
        assert await client.record_usage(["before"]) == 1
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (8192, UNLIMITED))
        with pytest.raises(Unavailable):
            await client.record_usage(f"r{number}" for number in range(1000))
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        assert await client.record_usage(f"r{number}" for number in range(1000)) == 1000
        assert await client.requests() == 1001
        await eventually(lambda: "ledger_write_recovered" in process.events)
