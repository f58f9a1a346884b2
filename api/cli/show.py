"""Plans, predictions and measurements as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from api.stage_table import stage_rows
from specs.answer import PlanAnswer
from specs.graph import ModelGraph
from specs.measurement import Comparison, Difference, Measurement
from specs.plan import Plan
from specs.prediction import Assumption, MemoryPrediction, Prediction
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.units import format_bytes, format_seconds

BAR_WIDTH = 24
_VERDICTS = {
    "optimal": ("green", "Best of the searched space, proven"),
    "feasible": ("green", "Plan found"),
    "infeasible": ("red", "Infeasible: no plan keeps the limits"),
    "timed_out": ("yellow", "No plan was found in time"),
}


def table(*headers: str, title: str | None = None) -> Table:
    """A plain table; headers that start with '>' are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for header in headers:
        made.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left", overflow="fold")
    return made


def show_answer(console: Console, answer: PlanAnswer, *, explain: bool) -> None:
    """Everything that the planner says, the verdict first."""
    style, verdict = _VERDICTS[answer.status]
    console.print(Text(verdict, style=f"bold {style}"))
    record = answer.search
    found = f"{record.candidates:,} candidates in {format_seconds(record.wall_s)}"
    if record.best_bound_s is not None:
        found += f", best bound {format_seconds(record.best_bound_s)}"
    if record.gap is not None:
        found += f", gap {record.gap:.2%}"
    console.print(found, style="dim")
    for limit in answer.limits:
        console.print(f"{limit.limit}: {limit.message}", markup=False)
        for relaxation in limit.relaxations:
            console.print(f"  would help: {relaxation}", markup=False)
    if answer.plan is not None:
        show_plan(console, answer.plan)
    if answer.prediction is not None:
        show_prediction(console, answer.prediction)
    if answer.alternatives:
        rows = table("alternative", ">step", ">peak", "why not", title="Alternatives")
        for item in answer.alternatives:
            rows.add_row(item.strategy, format_seconds(item.step_time_s), format_bytes(item.peak_bytes), item.why_not)
        console.print(rows)
    if answer.rejected:
        counts = ", ".join(f"{reason} {count:,}" for reason, count in answer.rejected.items())
        console.print(f"rejected: {counts}", markup=False)
    if explain or answer.plan is None:
        for line in answer.explanation:
            console.print(f"- {line}", markup=False)
    show_assumptions(console, [*answer.assumptions, *(answer.prediction.assumptions if answer.prediction else ())])


def show_plan(console: Console, plan: Plan) -> None:
    """Strategy and stages."""
    console.print(Text(plan.strategy or plan.name, style="bold"))
    rows = table("stage", "devices", "units", "mesh", "zero", "recompute")
    for row in stage_rows(plan):
        rows.add_row(str(row["stage"]), row["devices"], row["units"], row["mesh"], str(row["zero"]), row["recompute"])
    console.print(rows)
    for pipeline in plan.pipelines:
        plural = "" if pipeline.num_micro_batches == 1 else "es"
        shape = f"{pipeline.num_micro_batches} micro-batch{plural} of {pipeline.micro_batch} per replica"
        chunks = f" with {plan.schedule.stages_per_rank} stages per rank" if plan.schedule.stages_per_rank > 1 else ""
        schedule = f", schedule {plan.schedule.name}{chunks}" if pipeline.pp > 1 else ""
        console.print(f"global batch {plan.global_batch} × {plan.seq_len} tokens: {shape}{schedule}", style="dim", markup=False)
    if plan.unused_devices:
        console.print(f"left out: devices {', '.join(map(str, plan.unused_devices))}", style="yellow")


def show_prediction(console: Console, prediction: Prediction) -> None:
    """Headline, waterfall and memory."""
    low, high = format_seconds(prediction.step_time_low_s), format_seconds(prediction.step_time_high_s)
    headline = f"step {format_seconds(prediction.step_time_s)} ({low} to {high}), {prediction.tokens_per_s:,.0f} tokens/s"
    if prediction.mfu is not None:
        headline += f", MFU {prediction.mfu:.1%}"
    if prediction.cost_usd is not None:
        headline += f", {prediction.cost_usd:.4g} USD per step"
    console.print(Text(headline, style="bold"))
    show_waterfall(console, {"predicted": prediction.waterfall})
    show_memory(console, prediction)
    if prediction.provenance:
        parts = ", ".join(f"{item.source} {format_seconds(item.seconds)} ({item.num_ops} ops)" for item in prediction.provenance)
        console.print(f"where op times come from: {parts}", style="dim", markup=False)
    if prediction.mfu is not None and prediction.mfu_convention:
        console.print(f"MFU: {prediction.mfu_convention}", style="dim", markup=False)
    for link in prediction.fabric:
        console.print(f"fabric: {link.text()}", style="dim", markup=False)
    for flag in prediction.flags:
        console.print(f"warning: {flag.replace('_', ' ')}", style="yellow", markup=False)


def show_waterfall(console: Console, columns: dict[str, dict[str, float]]) -> None:
    """Terms of a step, one column of seconds per series, a bar of the first series' share."""
    first = next(iter(columns.values()))
    total = sum(first.values()) or 1.0
    rows = table("term", *(f">{name}" for name in columns), "", "meaning", title="Where the step goes")
    for term, meaning in TIME_TERMS.items():
        values = [series.get(term, 0.0) for series in columns.values()]
        if any(values):
            bar = "█" * round(BAR_WIDTH * values[0] / total)
            rows.add_row(term, *(format_seconds(value) for value in values), bar, Text(meaning, style="dim"))
    rows.add_row("step", *(format_seconds(sum(series.values())) for series in columns.values()), "", "", style="bold")
    console.print(rows)


