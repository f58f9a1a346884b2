"""Figures of the report as Plotly JSON: plain data and layout; the page draws them in its own colours, light or dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from api.demo_result import Run
from specs.prediction import Prediction
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.units import GIB, MIB

Figure = dict[str, Any]
PREDICTED, MEASURED = "#3b7dd8", "#e08a2b"
# The same colour for the same kind of work everywhere.
KIND_COLOURS = {
    "forward": "#4c9f70",
    "backward": "#3b7dd8",
    "recompute": "#8e6bbf",
    "optimizer": "#b0a042",
    "comm": "#d95f5f",
    "wait": "#9aa0a6",
    "other": "#c08bb0",
}
MAX_TIMELINE_EVENTS = 4000
SECONDS = {"tickformat": "~s", "ticksuffix": "s"}  # axes in s, ms or us as it fits


def waterfall(prediction: Prediction, measured: dict[str, float] | None) -> Figure:
    """Predicted and, if given, measured terms of one step side by side, each adding up to its step. Seconds."""
    terms = [term for term in TIME_TERMS if prediction.waterfall.get(term) or (measured or {}).get(term)]
    series = [("predicted", prediction.waterfall, PREDICTED)]
    if measured is not None:
        series.append(("measured", measured, MEASURED))
    traces = [
        {
            "type": "waterfall",
            "name": name,
            "offsetgroup": name,
            "x": [*terms, "step"],
            "y": [*(values.get(term, 0.0) for term in terms), sum(values.values())],
            "measure": [*("relative" for _ in terms), "total"],
            "increasing": {"marker": {"color": colour}},
            "totals": {"marker": {"color": colour}},
            "decreasing": {"marker": {"color": colour}},
            "connector": {"line": {"width": 0.5}},
            "hovertemplate": "%{x}: %{delta:.3s}s<extra>" + name + "</extra>",
        }
        for name, values, colour in series
    ]
    layout = {
        "waterfallmode": "group",
        "yaxis": {**SECONDS, "title": {"text": "time per step"}, "rangemode": "tozero"},
        "showlegend": True,
    }
    return {"data": traces, "layout": layout}


def scatter(runs: Sequence[Run]) -> Figure:
    """Predicted over measured step time with bands of 10% and 20%. Seconds."""
    measured = [run.comparison.step_time.measured for run in runs]
    predicted = [run.comparison.step_time.predicted for run in runs]
    low, high = 0.85 * min([*measured, *predicted]), 1.15 * max([*measured, *predicted])
    bands = [_band(low, high, width, opacity) for width, opacity in ((0.2, 0.10), (0.1, 0.18))]
    line = {
        "type": "scatter",
        "x": [low, high],
        "y": [low, high],
        "mode": "lines",
        "line": {"dash": "dot", "width": 1},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    points = {
        "type": "scatter", "mode": "markers+text", "x": measured, "y": predicted, "text": [run.label for run in runs],
        "textposition": "top center", "textfont": {"size": 10}, "showlegend": False,
        "marker": {"size": 10, "color": [MEASURED if run.chosen else PREDICTED for run in runs]},
        "hovertemplate": "%{text}<br>measured %{x:.4s}s<br>predicted %{y:.4s}s<extra></extra>",
    }  # fmt: skip
    axis = {**SECONDS, "range": [low, high]}
    layout = {"xaxis": {**axis, "title": {"text": "measured"}}, "yaxis": {**axis, "title": {"text": "predicted"}}}
    return {"data": [*bands, line, points], "layout": layout}


def _band(low: float, high: float, width: float, opacity: float) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high, high, low],
        "y": [low * (1 + width), high * (1 + width), high * (1 - width), low * (1 - width)],
        "fill": "toself",
        "fillcolor": f"rgba(59,125,216,{opacity})",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": f"± {width:.0%}",
    }


def memory(predictions: Sequence[tuple[str, Prediction]], measured_bytes: Sequence[float | None]) -> Figure:
    """Peak memory of the fullest rank by term, and what was measured. MiB."""
    labels = [label for label, _ in predictions]
    used = [term for term in MEMORY_TERMS if any(prediction.memory.terms.get(term) for _, prediction in predictions)]
    traces: list[Figure] = [
        {
            "type": "bar",
            "name": term,
            "x": labels,
            "y": [prediction.memory.terms.get(term, 0.0) / MIB for _, prediction in predictions],
            "hovertemplate": term + ": %{y:.1f} MiB<extra>%{x}</extra>",
        }
        for term in used
    ]
    if any(value is not None for value in measured_bytes):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "x": labels,
                "y": [None if value is None else value / MIB for value in measured_bytes],
                "marker": {"symbol": "line-ew-open", "size": 26, "color": MEASURED, "line": {"width": 3}},
                "hovertemplate": "measured: %{y:.1f} MiB<extra>%{x}</extra>",
            }
        )
    return {"data": traces, "layout": {"barmode": "stack", "yaxis": {"title": {"text": "MiB, fullest rank"}}}}


def memory_by_stage(prediction: Prediction) -> Figure:
    """Peak memory of every stage by term, with the margin and process above it, against the capacity line. GiB."""
    ranks = prediction.ranks
    labels = [f"stage {rank.stage}" if len(ranks) > 1 else "every device" for rank in ranks]

    def bar(name: str, sizes: list[float], **more: Any) -> Figure:
        hover = name + ": %{x:.2f} GiB<extra>%{y}</extra>"
        return {"type": "bar", "orientation": "h", "name": name, "y": labels, "x": sizes, "hovertemplate": hover, **more}

    used = [term for term in MEMORY_TERMS if any(rank.memory.terms.get(term) for rank in ranks)]
    traces = [bar(term, [rank.memory.terms.get(term, 0.0) / GIB for rank in ranks]) for term in used]
    over = [max(0.0, (rank.memory.reserved_bytes or 0.0) - rank.memory.peak_bytes) / GIB for rank in ranks]
    if any(over):
        traces.append(bar("margin and process", over, marker={"color": "rgba(128,128,128,0.35)"}))
    capacity = {
        "type": "scatter", "mode": "markers", "name": "capacity", "y": labels,
        "x": [rank.memory.capacity_bytes / GIB for rank in ranks], "hovertemplate": "capacity: %{x:.2f} GiB<extra>%{y}</extra>",
        "marker": {"symbol": "line-ns-open", "size": 26, "color": MEASURED, "line": {"width": 3}},
    }  # fmt: skip
    layout = {
        "barmode": "stack", "height": 170 + 34 * len(ranks), "xaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }  # fmt: skip
    return {"data": [*traces, capacity], "layout": layout}


def timeline(trace: dict[str, Any]) -> Figure | None:
    """A Chrome trace as bars, one row per process and thread; None when it holds no complete events. Seconds."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    events = sorted(events, key=lambda event: event.get("ts", 0))[:MAX_TIMELINE_EVENTS]
    if not events:
        return None
    names = _row_names(trace)
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event.get("pid", 0), event.get("tid", 0))):
        rows.setdefault(names(event), []).append(event)
    kinds: dict[str, Figure] = {}
    for row, members in rows.items():
        for event in members:
            kind = kind_of(f"{event.get('cat', '')} {event.get('name', '')}")
            bar = kinds.setdefault(kind, _empty_bar(kind))
            bar["y"].append(row)
            bar["base"].append(event.get("ts", 0) / 1e6)
            bar["x"].append(event.get("dur", 0) / 1e6)
            bar["text"].append(str(event.get("name", "")))
    order = list(rows)
    layout = {
        "barmode": "overlay", "xaxis": dict(SECONDS), "height": 140 + 34 * len(order), "bargap": 0.25,
        "yaxis": {"categoryorder": "array", "categoryarray": order[::-1], "automargin": True},
    }  # fmt: skip
    return {"data": list(kinds.values()), "layout": layout}


