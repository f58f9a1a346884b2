"""A table of published runs: reading, plans, predictions that never see a measurement, scores."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from planner.validate_runs.clusters import cluster_of
from planner.validate_runs.frameworks import framework_of, frameworks
from planner.validate_runs.models import model_of
from planner.validate_runs.plans import plan_of, recompute_runs, sizes_of, split_units
from planner.validate_runs.predict_row import RunPredictor, recompute_modes
from planner.validate_runs.runs import PublishedRun, SkippedRun, read_runs, rows_of
from planner.validate_runs.scores import summary
from planner.validate_runs.validate import predictions_csv, validate_rows
from profiler.catalogue import device
from profiler.decoder_graph import decoder_graph
from specs.errors import InvalidInput

GPT: dict[str, str] = {
    "id": "A-1", "source": "Megatron-LM tables", "year": "2021", "model": "GPT", "family": "gpt", "layers": "8", "hidden": "512",
    "ffn_hidden": "2048", "heads": "8", "kv_heads": "8", "vocab": "1024", "seq_len": "256", "gated_mlp": "0", "gpu": "A100-80GB",
    "gpus_per_node": "8", "num_gpus": "16", "intra_link": "NVLink/NVSwitch", "inter_link_gbps_per_gpu": "200", "precision": "fp16",
    "global_batch": "64", "micro_batch": "1", "tp": "2", "pp": "2", "vpp": "1", "cp": "1", "dp": "4", "zero_stage": "none",
    "recompute": "full", "flash_attention": "0", "measured_step_s": "0.5", "measured_peak_mem_gib": "3",
}  # fmt: skip
LLAMA: dict[str, str] = {
    **GPT, "id": "B-1", "source": "PyTorch torchtitan", "year": "2024", "family": "llama", "gated_mlp": "1", "precision": "bf16",
    "tp": "1", "pp": "1", "dp": "16", "zero_stage": "fsdp", "recompute": "selective", "flash_attention": "1", "notes": "",
    "measured_step_s": "", "measured_tokens_per_s_per_gpu": "8000", "measured_peak_mem_gib": "2.5",
}  # fmt: skip


def run_of(**changes: str) -> PublishedRun:
    return rows_of([{**GPT, **changes}])[0].run


def table(*records: dict[str, str]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


# --- reading ----------------------------------------------------------------------------------------------------------


def test_every_wrong_cell_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(table({**GPT, "layers": "many", "tp": "0", "gated_mlp": "maybe"}))
    with pytest.raises(InvalidInput) as error:
        read_runs(path)
    assert [violation.loc for violation in error.value.violations] == [(2, "layers"), (2, "tp"), (2, "gated_mlp")]


def test_a_table_without_required_columns_names_them(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("id,source\n1,x\n")
    with pytest.raises(InvalidInput) as error:
        read_runs(path)
    assert {violation.code for violation in error.value.violations} == {"missing_column"}


def test_blank_is_unknown_and_out_of_memory_is_read_from_the_notes() -> None:
    row = rows_of(
        [{**GPT, "micro_batch": "", "measured_step_s": "", "measured_peak_mem_gib": "", "notes": "measured 'OOM': 2 GPUs"}]
    )[0]
    assert row.run.micro_batch is None
    assert row.measured.out_of_memory is True
    assert rows_of([GPT])[0].measured.out_of_memory is False
    silent = {**GPT, "measured_step_s": "", "measured_peak_mem_gib": ""}
    assert rows_of([silent])[0].measured.out_of_memory is None


def test_a_run_has_no_measured_field() -> None:
    assert not [name for name in PublishedRun.__slots__ if "measured" in name]


# --- models and frameworks ----------------------------------------------------------------------------------------------


def test_published_size_tells_head_size_and_head_sharing() -> None:
    # 2 x 48 layers' worth of wide heads: 4096 wide attention on a hidden size of 2048 is only told by the size
    run = run_of(
        family="llama",
        gated_mlp="1",
        layers="10",
        hidden="2048",
        heads="32",
        kv_heads="4",
        ffn_hidden="768",
        vocab="1000",
        params_b="0.2397",
    )
    settings = model_of(run).settings
    assert (settings.head_dim, settings.tied_embeddings) == (128, False)
    assert model_of(run_of()).settings.tied_embeddings


def test_key_value_heads_are_repeated_for_more_ranks() -> None:
    run = run_of(heads="32", hidden="4096", kv_heads="8", tp="32", pp="1", num_gpus="32", family="llama")
    model = model_of(run)
    assert model.settings.kv_heads == 32
    assert any("repeated for 32" in text for text in model.assumed)
    assert model_of(run_of(heads="32", hidden="4096", kv_heads="8", tp="8", family="llama")).settings.kv_heads == 8


def test_a_neuron_core_is_half_a_trainium_chip() -> None:
    run = run_of(gpu="Trainium1 NeuronCore (16 GB; 2 per chip)", gpus_per_node="32", num_gpus="64", intra_link="NeuronLink",
                 inter_link_gbps_per_gpu="")  # fmt: skip
    cluster, _ = cluster_of(run)
    assert (cluster.num_devices, cluster.nodes[0].devices_per_node) == (64, 32)
    core, chip = cluster.device_types[0], device("trainium1")
    assert (2 * core.memory_bytes, 2 * core.peak_flop_per_s["bfloat16"]) == (chip.memory_bytes, chip.peak_flop_per_s["bfloat16"])


def test_layers_that_no_graph_has_are_skipped() -> None:
    with pytest.raises(SkippedRun) as error:
        model_of(run_of(family="nemotron-h-moe"))
    assert error.value.code == "layers_not_expressible"


def test_a_name_that_tells_the_architecture_is_looked_up_and_listed() -> None:
    run = run_of(model="Nemotron_3_Nano", family="nemotron-h-moe", layers="", hidden="", heads="", seq_len="8192")
    model = model_of(run)
    assert (model.settings.layers, model.settings.hidden, model.settings.experts) == (52, 2688, 128)
    assert any("nemotron-3-nano-30b" in text for text in model.assumed)
    assert model_of(run_of(model="DeepSeekV3", family="deepseek", layers="61")).settings.latent is not None


def test_adapter_runs_train_adapters_only(predictor: RunPredictor) -> None:
    whole, adapted = (
        predictor.predict(run_of(notes=notes, recompute="none", hidden="4096", ffn_hidden="16384", layers="4", micro_batch="4"))
        for notes in ("", "LoRA")
    )
    assert any("adapters of rank" in text for text in adapted.assumed)
    assert adapted.prediction.memory.terms["optimizer"] < 0.1 * whole.prediction.memory.terms["optimizer"]
    assert adapted.prediction.step_time_s < whole.prediction.step_time_s


def test_four_bit_products_run_at_their_own_peak(predictor: RunPredictor) -> None:
    rack = {"gpu": "GB200", "gpus_per_node": "4", "year": "2026", "hidden": "8192", "ffn_hidden": "32768", "heads": "64",
            "kv_heads": "64", "micro_batch": "8", "seq_len": "4096", "layers": "4"}  # fmt: skip
    eight, four = (predictor.predict(run_of(**rack, precision=word)).prediction.step_time_s for word in ("mxfp8", "nvfp4"))
    assert eight / 2 < four < eight


def test_framework_by_words_year_and_sizes() -> None:
    assert framework_of(run_of()).name == "megatron_2021"
    assert framework_of(run_of(year="2025")).name == "megatron_core"
    assert framework_of(run_of(source="a blog", zero_stage="fsdp", year="2025")).name == "fsdp2"
    assert framework_of(run_of(source="a blog", zero_stage="zero3", tp="1", pp="1", year="2025")).name == "deepspeed"
    assert framework_of(run_of(source="Megatron-DeepSpeed runs")).name == "megatron_deepspeed"
    assert framework_of(run_of(source="a blog", compile="1")).software.fusion == "compiler"
    assert len({item.name for item in frameworks()}) == len(frameworks())
    assert all(item.provenance for item in frameworks())


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "vpp", "name", "chunks", "ranks"), [
    ("", "2", "interleaved", 2, [0, 1, 0, 1]), ("1f1b", "1", "1f1b", 1, [0, 1]), ("zbv", "2", "zb_v", 2, [0, 1, 1, 0]),
    ("zero-bubble (zbb)", "1", "zb_h1", 1, [0, 1]), ("DualPipeV", "2", "dualpipe_v", 2, [0, 1, 1, 0]),
    ("gpipe", "1", "gpipe", 1, [0, 1]),
])  # fmt: skip
def test_schedules_of_rows(word: str, vpp: str, name: str, chunks: int, ranks: list[int]) -> None:
    run = run_of(schedule=word, vpp=vpp)
    framework = framework_of(run)
    plan = plan_of(run, sizes_of(run, framework, []), framework, "none")
    assert (plan.schedule.name, plan.schedule.stages_per_rank) == (name, chunks)
    (pipeline,) = plan.pipelines
    assert [pipeline.ranks().index(stage.devices) for stage in pipeline.stages] == ranks
    assert len(plan.schedule.actions(num_ranks=2, num_micro_batches=pipeline.num_micro_batches)) == 2


def test_units_of_stages() -> None:
    assert split_units(run_of(layers="8"), 2) == [5, 5]
    assert sum(split_units(run_of(layers="10"), 4)) == 12
    counted = split_units(run_of(layers="70", notes="pp partition type:transformer|embedding"), 12)
    assert sum(counted) == 72
    assert set(counted) == {6}
    cut = split_units(run_of(layers="24", notes="pipeline cut over 30 stages units [0, 8, 14, 20, 30]"), 4)
    assert sum(cut) == 26


def test_sizes_that_do_not_match_are_skipped() -> None:
    for changes, code in (
        ({"num_gpus": "15"}, "sizes_do_not_match"), ({"tp": "", "pp": "", "zero_stage": ""}, "parallel_sizes_not_given"),
        ({"offload": "optimizer"}, "offload"),
        ({"notes": "QLoRA"}, "precision_not_described"), ({"schedule": "v-half"}, "schedule_not_expressible"),
    ):  # fmt: skip
        run = run_of(**changes)
        with pytest.raises(SkippedRun) as error:
            sizes_of(run, framework_of(run), [])
        assert error.value.code == code


def test_a_batch_that_is_not_given_is_the_smallest_sensible_one_and_is_listed() -> None:
    assumed: list[str] = []
    run = run_of(global_batch="", micro_batch="")  # dp 4, pp 2: 32 sequences of 256 tokens a pass, 8 passes per stage
    sizes = sizes_of(run, framework_of(run), assumed)
    assert (sizes.micro_batch, sizes.num_micro_batches, sizes.global_batch) == (32, 16, 4 * 32 * 16)
    assert [text for text in assumed if "global batch of 2048" in text]
    alone = run_of(global_batch="", micro_batch="3", pp="1", dp="8")
    assert sizes_of(alone, framework_of(alone), []).global_batch == 3 * 8


def test_recompute_leaves_embedding_and_tail_alone() -> None:
    runs = recompute_runs("full", 0, 10, 10)
    assert [(item.first_unit, item.num_units) for item in runs] == [(1, 8)]
    assert [item.first_unit for item in recompute_runs("full", 0, 10, 10, share=0.5)] == [2, 4, 6, 8]
    assert [item.first_unit for item in recompute_runs("full", 0, 10, 10, share=0.25)] == [4, 8]
    assert [item.first_unit for item in recompute_runs("full", 0, 10, 10, share=0.75)] == [2, 3, 4, 6, 7, 8]
    partly = ("full of 0.25", "full of 0.5", "full of 0.75", "full")
    assert recompute_modes(run_of(recompute=""), "math", "layers") == ("none", "attention", *partly)


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictor() -> RunPredictor:
    return RunPredictor(decoder_graph)


def test_long_steps_equal_the_whole_simulation(predictor: RunPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    from simulator import steady_state

    for changes in (
        {"global_batch": "256"},
        {"vpp": "2", "global_batch": "256"},
        {"tp": "1", "pp": "1", "dp": "16", "zero_stage": "fsdp", "global_batch": "512"},
    ):
        run = run_of(**changes)
        short = predictor.predict(run).prediction
        with monkeypatch.context() as patch:
            patch.setattr(steady_state, "window", lambda count, pp, chunks=1: steady_state.Window(None, count))
            whole = predictor.predict(run).prediction
        assert short.step_time_s == pytest.approx(whole.step_time_s, rel=2e-3)
        assert short.memory.peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=1e-6)
        assert sum(short.waterfall.values()) == pytest.approx(short.step_time_s, rel=1e-6)


def test_a_long_step_that_overflows_does_not_fit(predictor: RunPredictor) -> None:
    wide = {
        "hidden": "8192",
        "ffn_hidden": "32768",
        "layers": "32",
        "heads": "64",
        "kv_heads": "64",
        "tp": "1",
        "pp": "2",
        "dp": "8",
    }
    for batch in ("16", "4096"):  # simulated whole, and continued from two short steps
        assert not predictor.predict(run_of(**wide, global_batch=batch)).fits
    assert predictor.predict(run_of(global_batch="4096")).fits


def test_predictions_do_not_look_at_measurements() -> None:
    records = [GPT, LLAMA, {**GPT, "id": "A-2", "pp": "1", "dp": "8"}, {**LLAMA, "id": "B-2", "compile": "1", "zero_stage": "hsdp"}]
    generator = random.Random(3)
    shuffled = []
    for record in records:
        noise = {name: str(generator.uniform(0.1, 100)) for name in record if name.startswith("measured_")}
        shuffled.append({**record, **noise, "measured_mfu": "0.5", "measured_tflops_per_gpu": "250"})
    plain, other = (validate_rows(rows_of(items), decoder_graph) for items in (records, shuffled))
    assert len(plain.judged) == len(records)
    for one, two in zip(plain.judged, other.judged, strict=True):
        assert one.predicted.prediction == two.predicted.prediction
        assert (one.predicted.fits, one.predicted.strategy) == (two.predicted.fits, two.predicted.strategy)


def test_more_devices_and_less_work_are_faster(predictor: RunPredictor) -> None:
    base = predictor.predict(run_of()).prediction.step_time_s
    assert predictor.predict(run_of(num_gpus="32", dp="8")).prediction.step_time_s < base
    assert predictor.predict(run_of(recompute="none")).prediction.step_time_s < base
    assert predictor.predict(run_of(inter_link_gbps_per_gpu="10")).prediction.step_time_s > base


def test_context_and_expert_parallel_rows_are_predicted(predictor: RunPredictor) -> None:
    long = rows_of([{**LLAMA, "seq_len": "4096", "cp": "4", "dp": "4", "global_batch": "16"}])[0].run
    moe = {**LLAMA, "moe_experts": "8", "moe_topk": "2", "ep": "8", "recompute": "none"}
    assert predictor.predict(long).prediction.waterfall["cp_comm"] > 0
    spread, whole = (predictor.predict(rows_of([item])[0].run) for item in (moe, {**moe, "ep": "1"}))
    assert spread.prediction.waterfall["ep_comm"] > 0
    assert spread.prediction.memory.terms["gathered"] < whole.prediction.memory.terms["gathered"]


def test_experts_stay_whole_where_the_framework_or_the_degrees_say_so() -> None:
    mixture = {"moe_experts": "16", "moe_topk": "2", "gated_mlp": "1", "family": "mixtral", "year": "2026", "pp": "1", "dp": "8"}
    for changes, whole in (
        ({"ep": "8"}, True), ({"ep": "16"}, True), ({"ep": "1"}, False), ({"ep": "8", "sequence_parallel": "0"}, False),
    ):  # fmt: skip
        run = run_of(**{**mixture, **changes})
        assert sizes_of(run, framework_of(run), []).whole_experts is whole
    assert not sizes_of(run_of(**{**mixture, "year": "2021", "ep": "8"}), framework_of(run_of()), []).whole_experts
    run = run_of(**mixture, ep="16", sequence_parallel="0")
    with pytest.raises(SkippedRun) as error:
        sizes_of(run, framework_of(run), [])
    assert error.value.code == "experts_over_tensor_parallel"


# --- scores and the command line --------------------------------------------------------------------------------------


def test_summary_by_hand() -> None:
    found = summary([0.1, -0.2, 0.3, -0.4])
    assert found == {"rows": 4, "median_ape": 0.25, "p90_ape": 0.4, "mape": 0.25, "bias": pytest.approx(-0.05)}
    assert summary([])["median_ape"] is None


def test_validate_prints_one_document_and_writes_every_row(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    runs.write_text(table({**GPT, **dict.fromkeys(LLAMA, "")} | GPT, LLAMA, {**GPT, "id": "A-3", "family": "mamba"}))
    result = CliRunner().invoke(app, ["validate", str(runs), "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert (document["rows"], document["predicted_rows"]) == (3, 2)
    assert document["skipped"]["by_reason"] == {"layers_not_expressible": 1}
    assert document["step_time"]["rows"] == document["peak_memory"]["rows"] == 2
    assert set(document["by_source"]) == {"Megatron-LM tables", "PyTorch torchtitan"}
    lines = list(csv.DictReader(out.open()))
    assert [line["id"] for line in lines] == ["A-1", "B-1", "A-3"]
    terms = sum(float(value) for name, value in lines[0].items() if name.startswith("time_") and value)
    assert terms == pytest.approx(float(lines[0]["predicted_step_s"]), rel=1e-4)
    assert lines[2]["status"].startswith("skipped: layers_not_expressible")


def test_processes_share_the_rows_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{**GPT, "id": f"R-{number}", "global_batch": str(16 * (number + 1))} for number in range(5)]
    rows = rows_of([*records, {**GPT, "id": "R-odd", "num_gpus": ""}])
    alone = validate_rows(rows, decoder_graph)
    monkeypatch.setattr("planner.validate_runs.validate.ROWS_WORTH_A_PROCESS", 1)
    monkeypatch.setattr("planner.validate_runs.validate.CHUNK_ROWS", 2)
    shared = validate_rows(rows, decoder_graph, processes=2)
    assert predictions_csv(shared) == predictions_csv(alone)
    assert len(shared.skipped) == 1
