import threading

import duckdb
import pytest
from prometheus_client import REGISTRY

from headrace.telemetry.store import SpanStore
from headrace.telemetry.writer import SpanWriter, WriterSettings

TRACE = f"{1:032x}"


def settings(**changes):
    values = {"queue_spans": 100, "flush_period_s": 0.01, "keep_spans": 10_000, "keep_s": 3600, "trim_period_s": 60}
    return WriterSettings(**{**values, **changes})


def total(name, **labels):
    return REGISTRY.get_sample_value(f"headrace_telemetry_spans_{name}_total", labels) or 0.0


class StallingStore(SpanStore):
    """The real store on a disk that a test can stall or break."""

    def __init__(self, connection):
        super().__init__(connection)
        self.go = threading.Event()
        self.go.set()
        self.error = None

    def append(self, spans):
        self.go.wait(30)
        if self.error is not None:
            raise self.error
        super().append(spans)


@pytest.fixture
def store(tmp_path):
    store = StallingStore.open(str(tmp_path))
    yield store
    store.go.set()
    store.close()


async def test_offered_spans_are_stored_and_counted(store, make_span, eventually):
    before, writer = total("stored"), SpanWriter(store, settings())
    writer.start()
    assert writer.offer([make_span(span=1), make_span(span=2)]) == 2
    await eventually(lambda: len(store.trace(TRACE)) == 2)
    writer.close(5)
    assert total("stored") - before == 2
    assert writer.ended.result(0) is None


async def test_a_stalled_disk_fills_the_queue_and_the_surplus_is_refused_at_once_and_counted(
    store, make_span, eventually
):
    before, writer = total("dropped", reason="queue_full"), SpanWriter(store, settings(queue_spans=10))
    store.go.clear()
    writer.start()
    spans = [make_span(span=n) for n in range(1, 31)]
    assert writer.offer(spans[:10]) == 10
    await eventually(lambda: writer.offer(spans[10:11]) == 1)
    refused = total("dropped", reason="queue_full")
    assert writer.offer(spans[11:]) == 9
    assert writer.offer(spans[:1]) == 0
    assert total("dropped", reason="queue_full") - refused == 11
    assert refused >= before
    store.go.set()
    await eventually(lambda: len(store.trace(TRACE)) == 20)
    writer.close(5)


async def test_closing_writes_what_waits_and_refuses_what_comes_later(store, make_span):
    writer = SpanWriter(store, settings(flush_period_s=0.2))
    writer.start()
    writer.offer([make_span(span=n) for n in range(1, 51)])
    writer.close(5)
    assert writer.offer([make_span()]) == 0
    assert len(store.trace(TRACE)) == 50


async def test_closing_is_bounded_when_the_disk_does_not_answer(store, make_span):
    writer = SpanWriter(store, settings())
    store.go.clear()
    writer.start()
    writer.offer([make_span()])
    writer.close(0.1)
    assert not writer.ended.done()
    store.go.set()
    writer.ended.result(5)


async def test_a_failed_write_costs_its_batch_and_the_next_one_is_stored(store, make_span, eventually):
    before, writer = total("dropped", reason="write_failed"), SpanWriter(store, settings())
    store.error = duckdb.IOException("IO Error: no space left")
    writer.start()
    writer.offer([make_span(span=1)])
    await eventually(lambda: total("dropped", reason="write_failed") - before == 1)
    store.error = None
    writer.offer([make_span(span=2)])
    await eventually(lambda: [span.span_id for span in store.trace(TRACE)] == [f"{2:016x}"])
    writer.close(5)


async def test_a_database_that_is_beyond_use_ends_the_writer_with_its_error(store, make_span):
    writer = SpanWriter(store, settings())
    store.error = duckdb.FatalException("database has been invalidated")
    writer.start()
    writer.offer([make_span()])
    with pytest.raises(duckdb.FatalException):
        writer.ended.result(5)
    writer.close(5)


async def test_old_spans_are_deleted_while_it_runs(store, make_span, eventually):
    before, writer = total("trimmed"), SpanWriter(store, settings(keep_spans=10, trim_period_s=0.01))
    writer.start()
    writer.offer([make_span(span=n) for n in range(1, 31)])
    await eventually(lambda: total("trimmed") - before == 20)
    writer.close(5)
    assert [int(span.span_id, 16) for span in store.trace(TRACE)] == list(range(21, 31))
