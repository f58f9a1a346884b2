"""A plan written for another framework and read back is the same strategy; what cannot be written is refused by name."""

from __future__ import annotations

import ast
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.exporters import export_plan
from planner.importers import read_config
from planner.importers.megatron import parse_layout
from planner.strategy import parse_strategy, plan_from_strategy
from profiler.sources import load_model
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.interchange import TARGETS, Exported
from specs.plan import Plan
from specs.training import TrainingSpec
from tests.plans import gpu_cluster

CLUSTER = gpu_cluster(16, nodes=2)
WORKLOAD = TrainingSpec(global_batch=64, seq_len=2048)
# Where the file does not hold them: batch of accelerate, dp of Megatron (the world size gives it).
OUTSIDE = {"accelerate": ("micro_batch",), "megatron": ("dp",), "deepspeed": (), "torchtitan": ()}
STRATEGIES = {
    "ddp": "dp=16 micro_batch=2 zero=0",
    "zero 1": "dp=16 micro_batch=1 zero=1 recompute=none",
    "zero 2": "dp=16 micro_batch=1 zero=2",
    "fsdp": "dp=16 micro_batch=1 zero=3 recompute=full",
    "hsdp": "dp=16 micro_batch=4 zero=3 shard_group=8",
    "tp and zero 2": "tp=4 dp=4 zero=2",
    "3d": "tp=2 pp=2 dp=4 zero=1 sequence_parallel=true recompute=full split=6,4",
    "uneven ends": "pp=4 dp=4 zero=1 split=2,3,3,2",
    "uneven middle": "pp=4 dp=4 split=2,2,3,3",
    "interleaved": "tp=2 pp=2 dp=4 sequence_parallel=true schedule=interleaved chunks=2 split=3,2,2,3",
    "zero bubble": "pp=2 dp=8 schedule=zb_v split=3,2,2,3",
    "gpipe": "pp=2 dp=8 schedule=gpipe",
}
REFUSED = {
    "megatron": {"hsdp": "shard_group", "zero bubble": "schedule", "gpipe": "schedule"},
    "deepspeed": {"hsdp": "shard_group"} | {name: "pp_not_expressible" for name in STRATEGIES if "pp=" in STRATEGIES[name]},
    "accelerate": {name: "pp_not_expressible" for name in STRATEGIES if "pp=" in STRATEGIES[name]},
    "torchtitan": {"zero 1": "zero"},
}


@cache
def model() -> ModelGraph:
    return load_model("llama-demo")


@cache
def plan_of(strategy: str) -> Plan:
    return plan_from_strategy(strategy, model(), CLUSTER, WORKLOAD)


def exported(plan: Plan, target: str) -> Exported:
    return export_plan(plan, target, graph=model(), workload=WORKLOAD, cluster=CLUSTER)


def codes(plan: Plan, target: str) -> set[str]:
    with pytest.raises(InvalidInput) as caught:
        exported(plan, target)
    assert all(violation.message.startswith(target) for violation in caught.value.violations)
    return {violation.code for violation in caught.value.violations}


@pytest.mark.parametrize("target", list(OUTSIDE))
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_round_trip(name: str, target: str) -> None:
    plan = plan_of(STRATEGIES[name])
    if name in REFUSED[target]:
        assert REFUSED[target][name] in codes(plan, target)
        return
    result = exported(plan, target)
    for text in [text for file, text in result.files.items() if not file.endswith((".sh", ".sbatch"))]:
        read = read_config(text, target)
        wanted, found = parse_strategy(plan.strategy), parse_strategy(read.strategy)
        for field in (
            "pp",
            "dp",
            "tp",
            "zero",
            "micro_batch",
            "sequence_parallel",
            "recompute",
            "shard_group",
            "split",
            "num_stages",
        ):
            if field not in OUTSIDE[target]:
                assert getattr(found, field) == getattr(wanted, field), (field, text)
        if wanted.pp > 1:
            assert found.schedule == wanted.schedule
        assert not read.not_understood
        if "micro_batch" not in OUTSIDE[target]:
            assert read.workload["global_batch"] == WORKLOAD.global_batch


