"""What the user sees: answers, where the time went, the state of the stack."""

from __future__ import annotations

import errno
import statistics
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.api.common.v1 import answer_pb2
from headrace.api.control.v1 import control_service_pb2 as control_pb
from headrace.api.engine.v1 import engine_service_pb2 as engine_pb
from headrace.api.routing.v1 import routing_service_pb2 as routing_pb
from headrace.api.telemetry.v1 import telemetry_service_pb2 as telemetry_pb

PIPE_WIDTH = 200
_REPLICA_COLUMNS = (
    "replica", "phase", "age s", "running", "waiting", "booked", "free blocks", "indexed", "prefill tok/s", "ITL ms",
)  # fmt: skip


def _add(table: Table, *cells: str) -> None:
    """A row of plain text: brackets in a log line or a name are no markup."""
    table.add_row(*(Text(cell) for cell in cells))


def timings_table(finished: answer_pb2.AnswerFinished) -> Table:
    """Queue, prefill, first token, later tokens and total of one answer."""
    t = finished.timings
    later = list(t.inter_token_ms)
    table = Table(title="where the time went", box=box.SIMPLE, title_justify="left")
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("")
    _add(table, "queue", f"{t.queue_ms:.1f}", "admission, placement, engine queue")
    _add(table, "prefill", f"{t.prefill_ms:.1f}", f"{finished.usage.prompt_tokens} prompt tokens")
    _add(table, "first token (TTFT)", f"{t.first_token_ms:.1f}", "since admission")
    if later:
        _add(
            table,
            "each later token (ITL)",
            f"{statistics.median(later):.1f}",
            f"median of {len(later)}; fastest {min(later):.1f}, slowest {max(later):.1f}",
        )
    count = finished.usage.completion_tokens
    rate = count / (t.total_ms / 1000) if t.total_ms else 0.0
    _add(table, "total", f"{t.total_ms:.1f}", f"{count} tokens, {rate:.1f} tokens/s")
    return table


def inter_token_line(finished: answer_pb2.AnswerFinished) -> str:
    """Every later token's gap in milliseconds, in order."""
    return "later tokens, ms each: " + " ".join(f"{gap:.0f}" for gap in finished.timings.inter_token_ms)


def finish_line(finished: answer_pb2.AnswerFinished) -> str:
    """One line under an answer."""
    reason = answer_pb2.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower()
    attempts = f", {finished.attempts} attempts" if finished.attempts > 1 else ""
    return f"finish: {reason}, replica {finished.engine_id}{attempts}"


def services_table(rows: Sequence[tuple[str, int, str, str]]) -> Table:
    """Rows of (service, pid, address, state)."""
    table = Table(title="services", box=box.SIMPLE, title_justify="left")
    for column in ("service", "pid", "address", "state"):
        table.add_column(column)
    for name, pid, address, state in rows:
        _add(table, name, str(pid), address, state)
    return table


def deployments_table(status: control_pb.GetStatusResponse) -> Table:
    """Desired against ready, and the processes behind."""
    table = Table(title="deployments", box=box.SIMPLE, title_justify="left")
    for column in ("deployment", "desired", "ready", "saturated", "processes", "note"):
        table.add_column(column)
    for d in status.deployments:
        processes = ", ".join(f"{p.engine_id}={p.state}" for p in d.processes)
        notes = [d.reason, *(f"{p.engine_id}: {p.last_exit}" for p in d.processes if p.last_exit)]
        saturated = str(d.saturated) if d.HasField("saturated") else "unknown"
        _add(table, d.name, str(d.desired), str(d.ready), saturated, processes, "; ".join(n for n in notes if n))
    return table


def replicas_table(view: routing_pb.ListReplicasResponse) -> Table:
    """The router's view: standing, load and freshness of each replica; `indexed` are prefix blocks known there."""
    table = Table(title="replicas", box=box.SIMPLE, title_justify="left")
    for column in _REPLICA_COLUMNS:
        table.add_column(column)
    for r in view.replicas:
        h = r.heartbeat
        _add(
            table,
            h.engine_id,
            _standing(r),
            f"{r.age_s:.1f}",
            str(h.running),
            str(h.waiting),
            str(r.bookings),
            f"{h.free_blocks}/{h.total_blocks}",
            str(r.indexed_blocks),
            f"{h.prefill_tokens_per_s:.0f}" if h.HasField("prefill_tokens_per_s") else "unknown",
            f"{h.itl_ms:.1f}" if h.HasField("itl_ms") else "unknown",
        )
    return table


def _standing(replica: routing_pb.Replica) -> str:
    """Its phase, and what keeps requests from it or most of them."""
    phase = engine_pb.Phase.Name(replica.heartbeat.phase).removeprefix("PHASE_").lower()
    if not replica.fresh:
        phase = f"stale ({phase})"
    if replica.ejected_s:
        phase += f", ejected, probed in {replica.ejected_s:.1f} s"
    if 0 < replica.ramp < 1:
        phase += f", new: {replica.ramp:.0%} of its batch"
    return phase


def trace_table(trace: telemetry_pb.GetTraceResponse) -> Table:
    """The spans of one trace, indented by parent, with offsets in milliseconds."""
    table = Table(title=f"trace {trace.trace_id}", box=box.SIMPLE, title_justify="left")
    for column in ("service", "span", "start ms", "duration ms", "status"):
        table.add_column(column, justify="right" if "ms" in column else "left")
    known = {s.span_id: s for s in trace.spans}
    begin = min((s.start_unix_ns for s in trace.spans), default=0)

    def depth(span: telemetry_pb.Span) -> int:
        steps = 0
        while (parent := known.get(span.parent_span_id)) is not None and steps < 20:
            span, steps = parent, steps + 1
        return steps

    for span in trace.spans:
        offset = (span.start_unix_ns - begin) / 1e6
        _add(
            table, span.service, "  " * depth(span) + span.name, f"{offset:.1f}", f"{span.duration_ms:.1f}", span.status
        )
    return table


class _PlainConsole(Console):
    """Rich ends the process when a pipe's reader is gone; here a stack may have to be stopped first."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "the reader of the output is gone")


def console(*, stderr: bool = False) -> Console:
    """A console that does not wrap or highlight, and does not squeeze tables into a pipe or file."""
    stream = sys.stderr if stderr else sys.stdout
    return _PlainConsole(stderr=stderr, soft_wrap=True, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
