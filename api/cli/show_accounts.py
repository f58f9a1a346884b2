"""Memory reports and utilisations as tables for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from api.cli.show import show_assumptions, table
from specs.accounting import Utilization
from specs.memory import MemoryReport
from specs.prediction import MemoryPrediction
from specs.units import GB, format_bytes


def show_memory_report(console: Console, report: MemoryReport) -> None:
    """The verdict of the strategy first, then states, offload, units, loss."""
    if report.strategy:
        verdict = "fits" if report.fits else "does not fit"
        console.print(Text(f"{report.strategy}: {verdict}", style="bold green" if report.fits else "bold red"))
        _show_ranks(console, report.ranks)
    for flag in report.flags:
        console.print(f"warning: {flag.replace('_', ' ')}", style="yellow", markup=False)
    for note in report.notes:
        console.print(f"- {note}", markup=False)
    counts = f"{report.num_params:,.0f} parameters, {report.num_trainable:,.0f} trained, on {report.devices} devices"
    console.print(Text(f"{report.model}: {counts}", style="bold"))
    console.print(report.recipe, markup=False)
    _show_states(console, report)
    if report.offload:
        rows = table("to the host", ">device", ">host, a node", "how", title="ZeRO 3 with offload")
        for item in report.offload:
            how = f"device {item.formula_device}; host {item.formula_host}"
            rows.add_row(item.offload, format_bytes(item.device_bytes), format_bytes(item.host_bytes), how)
        console.print(rows)
    _show_units(console, report)
    show_assumptions(console, report.assumptions)


def _show_ranks(console: Console, ranks: tuple[MemoryPrediction, ...]) -> None:
    rows = table("at", ">allocated", ">reserved", ">capacity", title="Peak by class of ranks")
    for memory in ranks:
        reserved = format_bytes(memory.reserved_bytes or memory.peak_bytes)
        rows.add_row(memory.peak_moment, format_bytes(memory.peak_bytes), reserved, format_bytes(memory.capacity_bytes))
    console.print(rows)


def _show_states(console: Console, report: MemoryReport) -> None:
    rows = table("ZeRO", "state", "dtype", ">bytes/param", ">over", ">a device", "why", title="Model states")
    for states in report.states:
        for term in states.terms:
            size = format_bytes(term.device_bytes)
            rows.add_row(str(states.zero), term.what, term.dtype, f"{term.bytes_per_param:g}", str(term.shards), size, term.source)
        rows.add_row(str(states.zero), "all", "", "", "", format_bytes(states.device_bytes), "", style="bold")
    console.print(rows)


def _show_units(console: Console, report: MemoryReport) -> None:
    if report.units:
        title = f"Kept for backward, {report.micro_batch} x {report.seq_len} tokens, no recompute, no tensor parallel"
        rows = table("block", ">count", ">parameters each", ">kept each", "by", title=title)
        for unit in report.units:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in unit.saved_by_class.items())
            rows.add_row(unit.block, str(unit.count), f"{unit.params:,.0f}", format_bytes(unit.saved_bytes), parts)
        console.print(rows)
    if report.loss is not None:
        loss = report.loss
        console.print(
            f"loss ({loss.kernel}): {loss.tokens} tokens x {loss.vocabulary} words: logits {loss.logits_bytes / GB:.2f} GB, "
            f"log-probabilities {loss.log_probabilities_bytes / GB:.2f} GB, gradient {loss.gradient_bytes / GB:.2f} GB",
            markup=False,
        )


def show_utilization(console: Console, found: Utilization) -> None:
    """The share, and everything that it was counted by."""
    console.print(Text(f"MFU {found.mfu:.1%}", style="bold"))
    achieved, peak = found.achieved_flop_per_s / 1e12, found.peak_flop_per_s / 1e12
    console.print(f"{achieved:.1f} of {peak:.1f} TFLOP/s {found.dtype} of {found.device} ({found.peak_source})", markup=False)
    if found.flop_per_token is not None and found.tokens_per_s is not None:
        console.print(f"{found.tokens_per_s:,.0f} tokens/s x {found.flop_per_token / 1e9:.2f} GFLOP, length {found.seq_len}")
    console.print(f"counted: {found.formula}", markup=False)
