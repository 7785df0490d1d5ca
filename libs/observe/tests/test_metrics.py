import socket
import urllib.request

import pytest

from headrace.base.errors import StartError
from headrace.observe.metrics import counter, gauge, histogram, observe_all, start_metrics_server


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_asking_twice_for_a_name_gives_the_same_metric():
    assert counter("t_twice_total", "doc", ("code",)) is counter("t_twice_total", "doc", ("code",))
    assert gauge("t_twice_gauge", "doc") is gauge("t_twice_gauge", "doc")
    assert histogram("t_twice_s", "doc", buckets=(1, 2)) is histogram("t_twice_s", "doc", buckets=(1, 2))


def test_asking_for_a_name_with_another_shape_is_refused():
    counter("t_shape_total", "doc", ("code",))
    with pytest.raises(ValueError, match="t_shape_total"):
        counter("t_shape_total", "doc", ("method",))
    with pytest.raises(ValueError, match="t_shape_total"):
        gauge("t_shape_total", "doc", ("code",))


def test_the_endpoint_shows_what_was_counted_without_a_creation_time_per_series():
    counter("t_shown_total", "doc", ("code",)).labels("OK").inc(3)
    histogram("t_shown_s", "doc", buckets=(0.5, 1.0)).observe(0.7)
    page = read(start_metrics_server("127.0.0.1:0"))
    assert 't_shown_total{code="OK"} 3.0' in page
    assert 't_shown_s_bucket{le="0.5"} 0.0' in page
    assert 't_shown_s_bucket{le="1.0"} 1.0' in page
    assert "_created" not in page


def test_a_taken_port_is_a_start_error_that_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=address):
            start_metrics_server(address)


@pytest.mark.parametrize("address", ["", "9090", ":9090", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_not_host_and_port_is_a_start_error(address):
    with pytest.raises(StartError, match="host:port"):
        start_metrics_server(address)


def test_values_observed_together_count_as_each_observed_alone():
    one, many = (histogram(f"t_together_{name}_s", "doc", buckets=(0.1, 1.0)) for name in "ab")
    values = [0.05, 0.1, 0.5, 1.0, 7.0, 0.0]
    for value in values:
        one.observe(value)
    observe_all(many, values)
    observe_all(many, [])

    alone, together = ([(s.labels, s.value) for s in h.collect()[0].samples] for h in (one, many))
    assert together == alone