@pytest.mark.parametrize("target", TARGETS)
def test_what_no_target_can_say_is_refused_at_once(target: str) -> None:
    plan = plan_of(STRATEGIES["3d"])
    first, second = plan.pipelines[0].stages
    unlike = second.replace(mesh={"dp": 8, "tp": 1}, zero=0)
    uneven = first.replace(batch_share=(2, 1, 1, 0))
    pipeline = plan.pipelines[0].replace(stages=(uneven, unlike))
    found = plan.replace(pipelines=(pipeline,), straggler={"response": "exclude"})
    if target in ("slurm", "csv"):
        assert exported(found, target).files
        return
    assert {"mesh_differs_by_stage", "zero_differs_by_stage", "uneven_batch", "straggler_policy"} <= codes(found, target)


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(InvalidInput) as caught:
        export_plan(plan_of(STRATEGIES["ddp"]), "megatrn")
    assert caught.value.violations[0].nearest == "megatron"


def test_recompute_of_the_first_layers_of_every_stage() -> None:
    plan = plan_of("pp=2 dp=8 split=5,5")
    runs = [({"first_unit": 1, "num_units": 2, "mode": "full"},), ({"first_unit": 5, "num_units": 2, "mode": "full"},)]
    stages = [stage.replace(recompute=run) for stage, run in zip(plan.pipelines[0].stages, runs, strict=True)]
    some = plan.replace(pipelines=(plan.pipelines[0].replace(stages=tuple(stages)),))
    text = exported(some, "megatron").files["megatron.args"]
    assert "--recompute-method block\n--recompute-num-layers 2" in text
    assert codes(some, "torchtitan") == {"partial_recompute"}


