import os
import shutil
import tempfile
import threading
from pathlib import Path

import duckdb
import pytest

from headrace.base.errors import StartError
from headrace.telemetry.store import FILE_NAME, SpanStore


@pytest.fixture
def store(tmp_path):
    store = SpanStore.open(str(tmp_path))
    yield store
    store.close()


def test_a_trace_reads_back_exactly_as_it_was_written(store, make_span):
    text = "quotes ' \" \\ NUL \0 emoji 🦦 newline \n"
    span = make_span(name=text, request_id="r", attributes={text: text, "empty": ""}, end_ns=2**63 - 1)
    store.append([span, make_span(trace=2)])
    assert store.trace(span.trace_id) == [span]
    assert store.trace("f" * 32) == []


def test_a_request_id_used_twice_finds_the_newest_trace(store, make_span):
    first, second = make_span(trace=1, request_id="again"), make_span(trace=2, request_id="again")
    child = make_span(trace=2, span=9)
    store.append([first])
    store.append([second, child])
    assert store.trace_of_request("again") == [second, child]
    assert store.trace_of_request("never") == []


def test_the_newest_traces_are_whole_even_when_their_spans_arrived_far_apart(store, make_span):
    store.append([make_span(trace=t, span=t) for t in range(1, 6)])
    store.append([make_span(trace=4, span=100, start_ns=9_000_000)])
    newest = store.newest(2)
    assert sorted((span.trace_id[-1], span.span_id[-2:]) for span in newest) == [("4", "04"), ("4", "64"), ("5", "05")]


def test_trimming_by_number_keeps_the_newest_and_goes_on_counting_after_a_restart(tmp_path, make_span):
    store = SpanStore.open(str(tmp_path))
    store.append([make_span(trace=1, span=n) for n in range(1, 101)])
    assert store.trim(keep_spans=40, keep_s=3600) == 60
    store.close()
    store = SpanStore.open(str(tmp_path))
    store.append([make_span(trace=1, span=n) for n in range(101, 111)])
    assert store.trim(keep_spans=40, keep_s=3600) == 10
    assert [int(span.span_id, 16) for span in store.trace(f"{1:032x}")] == list(range(71, 111))
    store.close()


def test_trimming_by_age_counts_from_arrival_not_from_the_spans_own_clock(store, make_span):
    store.append([make_span(start_ns=1, end_ns=2)])
    assert store.trim(keep_spans=1000, keep_s=3600) == 0
    assert store.trim(keep_spans=1000, keep_s=0) == 1


def test_a_bounded_number_of_spans_means_a_bounded_file(tmp_path, make_span):
    store = SpanStore.open(str(tmp_path))
    sizes = []
    for generation in range(12):
        spans = range(generation * 5000, (generation + 1) * 5000)
        store.append([make_span(trace=n, span=n + 1, attributes={"noise": os.urandom(100).hex()}) for n in spans])
        store.trim(keep_spans=5000, keep_s=3600)
        sizes.append((tmp_path / FILE_NAME).stat().st_size)
    store.close()
    # One generation is about 1 MB; twelve of them kept would be 12.
    assert max(sizes[6:]) <= 1.5 * max(sizes[:6]), sizes


def test_reading_from_other_threads_while_one_writes_and_deletes_gives_whole_batches(store, make_span):
    sizes, failures, stop = set(), [], threading.Event()

    def read():
        try:
            while not stop.is_set():
                sizes.add(len(store.trace(f"{1:032x}")) % 10)
        except duckdb.Error as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for batch in range(50):
        store.append([make_span(span=batch * 10 + n) for n in range(1, 11)])
        store.trim(keep_spans=200, keep_s=3600)
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert sizes == {0}


def test_a_data_folder_that_cannot_be_one_is_a_start_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"cannot make the data folder .*file/data: Not a directory.*--data-dir"):
        SpanStore.open(str(tmp_path / "file" / "data"))


@pytest.fixture
def read_only_folder():
    """A folder this process may look into and not write to; root may write anywhere, so it is somebody else here."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    owner = os.geteuid()
    if owner == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(owner)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_it_may_not_write_to_is_a_start_error_that_says_so(read_only_folder):
    with pytest.raises(StartError, match=rf"cannot open {read_only_folder}/{FILE_NAME}: .*Permission denied"):
        SpanStore.open(str(read_only_folder))


def test_a_file_that_is_no_database_is_a_start_error_and_is_left_as_it_was(tmp_path):
    (tmp_path / FILE_NAME).write_text("my thesis " * 1000)
    with pytest.raises(StartError, match=rf"{FILE_NAME}.*not a valid DuckDB database"):
        SpanStore.open(str(tmp_path))
    assert (tmp_path / FILE_NAME).read_text() == "my thesis " * 1000


def test_a_file_of_a_newer_version_is_a_start_error_that_names_both(tmp_path):
    SpanStore.open(str(tmp_path)).close()
    with duckdb.connect(str(tmp_path / FILE_NAME)) as connection:
        connection.execute("INSERT INTO starts VALUES (7, 0)")
    with pytest.raises(StartError, match=r"newer version \(schema 7, this one knows 1\)"):
        SpanStore.open(str(tmp_path))


def test_a_missing_folder_is_made(tmp_path, make_span):
    store = SpanStore.open(str(tmp_path / "a" / "b"))
    store.append([make_span()])
    store.close()
    assert (tmp_path / "a" / "b" / FILE_NAME).exists()
