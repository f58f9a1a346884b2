"""An engine whose answers are made up and whose jobs do what a test asks for: for the mechanics of jobs, not for numbers.

The behaviour of a job is chosen by the name of its workload: ``slow`` takes half a minute, ``infeasible`` finds nothing,
``defect`` raises, ``dies`` ends its process. Run as a module it serves the API, for tests that kill a real service:
``python -m tests.api_fake DATABASE_URL PORT``.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from api.engine import Engine
from api.schemas import PlanOptions
from api.settings import load_settings
from specs.answer import BrokenLimit, PlanAnswer
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import Violation
from specs.expr import Expr
from specs.graph import Block, ModelGraph, Op, Segment, TensorSpec
from specs.measurement import Comparison, Difference, Measurement
from specs.plan import CollectiveOptions, Pipeline, Plan, Stage
from specs.prediction import MemoryPrediction, Prediction
from specs.profile import DeviceProfile, Profile
from specs.progress import Progress, ProgressSink, ignore
from specs.training import TrainingSpec

SLOW_TICKS, TICK_S = int(os.environ.get("MESHWRIGHT_TEST_TICKS", "300")), 0.1
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CLUSTER = {
    "name": "pair",
    "backend": "gloo",
    "nodes": [{"count": 1, "device": "core", "devices_per_node": 2, "intra": {"bandwidth_gbyte_s": 1, "latency_us": 20}}],
    "device_types": [
        {"name": "core", "kind": "cpu_process", "memory_gib": 2, "memory_bandwidth_gbyte_s": 10, "peak_tflops": {"float32": 0.05}}
    ],
}
WORKLOAD = {"name": "quick", "global_batch": 8, "seq_len": 16, "precision": "fp32"}


def tiny_graph(name: str = "tiny") -> ModelGraph:
    """One op, one unit."""
    x = TensorSpec(name="x", shape=(Expr.of("B"), Expr.of("S")))
    out = TensorSpec(name="y", shape=(Expr.of("B"), Expr.of("S")))
    block = Block(
        name="only",
        inputs=(x,),
        ops=(Op(name="op0", target="aten.relu.default", args=({"ref": "x"},), outputs=(out,)),),
        outputs=("y",),
    )
    return ModelGraph(
        name=name,
        inputs=(x,),
        blocks=(block,),
        segments=(Segment(block="only", bind={"x": "x"}, produces={"y": "loss"}),),
        loss="loss",
    )


def plan_for(workload: TrainingSpec, strategy: str = "dp=2") -> Plan:
    """Two replicas."""
    stage = Stage(devices=(0, 1), first_unit=0, num_units=1).replace(mesh={"dp": 2})
    pipeline = Pipeline(stages=(stage,), micro_batch=workload.global_batch // 2, num_micro_batches=1)
    return Plan(
        strategy=strategy,
        global_batch=workload.global_batch,
        seq_len=workload.max_seq_len,
        pipelines=(pipeline,),
        collectives=CollectiveOptions(bucket_bytes=1 + zlib.crc32(strategy.encode())),  # so that strategies are different plans
    )


class FakeEngine(Engine):
    """See the module docstring."""

    def capture(self, document: Mapping[str, Any], name: str, progress: ProgressSink = ignore) -> ModelGraph:
        return tiny_graph(name)

    def resolve(self, cluster: ClusterSpec) -> ClusterSpec:
        return cluster

    def local_cluster(self, num_devices: int, progress: ProgressSink = ignore) -> ClusterSpec:
        nodes = [{**CLUSTER["nodes"][0], "devices_per_node": num_devices}]  # type: ignore[index]
        return ClusterSpec.parse({**CLUSTER, "name": "this machine", "nodes": nodes})

    def profile(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, *,
        strategies: Sequence[str] = (), quick: bool = True, progress: ProgressSink = ignore,
    ) -> Profile:  # fmt: skip
        _work(workload, progress)
        return Profile(name="fake", cluster=cluster.name, devices=(DeviceProfile(device="core"),))

    def plan(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None,
        options: PlanOptions, progress: ProgressSink = ignore, calibration: Calibration | None = None,
    ) -> PlanAnswer:  # fmt: skip
        _work(workload, progress)
        if workload.name == "infeasible":
            limit = BrokenLimit(limit="memory", message="needs 4 of 2 GiB", needed=4, available=2, unit="GiB")
            return PlanAnswer(status="infeasible", limits=(limit,), rejected={"memory": 7})
        plan = plan_for(workload, options.strategy or "dp=2")
        return PlanAnswer(status="optimal", plan=plan, prediction=self.estimate(graph, cluster, workload, plan, profile))

    def plan_of(self, strategy: str, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> Plan:
        return plan_for(workload, strategy)

    def violations(self, plan: Plan, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> list[Violation]:
        return []

    def estimate(
        self,
        graph: ModelGraph,
        cluster: ClusterSpec,
        workload: TrainingSpec,
        plan: Plan,
        profile: Profile | None,
        calibration: Calibration | None = None,
    ) -> Prediction:
        return Prediction(
            step_time_s=0.3, step_time_low_s=0.2, step_time_high_s=0.4, tokens_per_s=400.0,
            waterfall={"forward": 0.1, "backward": 0.2},
            memory=MemoryPrediction(peak_bytes=1e8, capacity_bytes=2e9, terms={"params": 4e7, "activations": 6e7}),
        )  # fmt: skip

    def trace(
        self,
        graph: ModelGraph,
        cluster: ClusterSpec,
        workload: TrainingSpec,
        plan: Plan,
        profile: Profile | None,
        calibration: Calibration | None = None,
    ) -> dict[str, Any]:
        return {"traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 5.0, "name": "0F0", "cat": "forward"}]}

    def execute(
        self, plan: Plan, graph: ModelGraph, workload: TrainingSpec, *, steps: int, warmup_steps: int,
        profile: Profile | None = None, output_dir: Path | None = None, run_time_limit_s: float = 1800.0,
        progress: ProgressSink = ignore,
    ) -> Measurement:  # fmt: skip
        _work(workload, progress)
        return Measurement(
            steps=steps, warmup_steps=warmup_steps, step_times_s=(0.31,) * steps, step_time_s=0.31, step_time_p10_s=0.3,
            step_time_p90_s=0.32, peak_memory_bytes=1.1e8, losses=(5.5,) * (steps + warmup_steps),
            waterfall={"forward": 0.11, "backward": 0.2},
        )  # fmt: skip

    def compare(self, prediction: Prediction, measurement: Measurement) -> Comparison:
        step = Difference(predicted=0.3, measured=0.31, relative_error=0.3 / 0.31 - 1)
        memory = Difference(predicted=1e8, measured=1.1e8, relative_error=1 / 1.1 - 1)
        return Comparison(step_time=step, peak_memory=memory, terms={"forward": step}, inside_interval=True)


def _work(workload: TrainingSpec, progress: ProgressSink) -> None:
    if workload.name == "dies":
        os._exit(9)
    if workload.name == "defect":
        raise RuntimeError("this is a defect")
    ticks = SLOW_TICKS if workload.name == "slow" else 3
    for tick in range(ticks):
        progress(Progress(stage="work", done=tick, total=ticks))
        if workload.name == "slow":
            time.sleep(TICK_S)


if __name__ == "__main__":
    import uvicorn

    from api.app import create_app

    settings = load_settings(database_url=sys.argv[1], local_devices=2)
    uvicorn.run(create_app(settings, FakeEngine()), port=int(sys.argv[2]), log_level="warning")
