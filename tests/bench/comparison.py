"""The comparison as a table, JSON and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]

STREAMS = ("1", "8", "32")
COLOURS = {
    "Headrace engine": "#1f6fb2", "Headrace suite": "#6fb1e0", "llama.cpp": "#c8553d", "vLLM-CPU": "#e0a13d",
    "HF generate": "#9a9a9a",
}  # fmt: skip


def write_report(report: Report, out: Path) -> None:
    """`cpu-<precision>.json`, `.svg` and `.md` in `out`; the table is printed, too."""
    name = out / f"cpu-{report['precision']}"
    table = as_table(report)
    print(table)
    name.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    name.with_suffix(".md").write_text(table)
    plot(report, name.with_suffix(".svg"))


def spread(values: list[float], digits: int = 1) -> str:
    """median (min-max)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _column(report: Report, server: str, stage: str, pick: Callable[[Any], float], digits: int) -> str:
    rounds = report["results"][server].get(stage, [])
    return spread([pick(facts) for facts in rounds], digits) if rounds else "–"


def as_table(report: Report) -> str:
    """Markdown: medians over the rounds with their spread, one column per server."""
    servers = [s for s in report["results"] if s not in report["void"]]
    rows: list[tuple[str, str, Callable[[Any], float], int]] = [
        ("start to first token, s", "start_s", lambda f: f, 1),
        *((f"tokens/s, {n} streams", f"closed {n}", lambda f: f["tokens_per_s"], 0) for n in STREAMS),
        *((f"TTFT p50, {n} streams, ms", f"closed {n}", lambda f: f["ttft_ms"]["p50"], 0) for n in STREAMS),
        *((f"TTFT p99, {n} streams, ms", f"closed {n}", lambda f: f["ttft_ms"]["p99"], 0) for n in STREAMS),
        *((f"ITL p50, {n} streams, ms", f"closed {n}", lambda f: f["itl_ms"]["p50"], 1) for n in STREAMS),
        *((f"ITL p99, {n} streams, ms", f"closed {n}", lambda f: f["itl_ms"]["p99"], 1) for n in STREAMS),
        *((f"CPU s per 1,000 tokens, {n} streams", f"closed {n}", lambda f: f["cpu_s_per_1000_tokens"], 2)
          for n in STREAMS),
        ("memory at 32 streams, MB", "closed 32", lambda f: f["memory_mb"], 0),
        ("open loop: tokens/s", "open", lambda f: f["tokens_per_s"], 0),
        ("open loop: TTFT p50, ms", "open", lambda f: f["ttft_ms"]["p50"], 0),
        ("open loop: TTFT p99, ms", "open", lambda f: f["ttft_ms"]["p99"], 0),
        ("open loop: ITL p50, ms", "open", lambda f: f["itl_ms"]["p50"], 1),
        ("open loop: ITL p99, ms", "open", lambda f: f["itl_ms"]["p99"], 1),
        ("prefill of 1,024 tokens, tokens/s", "alone", lambda f: f["prefill_tokens_per_s"], 0),
        ("repeated 1,000-token prefix: TTFT, share of the cold one", "alone", lambda f: f["prefix"]["ratio"], 2),
        ("p99 ITL of 4 streams beside a new 4,000-token prompt, × median before", "newcomer", lambda f: f["ratio"], 1),
        ("that prompt's TTFT, ms", "newcomer", lambda f: f["newcomer_ttft_ms"], 0),
    ]  # fmt: skip
    lines = [
        f"# CPU, {report['precision']}: median (min-max) of {report['rounds']} rounds, {report['began']}", "",
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores ({', '.join(report['machine']['flags'])}), "
        f"Linux {report['machine']['kernel']}; prompts of {report['prompt_tokens']} tokens, {report['tokens']} to "
        f"answer, greedy; open loop: {report['open_loop_requests_per_s']} requests/s by chance. "
        + "; ".join(f"{name}: {version}" for name, version in report["versions"].items()) + ".", "",
        "| | " + " | ".join(servers) + " |", "|---" * (len(servers) + 1) + "|",
    ]  # fmt: skip
    for label, stage, pick, digits in rows:
        cells = [_column(report, server, stage, pick, digits) for server in servers]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", *ratios(report, servers)]
    lines += [f"{name} is void: {why}" for name, why in report["void"].items()]
    return "\n".join(lines) + "\n"


def ratios(report: Report, servers: list[str]) -> list[str]:
    """Headrace against each other server, round by round."""
    lines = []
    for ours in (s for s in servers if s.startswith("Headrace")):
        for theirs in (s for s in servers if s != ours and (s != "Headrace suite")):
            parts = []
            for n in STREAMS:
                pairs = zip(
                    report["results"][ours].get(f"closed {n}", []),
                    report["results"][theirs].get(f"closed {n}", []),
                    strict=False,
                )
                values = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]
                parts.append(f"{spread(values, 2)} × at {n}" if values else "")
            lines.append(f"- tokens/s, {ours} ÷ {theirs}: " + ", ".join(part for part in parts if part))
    return lines


def plot(report: Report, path: Path) -> None:
    """Throughput by streams, and the gaps between tokens."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    servers = [s for s in report["results"] if s not in report["void"]]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    panels = (
        (left, "tokens per second", lambda f: f["tokens_per_s"]),
        (middle, "time to first token, p50, ms", lambda f: f["ttft_ms"]["p50"]),
        (right, "inter-token latency, p99, ms", lambda f: f["itl_ms"]["p99"]),
    )
    for axes, title, pick in panels:
        width = 0.8 / len(servers)
        for n, server in enumerate(servers):
            for at, streams in enumerate(STREAMS):
                values = [pick(facts) for facts in report["results"][server].get(f"closed {streams}", [])]
                if not values:
                    continue
                middle_value = statistics.median(values)
                error = [[middle_value - min(values)], [max(values) - middle_value]]
                label = server if at == 0 else None
                axes.bar(
                    at + (n - (len(servers) - 1) / 2) * width, middle_value, width, yerr=error, capsize=2, label=label,
                    color=COLOURS.get(server, "#555555"),
                )  # fmt: skip
        axes.set_xticks(range(len(STREAMS)), [f"{s} streams" if s != "1" else "1 stream" for s in STREAMS])
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=9)
    cores = f"{report['machine']['cores']} cores {report['machine']['cpu']}"
    figure.suptitle(f"SmolLM2-135M, {report['precision']}, {cores}: 200-token prompts, 128-token answers", fontsize=11)
    figure.savefig(path)
    plt.close(figure)
