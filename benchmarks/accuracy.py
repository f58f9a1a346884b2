"""How good are the predictions on published training runs? Writes docs/accuracy.md.

    python -m benchmarks.accuracy runs.csv [--vtrain ground_truth_multi.csv] [-o docs/accuracy.md]

``runs.csv``: a table of published runs (the columns that ``meshwright validate`` reads). ``--vtrain``: the measured iterations of
vTrain's repository, a set of its own. Constants of the simulator that were tuned were tuned on the fit sources only; the others,
whole sources never looked at for that, are the check.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scatter import scatter_svg
from planner.validate_runs.runs import Row, read_runs, rows_of
from planner.validate_runs.scores import Judged, coverage, out_of_memory, summary
from planner.validate_runs.sets import FIT_SOURCES, set_of, source_of
from planner.validate_runs.validate import Validation, validate_rows
from profiler.decoder_graph import decoder_graph
from simulator.efficiency_model import STEP_LOAD_EXPONENT, STEP_LOAD_MOST, STEP_LOAD_WATTS
from simulator.nccl import line_rate_share

WORST_ROWS = 20

HOLDS_BACK = (
    "- Mixtures of experts: host work between kernels and uneven routing are not modelled; releases of one framework within a year "
    "differ by a factor of 1.5 on the same row (fused grouped products, whole-step CUDA graphs), and the table does not say which.",
    "- Offload of activations (Megatron Bridge's 70B and 405B recipes under FSDP) is predicted as recompute.",
    "- Networks that do not reach their nominal rate (Omni-Path, TCP): the same team reports a tenth to a fifth of it, and 40 % "
    "between equal runs.",
    "- T4 and Trainium: the fits of the first are of short kernels on a cool chip, the second has no public kernel measurements.",
    "- DeepSpeed's ZeRO 3 of 2021 and context parallelism over long sequences are predicted too fast.",
    "- BERT rows of 512 tokens count padding that their data loader removes.",
    "- Recompute that a table does not give is taken as the least that fits by our memory model: none, then cheap results made "
    "again where the framework has that, then a share of the layers.",
    "- The check sources are no blind test any more: causes of their errors were looked for, and what frameworks do was then read "
    "in their sources. No constant was fitted on them.",
)

# name, value, bounds, what it is and where the bounds come from
TUNED_CONSTANTS: tuple[tuple[str, str, str, str], ...] = (
    (
        "`STEP_LOAD_WATTS`, `STEP_LOAD_EXPONENT`", f"{STEP_LOAD_WATTS:g} J/FLOP, {STEP_LOAD_EXPONENT:g}",
        f"a slowdown of products between 1 and {STEP_LOAD_MOST:g}",
        "clock that a step leaves to products, by the device's power per FLOP (`simulator/efficiency_model.py`)",
    ),
    (
        "line rate of Omni-Path", f"{line_rate_share('omni-path'):g} of nominal", "0.05 to 0.40",
        "measured shares of two systems bound it (`simulator/nccl.py`); BigScience V100 is not clean of it",
    ),
    (
        "`step_host_s` of llm-foundry", "0.05 s", "0 to 0.1 s",
        "work of Composer between steps that nothing hides (`traces/frameworks.json`); 0.065 s on A100 and 0.04 s on H100 alone",
    ),
)  # fmt: skip


def vtrain_rows(path: Path) -> list[Row]:
    """vTrain's table: Megatron-LM, full recompute, no interleaving, nodes of eight A100 with four 200 Gbit/s NICs."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    records = []
    for number, line in enumerate(lines):
        hidden = int(line["hidden size"])
        records.append({
            "id": f"vtrain-{number}", "source": "vTrain multi-node ground truth", "source_ref": "Megatron-LM", "year": "2021",
            "model": "GPT", "family": "gpt", "layers": line["# layers"], "hidden": str(hidden), "ffn_hidden": str(4 * hidden),
            "heads": line["attention heads"], "kv_heads": line["attention heads"], "vocab": "51200",
            "seq_len": line["sequence length"], "gated_mlp": "0", "gpu": "A100-SXM-80GB", "gpus_per_node": "8",
            "num_gpus": line["# GPUs"], "intra_link": "NVLink/NVSwitch", "inter_link_gbps_per_gpu": "100", "precision": "fp16",
            "global_batch": line["global batch"], "micro_batch": line["micro batch"], "tp": line["tensor parallelism"],
            "pp": line["pipeline parallelism"], "vpp": "1", "cp": "1", "dp": line["data parallelism"], "zero_stage": "none",
            "sequence_parallel": "0", "recompute": "full", "offload": "none", "flash_attention": "0",
            "measured_step_s": str(float(line["iteration time (ms)"]) / 1e3),
        })  # fmt: skip
    return rows_of(records, subject=str(path))


