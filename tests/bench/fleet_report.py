"""The report on routing policies: tables, a plot, and everything as JSON."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

NAME = "router-policies"
POLICIES = ("least_completion_time", "least_loaded", "round_robin")
COLOURS = {"least_completion_time": "#1b6ca8", "least_loaded": "#e08e2b", "round_robin": "#8a8a8a"}

INTRODUCTION = """# Routing policies on simulated fleets

**Time is virtual**: nothing here was timed, so the numbers are the same on every machine, and
`.venv/bin/python tests/bench/fleet_policies.py` brings the same files again, in about four minutes of one core. Real
are the decisions: {replicas} replicas are the engine's own scheduler, KV memory and prefix cache; the router is the
router's own core, with its prefix index fed by the replicas' cache events (10 ms late) and its view by their heartbeats
(every 250 ms, read every 100 ms). What is modelled is what a step takes: 6 ms + 0.1 ms per prompt token + 0.15 ms per
sequence, ± 10 %: a model of about 8 billion parameters on one accelerator. A replica runs 64 sequences, computes up
to 1,024 tokens a step and caches 65,536. That nothing is spent on networks, tokens or Redis favours no policy.

Requests arrive by chance (Poisson), whatever became of those before. *Load* is their rate as a share of what the fleet
could answer without any prefix cache. The first quarter only fills the caches. Answers have 16 to 112 tokens; clients
allow 256, which is all that the router is told. Each number is the mean of {seeds} seeds, ± half of what lies between
the least and the greatest. *Per replica*: the fewest and the most requests that a replica got, as shares of the mean,
the worst of all seeds.

What the shapes are:

- **shared prefixes**: tenants with 4,096 tokens of their own before each question (32 to 256 tokens), as many tenants
  as fill 0.5, 1, 2 or 6 times one replica's cache, all equally busy;
- **conversations** of 8 turns: each turn repeats all that was said before, and comes about 2 s after the last answer;
- **siblings**: 4 to 16 requests at once over 1,024 tokens that nobody has seen before, and 64 of their own;
- **unique prompts** of 512 to 1,536 tokens, at the usual speed; where a prompt token takes ten times as long; and
  where *noisy neighbours* make each replica half as fast for 2 s in every 20, at a moment of its own;
- **bimodal**: prompts of 10 tokens, and one in five of 10,000.

![Time to first token and share of the prompt found in cache]({name}.svg)
"""

_HEAD = (
    "| shape | policy | TTFT p50 | p90 | p99 | completion p50 | p90 | from cache | per replica | output tok/s |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def write(report: dict[str, Any], folder: Path) -> None:
    """All three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps(report, indent=1) + "\n")
    introduction = INTRODUCTION.format(replicas=report["replicas"], seeds=len(report["seeds"]), name=NAME)
    (folder / f"{NAME}.md").write_text(f"{introduction}\n{verdict(report)}\n{tables(report)}")
    plot(report, folder / f"{NAME}.svg")


def tables(report: dict[str, Any]) -> str:
    """One table per load."""
    parts = []
    for load in sorted({r["load"] for r in report["results"]}):
        rows = [
            _row(report["about"][shape] if policy == POLICIES[0] else "", policy, runs)
            for shape in report["about"]
            for policy in POLICIES
            if (runs := _runs(report, shape, load, policy))
        ]
        parts.append(
            "\n".join([f"## Load {load:.0%}\n", "Milliseconds, except the last three.\n", _HEAD, *rows]) + "\n"
        )
    return "\n".join(parts)


def verdict(report: dict[str, Any]) -> str:
    """How the default policy's TTFT compares, shape by shape."""
    lines = [
        "## The default policy against the others\n",
        "Its TTFT as a share of theirs (below 1: sooner); p50 / p90.\n",
        "| shape | load | against least_loaded | against round_robin |\n|---|--:|--:|--:|",
    ]
    for load in sorted({r["load"] for r in report["results"]}):
        for shape, about in report["about"].items():
            own = _runs(report, shape, load, POLICIES[0])
            if own:
                shares = [_share(own, _runs(report, shape, load, other)) for other in POLICIES[1:]]
                lines.append(f"| {about} | {load:.0%} | {shares[0]} | {shares[1]} |")
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """TTFT p50 and p90 on a log scale, and the hit ratio, per shape and load."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = NAME  # the same bytes from the same numbers
    from matplotlib import pyplot

    cells = [(s, load) for load in sorted({r["load"] for r in report["results"]}) for s in report["about"]]
    cells = [cell for cell in cells if _runs(report, *cell, POLICIES[0])]
    figure, (times, hits) = pyplot.subplots(2, 1, figsize=(12, 8), sharex=True, height_ratios=(2, 1))
    for offset, policy in zip((-0.27, 0.0, 0.27), POLICIES, strict=True):
        runs = [_runs(report, *cell, policy) for cell in cells]
        at = [n + offset for n in range(len(cells))]
        p50, p90 = ([_mean(r, f"ttft_{q}_s") * 1000 for r in runs] for q in ("p50", "p90"))
        times.bar(at, p90, 0.25, color=COLOURS[policy], alpha=0.45)
        times.bar(at, p50, 0.25, color=COLOURS[policy], label=policy)
        hits.bar(at, [_mean(r, "hit_ratio") for r in runs], 0.25, color=COLOURS[policy])
    times.set(yscale="log", ylabel="TTFT, virtual ms: p50 full, p90 pale")
    times.legend(loc="upper left")
    hits.set(ylabel="prompt from cache", ylim=(0, 1))
    hits.set_xticks(range(len(cells)), [f"{s}\n{load:.0%}" for s, load in cells], rotation=60, ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _runs(report: dict[str, Any], shape: str, load: float, policy: str) -> list[dict[str, Any]]:
    return [r for r in report["results"] if (r["shape"], r["load"], r["policy"]) == (shape, load, policy)]


def _mean(runs: list[dict[str, Any]], field: str) -> float:
    return statistics.fmean(r[field] for r in runs)


def _row(about: str, policy: str, runs: list[dict[str, Any]]) -> str:
    fields = ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "completion_p50_s", "completion_p90_s")
    times = " | ".join(_with_spread(runs, field, 1000) for field in fields)
    least, most = min(r["least_per_replica"] for r in runs), max(r["most_per_replica"] for r in runs)
    hits, speed = _with_spread(runs, "hit_ratio", 100), _with_spread(runs, "output_tokens_per_s", 1)
    return f"| {about} | {policy} | {times} | {hits} % | {least:.2f}–{most:.2f} | {speed} |"


def _with_spread(runs: list[dict[str, Any]], field: str, scale: float) -> str:
    values = [r[field] * scale for r in runs]
    digits = 0 if statistics.fmean(values) >= 100 else 1
    return f"{statistics.fmean(values):,.{digits}f} ± {(max(values) - min(values)) / 2:,.{digits}f}"


def _share(own: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    parts = [_mean(own, f"ttft_{q}_s") / _mean(others, f"ttft_{q}_s") for q in ("p50", "p90")]
    return " / ".join(f"{part:.2f}" for part in parts)
