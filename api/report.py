"""Self-contained HTML reports: one file, no network, light and dark, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from api import figures
from api.demo_result import DemoResult, Run, scores_of, subject_of
from api.stage_table import stage_rows
from api.store import now_utc
from specs.answer import PlanAnswer
from specs.cluster import ClusterSpec
from specs.graph import ModelGraph
from specs.measurement import Comparison, Measurement
from specs.prediction import Prediction
from specs.terms import MEMORY_TERMS, TIME_TERMS
from specs.training import TrainingSpec
from specs.units import format_bytes, format_seconds


def render_report(result: DemoResult, trace: Mapping[str, Any] | None = None) -> str:
    """HTML of a result; ``trace`` is the Chrome trace of the chosen plan's predicted step."""
    chosen = chosen_run(result)
    prediction = chosen.prediction if chosen else (result.answer.prediction if result.answer else None)
    shown: dict[str, Any] = {}
    if prediction is not None:
        shown["waterfall"] = figures.waterfall(prediction, chosen.measurement.waterfall if chosen else None)
        shown["memory"] = _memory_figure(result, prediction)
    if len(result.runs) > 1:
        shown["scatter"] = figures.scatter(result.runs)
    drawn = figures.timeline(dict(trace)) if trace else None
    if drawn is not None:
        shown["timeline"] = drawn
    return _template().render(
        result=result,
        chosen=chosen,
        prediction=prediction,
        stages=stage_rows(result.answer.plan) if result.answer and result.answer.plan else [],
        terms=term_rows(prediction, chosen),
        has_drift=any(run.measurement.drift is not None for run in result.runs),
        memory_terms=MEMORY_TERMS,
        figures=list(shown),
        figure_json=_script_json(shown),
        plotly=_plotly(),
    )


def plan_report(
    answer: PlanAnswer,
    *,
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    executions: Sequence[Mapping[str, Any]] = (),
    trace: Mapping[str, Any] | None = None,
) -> str:
    """HTML of one planning answer and the executions of its plan (``prediction``, ``measurement``, ``comparison`` each)."""
    strategy = answer.plan.strategy if answer.plan else ""
    runs = tuple(
        Run(
            label=f"run {index}", strategy=strategy, chosen=index == len(executions),
            prediction=Prediction.parse(execution["prediction"]), measurement=Measurement.parse(execution["measurement"]),
            comparison=Comparison.parse(execution["comparison"]),
        )
        for index, execution in enumerate(executions, start=1)
    )  # fmt: skip
    result = DemoResult(
        title=f"Plan for {graph.name}",
        created_utc=now_utc(),
        subject=subject_of(graph, cluster, workload),
        answer=answer,
        runs=runs,
        scores=scores_of(runs),
    )
    return render_report(result, trace)


def chosen_run(result: DemoResult) -> Run | None:
    """The run of the chosen plan."""
    return next((run for run in result.runs if run.chosen), None)


def term_rows(prediction: Prediction | None, run: Run | None) -> list[dict[str, Any]]:
    """Waterfall as rows: term, meaning, predicted, measured, difference in seconds; terms that are 0 in both left out."""
    if prediction is None:
        return []
    measured = run.measurement.waterfall if run else {}
    rows = []
    for term, meaning in TIME_TERMS.items():
        expected, seen = prediction.waterfall.get(term, 0.0), measured.get(term, 0.0)
        if expected or seen:
            rows.append(
                {
                    "term": term,
                    "meaning": meaning,
                    "predicted": expected,
                    "measured": seen if run else None,
                    "difference": expected - seen,
                }
            )
    return rows


def _memory_figure(result: DemoResult, prediction: Prediction) -> dict[str, Any]:
    if not result.runs:
        return figures.memory([("plan", prediction)], [None])
    return figures.memory(
        [(run.label, run.prediction) for run in result.runs], [run.measurement.peak_memory_bytes for run in result.runs]
    )


def _script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    return Markup(json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


@cache
def _plotly() -> Markup:
    """The Plotly library, inline."""
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs().replace("</script", "<\\/script"))


@cache
def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("api", "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        bytes=format_bytes, seconds=format_seconds, signed_percent=_signed_percent, percent=lambda value: f"{value:.1%}"
    )
    return environment.get_template("report.html.j2")


def _signed_percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.1%}"