def test_offload_reaches_the_launch_line() -> None:
    """U099: cores are bound to ranks when the optimizer runs on the host."""
    plan = plan_of("dp=16 zero=2")
    stage = plan.pipelines[0].stages[0]
    tier = {"tensor_class": "optimizer", "tier": "host", "first_unit": 0, "num_units": stage.num_units}
    offloaded = plan.replace(pipelines=(plan.pipelines[0].replace(stages=(stage.replace(tiers=(tier,)),)),))
    files = exported(offloaded, "deepspeed").files
    assert json.loads(files["ds_config.json"])["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "--bind_cores_to_rank" in files["launch.sh"]
    assert "optimizer_on_host" in codes(offloaded, "torchtitan")


def test_kv_heads_that_the_target_does_not_replicate() -> None:
    """U039: the limit depends on the target framework."""
    graph = model().replace(attributes={**model().attributes, "kv_heads": 2})
    plan = plan_of("tp=4 dp=4 zero=2")
    with pytest.raises(InvalidInput) as caught:
        export_plan(plan, "torchtitan", graph=graph)
    assert caught.value.violations[0].nearest == 2
    assert export_plan(plan, "megatron", graph=graph)


def test_schedule_csv_is_what_torch_reads(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    rows = exported(plan_of(STRATEGIES["zero bubble"]), "csv").files["schedule.csv"].splitlines()
    assert len(rows) == 2
    for cell in rows[0].split(","):
        assert str(_Action.from_str(cell)) == cell


def test_slurm_script() -> None:
    text = exported(plan_of(STRATEGIES["3d"]), "slurm").files["job.sbatch"]
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "torchrun --nnodes 2 --nproc-per-node 8" in text


# --- the target's own config classes, where they are installed ------------------------------------------------------


def test_megatron_reads_the_layout() -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = exported(plan_of(STRATEGIES["uneven middle"]), "megatron").files["megatron.args"]
    layout = text.split("--pipeline-model-parallel-layout ")[1].split("\n")[0]
    parsed = module.PipelineParallelLayerLayout(layout, 4)
    parsed.validate_layer_layout(8, None)
    counts = [sum(kind.name == "decoder" for kind in rank[0]) for rank in parsed.layout]
    assert counts == parse_layout(layout) == [1, 2, 3, 2]


def test_megatron_takes_the_degrees() -> None:
    module = pytest.importorskip("megatron.core.transformer.transformer_config")
    flags = dict(
        line.split(" ", 1)
        for line in exported(plan_of(STRATEGIES["3d"]), "megatron").files["megatron.args"].splitlines()
        if " " in line
    )
    config = module.TransformerConfig(
        num_layers=int(flags["--num-layers"]), hidden_size=int(flags["--hidden-size"]),
        num_attention_heads=int(flags["--num-attention-heads"]), num_query_groups=int(flags["--num-query-groups"]),
        tensor_model_parallel_size=int(flags["--tensor-model-parallel-size"]), sequence_parallel=True, bf16=True,
        pipeline_model_parallel_size=int(flags["--pipeline-model-parallel-size"]), pipeline_dtype=__import__("torch").bfloat16,
        recompute_granularity=flags["--recompute-granularity"], recompute_method=flags["--recompute-method"],
        recompute_num_layers=int(flags["--recompute-num-layers"]),
        num_layers_in_first_pipeline_stage=int(flags["--decoder-first-pipeline-num-layers"]),
    )  # fmt: skip
    assert config.num_layers_in_first_pipeline_stage == 5


def test_deepspeed_reads_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)  # no job is launched here
    for name in ("ddp", "zero 1", "zero 2", "fsdp", "tp and zero 2"):
        plan = plan_of(STRATEGIES[name])
        text = exported(plan, "deepspeed").files["ds_config.json"]
        config = module.DeepSpeedConfig(json.loads(text), mpu=_Mpu(plan))  # checks that the three batch keys agree
        assert config.train_batch_size == 64
        assert config.zero_config.stage == plan.pipelines[0].stages[0].zero


class _Mpu:
    """Tells DeepSpeed the number of replicas without a launched job."""

    def __init__(self, plan: Plan) -> None:
        self._dp = plan.pipelines[0].stages[0].mesh.dp

    def get_data_parallel_world_size(self) -> int:
        return self._dp

    get_world_size = get_data_parallel_world_size


def test_accelerate_reads_the_yaml(tmp_path: Path) -> None:
    module = pytest.importorskip("accelerate.commands.config.config_args")
    for name in ("ddp", "zero 1", "zero 2", "fsdp", "hsdp", "tp and zero 2"):
        path = tmp_path / "accelerate.yaml"
        path.write_text(exported(plan_of(STRATEGIES[name]), "accelerate").files["accelerate.yaml"])
        config = module.load_config_from_file(str(path))
        assert config.num_processes == 16
        assert config.num_machines == 2
        assert yaml.safe_load(path.read_text())["distributed_type"] == config.distributed_type.value


def test_torchtitan_takes_the_sections() -> None:
    module = pytest.importorskip("torchtitan.config")
    for name in ("ddp", "zero 2", "fsdp", "hsdp", "3d", "interleaved", "zero bubble", "gpipe"):
        files = exported(plan_of(STRATEGIES[name]), "torchtitan").files
        sections = tomllib.loads(files["train.toml"])
        config = module.ParallelismConfig(**sections["parallelism"])
        assert config.pipeline_parallel_degree == plan_of(STRATEGIES[name]).pipelines[0].pp
        module.TrainingConfig(**sections["training"])
        for call in [node for node in ast.walk(ast.parse(files["recipe.py"])) if isinstance(node, ast.Call) and node.keywords]:
            values: dict[str, Any] = {item.arg or "": ast.literal_eval(item.value) for item in call.keywords}
            getattr(module, call.func.id)(**values)  # type: ignore[attr-defined]