def show_memory(console: Console, prediction: Prediction) -> None:
    """Memory of every class of ranks against the capacity, and the terms of the fullest."""
    ranks = prediction.ranks
    if len(ranks) > 1:
        rows = table("stage", "devices", ">peak", ">of", "", "peak at", title="Memory by stage")
        for rank in ranks:
            name = str(rank.stage) if len({item.pipeline for item in ranks}) == 1 else f"{rank.pipeline}.{rank.stage}"
            devices = f"{rank.ranks[0]}-{rank.ranks[-1]}" if len(rank.ranks) > 1 else str(rank.ranks[0])
            rows.add_row(name, devices, *_fill(rank.memory), rank.memory.peak_moment)
        console.print(rows)
    memory = prediction.memory
    rows = table("term", ">bytes", "meaning", title=f"Memory of the fullest device ({memory.peak_moment or memory.peak_rank})")
    for term, meaning in MEMORY_TERMS.items():
        if memory.terms.get(term):
            rows.add_row(term, format_bytes(memory.terms[term]), Text(meaning, style="dim"))
    rows.add_row("peak", format_bytes(memory.peak_bytes), f"of {format_bytes(memory.capacity_bytes)} capacity", style="bold")
    if memory.reserved_bytes is not None:
        rows.add_row(
            "reserved", format_bytes(memory.reserved_bytes), Text("peak with allocator margin and process baseline", style="dim")
        )
    console.print(rows)


def _fill(memory: MemoryPrediction) -> tuple[str, str, str]:
    share = memory.peak_bytes / memory.capacity_bytes
    bar = "█" * min(BAR_WIDTH, round(BAR_WIDTH * share))
    return format_bytes(memory.peak_bytes), format_bytes(memory.capacity_bytes), f"{bar} {share:.0%}"


def show_assumptions(console: Console, assumptions: Sequence[Assumption]) -> None:
    """What nobody gave or measured, each once."""
    for text in dict.fromkeys(_assumption(item) for item in assumptions):
        console.print(f"assumed: {text}", style="dim", markup=False)


def _assumption(item: Assumption) -> str:
    value = "" if item.value is None else f" = {item.value}"
    return f"{item.what}{value}" + ("" if item.provenance == "assumed" else f" ({item.provenance})")


def show_measurement(console: Console, measurement: Measurement) -> None:
    """Step time with its spread, memory and terms of a run."""
    if measurement.step_time_s is not None:
        low, high = measurement.step_time_p10_s or 0.0, measurement.step_time_p90_s or 0.0
        text = f"step {format_seconds(measurement.step_time_s)} (p10 {format_seconds(low)}, p90 {format_seconds(high)})"
        if measurement.tokens_per_s is not None:
            text += f", {measurement.tokens_per_s:,.0f} tokens/s"
        console.print(Text(text, style="bold"))
    if measurement.peak_memory_bytes is not None:
        console.print(f"peak memory of the fullest rank {format_bytes(measurement.peak_memory_bytes)}")
    if measurement.losses:
        console.print(f"loss {measurement.losses[0]:.4f} to {measurement.losses[-1]:.4f} in {len(measurement.losses)} steps")
    if measurement.waterfall:
        show_waterfall(console, {"measured": measurement.waterfall})


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Predicted against measured, term by term."""
    rows = table("", ">predicted", ">measured", ">error", title="Predicted against measured")
    for term, difference in comparison.terms.items():
        rows.add_row(term, *_difference(difference, format_seconds))
    rows.add_row("step", *_difference(comparison.step_time, format_seconds), style="bold")
    if comparison.step_time_at_start_speed is not None:
        rows.add_row("step, machine re-probed before the run", *_difference(comparison.step_time_at_start_speed, format_seconds))
    if comparison.step_time_at_profile_speed is not None:
        rows.add_row("step at the profile's speed", *_difference(comparison.step_time_at_profile_speed, format_seconds))
    rows.add_row("peak memory", *_difference(comparison.peak_memory, format_bytes), style="bold")
    console.print(rows)
    inside = "inside" if comparison.inside_interval else "outside"
    console.print(f"the measured step is {inside} the predicted interval; error = predicted / measured - 1", style="dim")
    for note in comparison.notes:
        console.print(note, style="dim", markup=False)


def _difference(item: Difference, form: Any) -> tuple[str, str, str]:
    error = "n/a" if item.relative_error is None else f"{item.relative_error:+.1%}"
    return form(item.predicted), form(item.measured), error


def show_graph(console: Console, graph: ModelGraph) -> None:
    """A captured model in short."""
    console.print(Text(f"{graph.name}: {graph.num_params():,} parameters, {graph.num_units()} units", style="bold"))
    rows = table("units", "block", ">repeats", ">ops", ">parameters each")
    first = 0
    for segment in graph.segments:
        block = graph.block(segment.block)
        last = first + segment.count - 1
        units = str(first) if segment.count == 1 else f"{first}-{last}"
        rows.add_row(units, block.name, str(segment.count), str(len(block.ops)), f"{block.num_params():,}")
        first = last + 1
    console.print(rows)
    if unknown := graph.attributes.get("ops_without_rule"):
        console.print(f"ops without a rule, priced as memory-bound: {', '.join(unknown)}", style="yellow", markup=False)
