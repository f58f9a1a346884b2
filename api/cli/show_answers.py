"""Differences, why-not answers, sizes, exports and judged configs as tables for a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from api.cli.show import show_prediction, table
from specs.interchange import Exported, Judgement, ReadKey
from specs.questions import PlanDiff, Recommendation, TermDelta, WhyNot
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.units import format_bytes, format_seconds

_STYLES = {"forbidden": "red", "does_not_fit": "red", "slower": "yellow", "faster": "green", "same": "green"}
MANY_ROWS = 24


def show_why_not(console: Console, found: WhyNot) -> None:
    """The reason first, then terms side by side."""
    console.print(Text(found.reason, style=f"bold {_STYLES[found.verdict]}"))
    for rule in found.rules[1:] if found.verdict == "forbidden" else ():
        console.print(f"also: {rule.message}" + ("" if rule.nearest is None else f"; nearest: {rule.nearest}"), markup=False)
    console.print(f"asked:  {found.asked}", markup=False)
    console.print(f"chosen: {found.chosen}", markup=False)
    if found.step_time is not None:
        rows = table("term", ">chosen", ">asked", ">difference", "meaning", title="Step time")
        for item in found.terms:
            rows.add_row(item.term, *_seconds(item), Text(TIME_TERMS.get(item.term, ""), style="dim"))
        rows.add_row("step", *_seconds(found.step_time), "", style="bold")
        console.print(rows)
    if found.memory is not None:
        rows = table("term", ">chosen", ">asked", ">difference", "meaning", title="Memory of the fullest device")
        for item in found.memory_terms:
            rows.add_row(item.term, *_bytes(item), Text(MEMORY_TERMS.get(item.term, ""), style="dim"))
        rows.add_row("peak", *_bytes(found.memory), "", style="bold")
        console.print(rows)
    for note in found.notes:
        console.print(note, style="dim", markup=False)


def _seconds(item: TermDelta) -> tuple[str, str, str]:
    sign = "+" if item.delta >= 0 else "-"
    return format_seconds(item.chosen), format_seconds(item.asked), sign + format_seconds(abs(item.delta))


def _bytes(item: TermDelta) -> tuple[str, str, str]:
    sign = "+" if item.delta >= 0 else "-"
    return format_bytes(item.chosen), format_bytes(item.asked), sign + format_bytes(abs(item.delta))


def show_diff(console: Console, found: PlanDiff) -> None:
    """Settings, bytes by rank, and what loads."""
    if not found.changes:
        console.print("no setting changes", style="bold green")
    else:
        rows = table("setting", "before", "after", title="What changes")
        for change in found.changes:
            rows.add_row(change.what, str(change.before), str(change.after))
        console.print(rows)
    text = (
        f"{format_bytes(found.moved_bytes)} of states move in all, at most {format_bytes(found.most_moved_bytes)} to one rank; "
        f"a whole checkpoint has {format_bytes(found.checkpoint_bytes)}"
    )
    console.print(Text(text, style="bold"))
    if found.move_time_s is not None:
        console.print(f"that is {format_seconds(found.move_time_s)} over the node's uplink for the fullest rank")
    rows = table("ranks", ">needs", ">has", ">moves", title="States by rank")
    for move in found.ranks[:MANY_ROWS]:
        name = str(move.ranks[0]) if len(move.ranks) == 1 else f"{move.ranks[0]} and {len(move.ranks) - 1} alike"
        rows.add_row(name, format_bytes(move.needs_bytes), format_bytes(move.held_bytes), format_bytes(move.moves_bytes))
    if len(found.ranks) > MANY_ROWS:
        rows.add_row(f"{len(found.ranks) - MANY_ROWS} more kinds of ranks", "", "", "")
    console.print(rows)
    loads = table("checkpoints of", "load", "how")
    for item in found.resharding:
        loads.add_row(item.framework, "yes" if item.loads else "no", item.how)
    console.print(loads)
    for note in found.notes:
        console.print(note, style="dim", markup=False)


def show_recommendation(console: Console, found: Recommendation) -> None:
    """The three numbers, then the curve."""
    unit = f"{found.device} ({found.devices_per_node} in a node, {found.node})"
    if found.fewest_devices is None:
        console.print(Text(f"no size fits on {unit}", style="bold red"))
    else:
        text = (
            f"fewest that fit: {found.fewest_devices} x {unit}; cheapest per token: {found.cheapest_devices}; "
            f"at {found.efficient_at_least:.0%} of the best efficiency still: {found.efficient_devices}"
        )
        console.print(Text(text, style="bold green"))
    if found.multiple_of > 1:
        console.print(f"the strategy's degrees make multiples of {found.multiple_of}")
    rows = table(">devices", ">step", ">tokens/s", ">per device", ">efficiency", ">peak", ">USD per 1e9 tokens", "plan")
    for point in found.curve:
        if not point.strategy:
            reason = "; ".join(limit.message for limit in point.limits) or point.status
            rows.add_row(str(point.devices), "", "", "", "", "", "", Text(reason, style="red"))
            continue
        cost = "" if point.usd_per_billion_tokens is None else f"{point.usd_per_billion_tokens:,.0f}"
        rows.add_row(
            str(point.devices), format_seconds(point.step_time_s or 0), f"{point.tokens_per_s or 0:,.0f}",
            f"{point.tokens_per_s_device or 0:,.0f}", f"{point.efficiency or 0:.0%}", format_bytes(point.peak_bytes or 0), cost,
            point.strategy, style="bold" if point.devices == found.fewest_devices else None,
        )  # fmt: skip
    console.print(rows)
    for note in found.notes:
        console.print(note, style="yellow", markup=False)


def show_export(console: Console, found: Exported, folder: Path | None) -> None:
    """The files, or where they are, and what they do not do."""
    for name, text in found.files.items():
        if folder is None:
            console.print(Text(f"# {name}", style="bold"))
            console.print(Text(text), soft_wrap=True)
        else:
            console.print(f"wrote {folder / name}", markup=False)
    console.print(f"checked against {found.version}", style="dim", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", markup=False)


def show_judgement(console: Console, found: Judgement) -> None:
    """The strategy, the verdict, and every key's account."""
    console.print(Text(found.strategy, style="bold"))
    if found.rules:
        console.print("forbidden:", style="bold red")
        for rule in found.rules:
            near = "" if rule.nearest is None else f"; nearest: {rule.nearest}"
            console.print(f"- {rule.message}{near}", style="red", markup=False)
    if found.prediction is not None:
        console.print("fits" if found.fits else "does not fit", style="bold green" if found.fits else "bold red")
        show_prediction(console, found.prediction)
    for text in found.conflicts:
        console.print(f"disagrees: {text}", style="yellow", markup=False)
    for text in found.missing:
        console.print(f"no prediction yet, missing {text}", style="yellow", markup=False)
    _keys(console, "Not understood", found.imported.not_understood)
    for text in found.imported.assumed:
        console.print(f"assumed: {text}", style="dim", markup=False)
    _keys(console, "Understood", found.imported.understood)
    if found.imported.ignored:
        names = ", ".join(key.key for key in found.imported.ignored)
        console.print(f"without effect on a step: {names}", style="dim", markup=False)


def _keys(console: Console, title: str, keys: tuple[ReadKey, ...]) -> None:
    if not keys:
        return
    rows = table("key", "value", "meaning", title=title)
    for key in keys:
        rows.add_row(key.key, str(key.value), key.meaning)
    console.print(rows)
