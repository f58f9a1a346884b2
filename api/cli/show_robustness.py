"""Robustness and diagnoses as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from api.cli.show import table
from specs.straggler import Diagnosis, Goodput, PhaseSpread, Robustness
from specs.units import format_seconds


def show_robustness(console: Console, found: Robustness) -> None:
    """Distribution, sources, goodput and what-if."""
    spread = found.distribution
    if spread is not None:
        console.print(f"step time over {spread.steps:,} drawn steps (seed {spread.seed})", style="bold")
        rows = table("step", ">seconds", ">of nominal")
        quantiles = {"p50": spread.p50_s, "p95": spread.p95_s, "p99": spread.p99_s}
        for name, seconds in {"nominal": found.nominal_step_s, "mean": spread.mean_s, **quantiles}.items():
            rows.add_row(name, format_seconds(seconds), f"{seconds / found.nominal_step_s:.3f} x")
        console.print(rows)
        console.print(found.folded, style="dim", markup=False)
    if found.alone_s:
        rows = table("source", ">adds, alone", ">of nominal", title="What slows the step")
        for name, seconds in found.alone_s.items():
            rows.add_row(name, format_seconds(seconds), f"{seconds / found.nominal_step_s:+.1%}")
        console.print(rows)
    for title, goodput in (("Goodput on demand", found.on_demand), ("Goodput on spot capacity", found.spot)):
        if goodput is not None:
            _show_goodput(console, title, goodput)
    if found.what_if:
        rows = table("what if", ">step", ">of the step before", "means", title="What if")
        for item in found.what_if:
            rows.add_row(item.change, format_seconds(item.step_time_s), f"{item.ratio:.3f} x", item.meaning)
        console.print(rows)
    for line in found.assumptions:
        console.print(f"assumed: {line}", style="dim", markup=False)


def _show_goodput(console: Console, title: str, found: Goodput) -> None:
    rows = table("", ">", title=title)
    rows.add_row("time that is useful", f"{found.availability:.2%}")
    rows.add_row("of the nominal throughput", f"{found.goodput:.2%}")
    rows.add_row("tokens/s", f"{found.tokens_per_s:,.0f}")
    if found.job_mtbf_s is not None:
        rows.add_row("work is lost every", f"{found.job_mtbf_s / 3600:.1f} h")
    if found.checkpoint_interval_s is not None:
        kind = "best" if found.interval_is_best else "given"
        rows.add_row(f"checkpoint every ({kind})", f"{found.checkpoint_interval_s / 60:.1f} min, {found.interval_steps:,} steps")
    if found.cost_usd_per_hour is not None and found.cost_usd_per_million_tokens is not None:
        rows.add_row("cost per hour", f"{found.cost_usd_per_hour:,.2f} USD")
        rows.add_row("cost per million tokens", f"{found.cost_usd_per_million_tokens:.4g} USD")
    console.print(rows)


def show_diagnosis(console: Console, found: Diagnosis) -> None:
    """Findings first; one-offs only counted with the longest of them."""
    if not found.findings:
        console.print(f"no lasting slowness in {found.steps:,} steps", style="bold green")
    for item in found.findings:
        console.print(item.text(), style="bold red" if item.until_step is None else "yellow", markup=False)
    if found.one_offs:
        longest = max(found.one_offs, key=lambda item: item.factor)
        count = len(found.one_offs)
        console.print(f"{count} one-off{'s' if count != 1 else ''}, the longest: {longest.text()}", style="dim", markup=False)
    if found.load_drift is not None:
        console.print(f"max over mean of the ranks' work: {found.load_drift:.2f} x from the first to the last quarter")


def show_spreads(console: Console, phases: Sequence[PhaseSpread]) -> None:
    """Each phase over the ranks."""
    rows = table("phase", ">least", ">median", ">largest", "worst ranks", title="Phases over the ranks")
    for item in phases:
        worst = ", ".join(map(str, item.worst_ranks))
        rows.add_row(item.phase, *(format_seconds(value) for value in (item.min_s, item.median_s, item.max_s)), worst)
    console.print(rows)