def _empty_bar(kind: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "y": [],
        "x": [],
        "base": [],
        "text": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "marker": {"color": KIND_COLOURS[kind], "line": {"width": 0.3}},
        "hovertemplate": "%{text}<br>%{base:.4s}s, for %{x:.4s}s<extra>%{y}</extra>",
    }


def _row_names(trace: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "M" and event.get("name") == "process_name":
            processes[event.get("pid")] = event["args"]["name"]
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[(event.get("pid"), event.get("tid"))] = event["args"]["name"]

    is_clear = len(set(threads.values())) == len(threads)  # thread names alone tell the rows apart

    def name(event: dict[str, Any]) -> str:
        pid, tid = event.get("pid"), event.get("tid")
        thread = threads.get((pid, tid))
        return thread if thread and is_clear else f"{processes.get(pid, f'rank {pid}')} {thread or tid}"

    return name


def kind_of(text: str) -> str:
    """The kind of work that a trace event's category or name says."""
    lower = text.lower()
    for kind, words in {
        "recompute": ("recompute",),
        "comm": ("comm", "pipeline", "reduce", "gather", "scatter", "send", "recv", "p2p", "all_to_all", "broadcast"),
        "optimizer": ("optim",),
        "backward": ("backward", "bwd"),
        "forward": ("forward", "fwd"),
        "wait": ("wait", "bubble", "idle"),
    }.items():
        if any(word in lower for word in words):
            return kind
    return "other"
