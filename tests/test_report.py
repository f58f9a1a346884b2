"""The report: self-contained, escaped, complete; scores and loss checks by hand-computed values."""

from __future__ import annotations

import json
import math
import re

import pytest

from api import figures
from api.demo_result import DemoResult, Run, Subject, check_losses, kendall_tau, scores_of
from api.report import plan_report, render_report, term_rows
from api.stage_table import device_ranges, stage_rows
from specs.answer import Alternative, BrokenLimit, PlanAnswer
from specs.cluster import ClusterSpec
from specs.measurement import Comparison, Difference, Measurement
from specs.plan import Mesh, Pipeline, Plan, RecomputeRun, Stage
from specs.prediction import MemoryPrediction, Prediction
from specs.training import TrainingSpec
from tests.api_fake import CLUSTER, WORKLOAD, FakeEngine, plan_for, tiny_graph


def difference(predicted: float, measured: float) -> Difference:
    return Difference(predicted=predicted, measured=measured, relative_error=predicted / measured - 1)


def run(
    label: str, predicted_s: float, measured_s: float, *, chosen: bool = False, memory: tuple[float, float] = (1e8, 1e8)
) -> Run:
    prediction = Prediction(
        step_time_s=predicted_s, step_time_low_s=0.9 * predicted_s, step_time_high_s=1.1 * predicted_s, tokens_per_s=1000.0,
        waterfall={"forward": predicted_s / 4, "backward": predicted_s / 2, "dp_comm": predicted_s / 4},
        memory=MemoryPrediction(peak_bytes=memory[0], capacity_bytes=4e9, terms={"params": memory[0]}),
    )  # fmt: skip
    measurement = Measurement(
        step_time_s=measured_s, step_time_p10_s=0.95 * measured_s, step_time_p90_s=1.05 * measured_s, peak_memory_bytes=memory[1],
        losses=(2.0, 1.0), waterfall={"forward": measured_s / 2, "backward": measured_s / 2},
    )  # fmt: skip
    comparison = Comparison(
        step_time=difference(predicted_s, measured_s), peak_memory=difference(*memory), terms={}, inside_interval=True
    )
    losses = check_losses((2.0, 1.0), (2.0, 1.0), 1e-3)
    return Run(
        label=label,
        strategy=f"<{label}>",
        chosen=chosen,
        prediction=prediction,
        measurement=measurement,
        comparison=comparison,
        losses=losses,
    )


def result(*runs: Run, answer: PlanAnswer | None = None) -> DemoResult:
    subject = Subject(
        model="<b>model</b>", num_params=5, num_units=1, cluster="pair", num_devices=2, device="core", workload={"global_batch": 8}
    )
    return DemoResult(
        title="A </script><script>alert(1)</script> title", created_utc="2026-01-01T00:00:00Z", subject=subject, answer=answer,
        runs=runs, scores=scores_of(runs), reference_losses=(2.0, 1.0),
    )  # fmt: skip


def answer(**changes: object) -> PlanAnswer:
    plan = plan_for(TrainingSpec.parse(WORKLOAD))
    alternative = Alternative(strategy="tp=2", step_time_s=0.5, peak_bytes=1e8, why_not="0.2 s more tp_comm")
    given = {"status": "optimal", "plan": plan, "alternatives": (alternative,), "rejected": {"memory": 3}, **changes}
    return PlanAnswer.model_validate(given)


def test_page_needs_no_network() -> None:
    html = render_report(result(run("one", 0.3, 0.31, chosen=True), run("two", 0.5, 0.4)))
    own = html[: html.index("<script>")] + html[html.rindex("<script>") :]
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", own)
    assert "Plotly.react" in own
    assert 'name="viewport"' in own
    assert "prefers-color-scheme: dark" in own


def test_names_are_escaped_everywhere() -> None:
    html = render_report(result(run("<img src=x onerror=y>", 0.3, 0.31, chosen=True)))
    assert "<b>model</b>" not in html
    assert "<img src=x" not in html
    assert "<script>alert(1)" not in html
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "waterfall" in json.loads(data[1])


def test_every_run_is_in_the_table() -> None:
    runs = [run(f"plan {index}", 0.3 + index / 10, 0.3, chosen=index == 0) for index in range(6)]
    html = render_report(result(*runs, answer=answer()))
    assert html.count("agree</span>") == 6
    for index in range(6):
        assert f"plan {index}" in html
    assert "0.2 s more tp_comm" in html
    assert 'id="scatter"' in html


def test_infeasible_answer_has_a_report() -> None:
    limit = BrokenLimit(limit="memory", message="needs 4 GiB", relaxations=("recompute=full",))
    page = plan_report(
        PlanAnswer(status="infeasible", limits=(limit,)),
        graph=tiny_graph(), cluster=ClusterSpec.parse(CLUSTER), workload=TrainingSpec.parse(WORKLOAD),
    )  # fmt: skip
    assert "No plan keeps the limits" in page
    assert "recompute=full" in page


