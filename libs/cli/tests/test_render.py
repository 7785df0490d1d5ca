"""What the user reads: complete, and not squeezed when it goes to a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.api.common.v1 import answer_pb2
from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb
from headrace.cli import render


def text_of(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=render.PIPE_WIDTH).print(table)
    return out.getvalue()


def row_of(table: object, first: str) -> list[str]:
    """The words of the row that begins with `first`."""
    return next(line.split() for line in text_of(table).splitlines() if line.strip().startswith(first))


def finished(gaps: list[float]) -> answer_pb2.AnswerFinished:
    return answer_pb2.AnswerFinished(
        finish_reason=answer_pb2.FINISH_REASON_LENGTH,
        usage=answer_pb2.Usage(prompt_tokens=7, completion_tokens=len(gaps) + 1),
        timings=answer_pb2.Timings(
            queue_ms=1.5, prefill_ms=20, first_token_ms=22, inter_token_ms=gaps, total_ms=22 + sum(gaps)
        ),
        engine_id="m-1",
        attempts=1,
    )


def test_the_timings_table_has_every_stage_of_an_answer() -> None:
    table = render.timings_table(finished([10, 30, 20]))
    assert row_of(table, "queue")[:2] == ["queue", "1.5"]
    assert row_of(table, "prefill")[1:5] == ["20.0", "7", "prompt", "tokens"]
    assert row_of(table, "first token")[3] == "22.0"
    assert "20.0   median of 3; fastest 10.0, slowest 30.0" in text_of(table)
    assert row_of(table, "total")[1:] == ["82.0", "4", "tokens,", "48.8", "tokens/s"]
    assert render.inter_token_line(finished([10, 30, 20])) == "later tokens, ms each: 10 30 20"


def test_an_answer_of_one_token_has_no_later_tokens_and_one_without_times_does_not_divide_by_zero() -> None:
    assert "later token" not in text_of(render.timings_table(finished([])))
    assert row_of(render.timings_table(answer_pb2.AnswerFinished()), "total")[1] == "0.0"


def test_the_finish_line_tells_of_retries_only_when_there_were_some() -> None:
    answer = finished([])
    assert render.finish_line(answer) == "finish: length, replica m-1"
    answer.attempts = 2
    assert render.finish_line(answer) == "finish: length, replica m-1, 2 attempts"


def test_deployments_show_desired_against_ready_and_why_not() -> None:
    status = control_pb.GetStatusResponse(
        deployments=[
            control_pb.DeploymentStatus(
                name="m",
                desired=2,
                ready=1,
                reason="m-2 waits",
                saturated=1,
                processes=[
                    control_pb.EngineProcess(engine_id="m-1", state="ready"),
                    control_pb.EngineProcess(
                        engine_id="m-2", state="backing_off", last_exit="exit code 1: [no] memory"
                    ),
                ],
            )
        ]
    )
    text = text_of(render.deployments_table(status))
    assert "m-1=ready, m-2=backing_off" in text
    assert row_of(render.deployments_table(status), "m")[:4] == ["m", "2", "1", "1"]
    status.deployments[0].ClearField("saturated")
    assert row_of(render.deployments_table(status), "m")[:4] == ["m", "2", "1", "unknown"]
    assert "m-2 waits; m-2: exit code 1: [no] memory" in text, "brackets are text, not markup"


def test_replicas_say_stale_and_unknown_instead_of_a_number() -> None:
    beat = engine_pb.Heartbeat(engine_id="m-1", phase=engine_pb.PHASE_READY, free_blocks=3, total_blocks=4)
    view = routing_pb.ListReplicasResponse(replicas=[routing_pb.Replica(heartbeat=beat, fresh=False, age_s=12.34)])
    row = row_of(render.replicas_table(view), "m-1")
    assert row == ["m-1", "stale", "(ready)", "12.3", "0", "0", "0", "3/4", "0", "unknown", "unknown"]


def test_replicas_say_what_routers_hold_of_them() -> None:
    beat = engine_pb.Heartbeat(engine_id="m-1", phase=engine_pb.PHASE_READY, running=2, waiting=3)
    replica = routing_pb.Replica(heartbeat=beat, fresh=True, bookings=4, indexed_blocks=777, ejected_s=1.26, ramp=0.25)
    table = render.replicas_table(routing_pb.ListReplicasResponse(replicas=[replica]))
    assert "ready, ejected, probed in 1.3 s, new: 25% of its batch" in text_of(table)
    assert row_of(table, "m-1")[-7:] == ["2", "3", "4", "0/0", "777", "unknown", "unknown"]


def test_spans_are_indented_below_their_parents_even_in_a_broken_trace() -> None:
    def span(span_id: str, parent: str, start_ms: int, name: str) -> telemetry_pb.Span:
        return telemetry_pb.Span(
            span_id=span_id, parent_span_id=parent, start_unix_ns=start_ms * 10**6, name=name, service="s"
        )

    spans = [
        span("a", "", 100, "root"),
        span("b", "a", 101, "mid"),
        span("c", "b", 103, "leaf"),
        span("d", "d", 1, "x"),
    ]
    text = text_of(render.trace_table(telemetry_pb.GetTraceResponse(trace_id="t", spans=spans[:3])))
    lines = [line for line in text.splitlines() if any(n in line for n in ("root", "mid", "leaf"))]
    indents = [line.index(name) for line, name in zip(lines, ("root", "mid", "leaf"), strict=True)]
    assert [i - indents[0] for i in indents] == [0, 2, 4]
    assert lines[2].split()[2] == "3.0"
    assert "x" in text_of(render.trace_table(telemetry_pb.GetTraceResponse(spans=spans)))


def test_a_console_in_a_pipe_is_wide_and_raises_when_the_reader_is_gone() -> None:
    console = render.console()
    assert console.width == render.PIPE_WIDTH
    with pytest.raises(BrokenPipeError):
        console.on_broken_pipe()
