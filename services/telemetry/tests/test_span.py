from headrace.telemetry.core.span import in_order, summarise


def test_spans_come_sorted_by_start_and_the_longer_first_when_they_start_together(make_span):
    late = make_span(span=1, start_ns=30, end_ns=40)
    inner = make_span(span=2, start_ns=10, end_ns=15)
    outer = make_span(span=3, start_ns=10, end_ns=50)
    assert in_order([late, inner, outer]) == (outer, inner, late)


def test_a_span_that_was_sent_twice_counts_once(make_span):
    span = make_span()
    assert in_order([span, span]) == (span,)
    assert summarise([span, span])[0].spans == 1


def test_a_summary_covers_the_whole_trace_and_is_named_after_its_root(make_span):
    root = make_span(span=1, name="gateway.Generate", start_ns=10, end_ns=90)
    child = make_span(span=2, parent=1, name="router.Place", request_id="r1", start_ns=20, end_ns=95)
    [summary] = summarise([child, root])
    assert (summary.root, summary.request_id, summary.spans) == ("gateway.Generate", "r1", 2)
    assert (summary.start_ns, summary.end_ns) == (10, 95)


def test_the_root_is_found_when_its_own_parent_belongs_to_the_client(make_span):
    server = make_span(span=5, parent=99, name="gateway.Generate", start_ns=10)
    # A clock that runs ahead made the child seem to start first.
    child = make_span(span=6, parent=5, name="engine.prefill", start_ns=9)
    assert summarise([child, server])[0].root == "gateway.Generate"


def test_a_trace_whose_spans_are_each_others_parents_still_has_a_summary(make_span):
    first, second = make_span(span=1, parent=2, name="a"), make_span(span=2, parent=1, name="b")
    assert summarise([second, first])[0].root == "a"


def test_summaries_come_newest_first(make_span):
    old, new = make_span(trace=1, start_ns=10), make_span(trace=2, start_ns=20)
    assert [summary.trace_id for summary in summarise([old, new])] == [new.trace_id, old.trace_id]
    assert summarise([]) == ()