def test_plan_report_without_and_with_runs() -> None:
    engine, workload, cluster = FakeEngine(), TrainingSpec.parse(WORKLOAD), ClusterSpec.parse(CLUSTER)
    plan = plan_for(workload)
    prediction = engine.estimate(tiny_graph(), cluster, workload, plan, None)
    found = answer(prediction=prediction)
    trace = engine.trace(tiny_graph(), cluster, workload, plan, None)
    page = plan_report(found, graph=tiny_graph(), cluster=cluster, workload=workload, trace=trace)
    assert 'id="timeline"' in page
    assert "Predicted against measured" not in page
    measurement = engine.execute(plan, tiny_graph(), workload, steps=3, warmup_steps=1)
    execution = {
        "prediction": prediction.model_dump(mode="json"), "measurement": measurement.model_dump(mode="json"),
        "comparison": engine.compare(prediction, measurement).model_dump(mode="json"),
    }  # fmt: skip
    page = plan_report(found, graph=tiny_graph(), cluster=cluster, workload=workload, executions=[execution])
    assert "Predicted against measured" in page


def test_waterfall_figure_sums_to_the_step() -> None:
    one = run("one", 0.4, 0.5, chosen=True)
    figure = figures.waterfall(one.prediction, dict(one.measurement.waterfall))
    for trace, expected_s in zip(figure["data"], (0.4, 0.5), strict=True):
        assert trace["measure"][-1] == "total"
        assert trace["y"][-1] == pytest.approx(expected_s)
        assert sum(trace["y"][:-1]) == pytest.approx(trace["y"][-1])


def test_term_rows_join_both_sides() -> None:
    one = run("one", 0.4, 0.5, chosen=True)
    rows = {row["term"]: row for row in term_rows(one.prediction, one)}
    assert set(rows) == {"forward", "backward", "dp_comm"}
    assert rows["dp_comm"]["measured"] == 0.0
    assert rows["forward"]["difference"] == pytest.approx(0.1 - 0.25)


def test_timeline_figure_groups_by_stream_and_kind() -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "comm"}},
            {"ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 2000, "name": "0F0", "cat": "forward"},
            {"ph": "X", "pid": 0, "tid": 1, "ts": 2000, "dur": 1000, "name": "all_reduce", "cat": "dp_comm"},
        ]
    }
    figure = figures.timeline(trace)
    assert figure is not None
    bars = {bar["name"]: bar for bar in figure["data"]}
    assert bars["forward"]["x"] == [0.002]
    assert bars["comm"]["base"] == [0.002]
    assert bars["comm"]["y"] == ["comm"]
    assert figures.timeline({"traceEvents": []}) is None


def test_scores_by_hand() -> None:
    runs = [run("a", 0.9, 1.0, chosen=True, memory=(1.1e8, 1e8)), run("b", 2.2, 2.0), run("c", 0.6, 0.8)]
    scores = scores_of(runs)
    assert scores is not None
    assert scores.step_median_error == pytest.approx(0.1)
    assert scores.step_worst_error == pytest.approx(0.25)
    assert scores.memory_median_error == 0.0
    assert scores.kendall_tau == pytest.approx(1.0)
    assert scores.regret == pytest.approx(1.0 / 0.8 - 1)
    assert scores_of([]) is None


def test_drift_is_shown_and_taken_out() -> None:
    one = run("one", 1.0, 2.0, chosen=True)
    slow = one.replace(
        measurement=one.measurement.replace(drift=1.6),
        comparison=one.comparison.replace(
            step_time_at_start_speed=difference(1.5, 2.0), step_time_at_profile_speed=difference(1.0, 1.25)
        ),
    )
    scores = scores_of([slow])
    assert scores is not None
    assert scores.step_median_error == pytest.approx(0.5)
    assert scores.step_median_error_at_start_speed == pytest.approx(0.25)
    assert scores.step_median_error_without_drift == pytest.approx(0.2)
    html = render_report(result(slow))
    assert "× 1.60" in html
    assert "-20.0%" in html
    assert "-25.0%" in html
    assert scores_of([one]).step_median_error_without_drift is None  # type: ignore[union-attr]


def test_kendall_tau() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)  # 5 pairs agree, 1 does not
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(2 * 3))  # tau-b with one tie
    assert kendall_tau([1], [1]) is None
    assert kendall_tau([1, 1], [1, 2]) is None


def test_loss_check() -> None:
    assert check_losses((2.0, 1.0), (2.0, 1.0005), 1e-3).agrees
    assert not check_losses((2.0, 1.0), (2.0, 1.01), 1e-3).agrees
    assert not check_losses((2.0, math.nan), (2.0, 1.0), 1e-3).agrees
    assert not check_losses((), (2.0,), 1e-3).agrees
    assert not check_losses((2.0,), (2.0, 1.0), 1e-3).agrees  # a run that lost a step
    assert check_losses((2.0, 1.0), (2.0, 1.01), 1e-3).max_relative_difference == pytest.approx(0.01 / 1.01)


def test_device_ranges() -> None:
    assert device_ranges((0, 1, 2, 3)) == "0-3"
    assert device_ranges((5, 0, 1, 7)) == "0-1, 5, 7"


def test_stage_rows() -> None:
    recompute = (RecomputeRun(first_unit=1, num_units=2, mode="full"),)
    stages = (
        Stage(devices=(0, 1), first_unit=0, num_units=3, mesh=Mesh(tp=2), recompute=recompute),
        Stage(devices=(2, 3), first_unit=3, num_units=1, mesh=Mesh(dp=2), zero=1),
    )
    plan = Plan(global_batch=4, seq_len=8, pipelines=(Pipeline(stages=stages, micro_batch=1, num_micro_batches=4),))
    first, second = stage_rows(plan)
    assert (first["devices"], first["units"], first["mesh"]) == ("0-1", "0-2", "tp 2")
    assert first["recompute"] == "full (units 1-2)"
    assert (second["units"], second["mesh"], second["zero"], second["recompute"]) == ("3", "dp 2", 1, "none")