def suspected_term(judged: Judged) -> str:
    """The term that most likely explains an error: of too long a step the largest term that is no compute, if it is at least half
    the error; of too short a step compute, unless it would have to be off by more than 40 %."""
    error = judged.step_error or 0.0
    prediction = judged.predicted.prediction
    shares = {name: seconds / prediction.step_time_s for name, seconds in prediction.waterfall.items()}
    compute = sum(shares.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    other = {name: share for name, share in shares.items() if name not in ("forward", "backward", "recompute")}
    largest = max(other, key=lambda name: other[name], default="other")
    missing = abs(1 / (1 + error) - 1)
    if error > 0:
        return largest if other.get(largest, 0.0) >= missing / 2 else "compute"
    return "compute" if missing <= 0.4 * compute else f"{largest}, host"


Grouping = tuple[str, Callable[[Judged], str]]


def scale_of(item: Judged) -> str:
    """Devices in steps."""
    count = item.row.run.num_gpus or 0
    return next(
        text for most, text in ((1, "1"), (8, "2 to 8"), (64, "9 to 64"), (512, "65 to 512"), (10**9, "above 512")) if count <= most
    )


def parallelism_of(item: Judged) -> str:
    """Kinds of parallelism that the run combines."""
    run = item.row.run
    kinds = [name for name, degree in (("tp", run.tp), ("pp", run.pp), ("cp", run.cp), ("ep", run.ep)) if (degree or 1) > 1]
    zero = run.zero_stage.lower()
    if zero.startswith(("fsdp", "hsdp", "zero3", "zero2")):
        kinds.append("fsdp")
    return " + ".join(kinds) or "dp only"


GROUPINGS: tuple[Grouping, ...] = (
    ("source", lambda item: source_of(item.row.run)),
    ("device", lambda item: item.row.run.gpu),
    ("devices", scale_of),
    ("parallelism", parallelism_of),
    ("precision", lambda item: item.row.run.precision or "not given"),
)


def report(validation: Validation, extra: Sequence[Judged], image: str) -> str:
    """The page."""
    judged = list(validation.judged)
    lines = ["# Accuracy on published training runs", "", INTRODUCTION, "", f"![predicted over measured step time]({image})", ""]
    lines += ["## Summary", "", *_summary_table(judged, extra), ""]
    lines += ["## Out of memory", "", *_oom_table(judged), ""]
    for title, key in GROUPINGS:
        lines += [f"## By {title}", "", *_group_table(judged, title, key), ""]
    lines += ["## What holds it back", "", *HOLDS_BACK, ""]
    lines += ["## Worst rows", "", *_worst(judged), ""]
    lines += ["## Rows that are not predicted", "", *_skipped(validation), ""]
    lines += ["## What was tuned", "", *_tuned(), ""]
    return "\n".join(lines)


INTRODUCTION = """Every row of a table of public training runs, predicted from its configuration alone, against what its source
measured. Errors are relative (predicted over measured, minus one); *bias* is their median, the others are of their magnitudes.
Nothing here is measured by us, and the table itself is not part of this repository: `make accuracy RUNS=runs.csv` makes this page
again from a copy of it.

*Fit* sources are those on which constants of the simulator were allowed to be tuned, *check* sources were not looked at for that.
Op times come from fits on public kernel measurements (`traces/efficiency`), never from these tables; what each training framework
fuses and overlaps from its source (`traces/frameworks.json`). How often the measured step lies in the predicted 80 % interval
stands in the last column of the summary; the interval's widths (`traces/intervals.json`) are fitted on the fit sources by
`python -m benchmarks.intervals RUNS --write`."""


def _row(name: str, found: dict[str, Any]) -> str:
    cells = (_percent(found.get(key)) for key in ("median_ape", "p90_ape", "mape", "bias", "coverage"))
    return f"| {name} | {found['rows']} | " + " | ".join(cells) + " |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


HEAD = [
    "| {} | rows | median | 90th percentile | mean | bias | in the 80 % interval |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
]


def _head(name: str) -> list[str]:
    return [HEAD[0].format(name), HEAD[1]]


def _step(items: Sequence[Judged]) -> dict[str, Any]:
    return {**summary([item.step_error for item in items if item.step_error is not None]), "coverage": coverage(items)}


def _memory(items: Sequence[Judged]) -> dict[str, Any]:
    return summary([item.memory_error for item in items if item.memory_error is not None])


def _summary_table(judged: Sequence[Judged], extra: Sequence[Judged]) -> list[str]:
    lines = _head("quantity, rows")
    for name in ("fit", "check"):
        part = [item for item in judged if set_of(item.row.run) == name]
        lines += [_row(f"step time, {name} sources", _step(part)), _row(f"peak memory, {name} sources", _memory(part))]
    lines.append(_row("step time, all", _step(judged)))
    lines.append(_row("peak memory, all", _memory(judged)))
    if extra:
        lines.append(_row("step time, vTrain's 109 multi-node iterations (check)", _step(extra)))
    return lines


def _oom_table(judged: Sequence[Judged]) -> list[str]:
    found = out_of_memory(judged)
    accuracy = found["accuracy"]
    return [
        "| | ran out of memory | ran |", "| --- | ---: | ---: |",
        f"| predicted not to fit | {found['true_positive']} | {found['false_positive']} |",
        f"| predicted to fit | {found['false_negative']} | {found['true_negative']} |", "",
        "" if accuracy is None else f"Right in {100 * float(accuracy):.1f} % of the rows whose outcome is known.",
    ]  # fmt: skip


def _group_table(judged: Sequence[Judged], title: str, key: Callable[[Judged], str]) -> list[str]:
    groups: dict[str, list[Judged]] = {}
    for item in judged:
        groups.setdefault(key(item), []).append(item)
    lines = [
        f"| {title} | set | rows | median | 90th percentile | mean | bias | memory rows | median | bias |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, items in sorted(groups.items()):
        step, memory = _step(items), _memory(items)
        sets = "/".join(sorted({set_of(item.row.run) for item in items}, reverse=True))
        lines.append(
            f"| {name} | {sets} | {step['rows']} | {_percent(step['median_ape'])} | {_percent(step['p90_ape'])} "
            f"| {_percent(step['mape'])} | {_percent(step['bias'])} | {memory['rows']} "
            f"| {_percent(memory['median_ape'])} | {_percent(memory['bias'])} |"
        )
    return lines


def _worst(judged: Sequence[Judged]) -> list[str]:
    rows = sorted((item for item in judged if item.step_error is not None), key=lambda item: -abs(item.step_error or 0.0))
    lines = [
        "| row | model | devices | strategy | measured | predicted | error | suspected |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for item in rows[:WORST_ROWS]:
        run, measured = item.row.run, item.row.measured
        lines.append(
            f"| {run.id} | {run.model} | {run.num_gpus} x {run.gpu} | {item.predicted.strategy} | "
            f"{'' if measured.step_s is None else f'{measured.step_s:.3g} s'} | {item.predicted.prediction.step_time_s:.3g} s | "
            f"{_percent(item.step_error)} | {suspected_term(item)} |"
        )
    return lines


def _skipped(validation: Validation) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    example: dict[tuple[str, str], str] = {}
    for item in validation.skipped:
        key = (item.code, item.row.run.source)
        counts[key] = counts.get(key, 0) + 1
        example.setdefault(key, item.reason)
    lines = ["| reason | source | rows | for example |", "| --- | --- | ---: | --- |"]
    return lines + [
        f"| {code} | {source} | {count} | {example[code, source]} |" for (code, source), count in sorted(counts.items())
    ]


def _tuned() -> list[str]:
    lines = ["Sources of the fit set: " + ", ".join(FIT_SOURCES) + ".", ""]
    if not TUNED_CONSTANTS:
        return [*lines, "No constant was tuned on these tables."]
    lines += ["| constant | value | bounds | what it is |", "| --- | --- | --- | --- |"]
    return lines + [f"| {name} | {value} | {bounds} | {meaning} |" for name, value, bounds, meaning in TUNED_CONSTANTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--vtrain", type=Path, default=None)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/accuracy.md"))
    options = parser.parse_args()
    validation = validate_rows(read_runs(options.runs), decoder_graph)
    extra = validate_rows(vtrain_rows(options.vtrain), decoder_graph).judged if options.vtrain else ()
    image = options.output.parent / "images" / "accuracy.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    points = [
        (item.row.measured.step_s, item.predicted.prediction.step_time_s, set_of(item.row.run))
        for item in validation.judged
        if item.row.measured.step_s is not None
    ]
    image.write_text(scatter_svg(points))
    options.output.write_text(report(validation, extra, f"images/{image.name}"))
    for name in ("fit", "check"):
        found = _step([item for item in validation.judged if set_of(item.row.run) == name])
        print(
            f"{name}: {found['rows']} rows, median {_percent(found['median_ape'])}, p90 {_percent(found['p90_ape'])}, "
            f"80 % interval holds {_percent(found['coverage'])}"
        )
    if extra:
        print(f"vTrain: MAPE {_percent(_step(extra)['mape'])}")


if __name__ == "__main__":
    main()
