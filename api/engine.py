"""The one door from the service and the command line to capture, profiling, planning, execution and comparison.

Heavy imports (torch, OR-tools) happen inside the methods: the service and ``--help`` start without them, and the service
itself never loads torch, because it calls the methods marked *isolated* in a child process (``api.isolate``). An engine
pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from api.engine_questions import QuestionEngine, cost_model, reporting
from api.engine_robustness import RobustnessEngine
from api.schemas import PlanOptions
from specs.accounting import FlopConvention, Utilization
from specs.answer import PlanAnswer
from specs.base import InvalidInputValue
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.measurement import Comparison, Measurement
from specs.memory import MemoryReport
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import Profile
from specs.progress import ProgressSink, ignore
from specs.training import TrainingSpec


def is_graph(document: Mapping[str, Any]) -> bool:
    """Whether a posted model is an op graph; else it is a Hugging Face config."""
    return "blocks" in document or "segments" in document or "ops" in document


class Engine(QuestionEngine, RobustnessEngine):
    """What Meshwright can do, in terms of documents.

    ``allow_factory``: a graph may name code of this machine (``package.module:factory``) to be built; only the command line
    allows it, never the service.
    """

    def __init__(self, *, allow_factory: bool = False) -> None:
        self.allow_factory = allow_factory

    # models ----------------------------------------------------------------------------------------------------------

    @reporting
    def check_model(self, document: Mapping[str, Any]) -> None:
        """Raise :class:`InvalidInput` when the document is neither a sound op graph nor a config that capture knows."""
        if is_graph(document):
            ModelGraph.parse(dict(document))
            return
        if "model_type" not in document and "architectures" not in document:
            raise InvalidInput.single(
                "unknown_model_document", "this is neither a Hugging Face config nor an op graph", subject="model",
                allowed=["a config.json with 'model_type'", "an op graph with 'blocks' and 'segments'"],
            )  # fmt: skip
        from profiler.hf import adapt

        adapt(dict(document))

    @reporting
    def capture(self, document: Mapping[str, Any], name: str, progress: ProgressSink = ignore) -> ModelGraph:
        """The op graph of a checked model document. Isolated: imports torch for a config."""
        from profiler.sources import model_from_document

        return model_from_document(document, name=name)

    @reporting
    def load_model(self, text: str) -> ModelGraph:
        """The command line's MODEL: file, preset or ``package.module:factory``. Never called for a request."""
        from profiler.sources import load_model

        return load_model(text)

    def model_presets(self) -> list[str]:
        """Names of the built-in model configs."""
        from profiler.sources import preset_names

        return preset_names()

    def model_preset(self, name: str) -> dict[str, Any]:
        """The config of one of :meth:`model_presets`."""
        from profiler.sources import read_preset

        return read_preset(name)

    # clusters and profiles -------------------------------------------------------------------------------------------

    @reporting
    def resolve(self, cluster: ClusterSpec) -> ClusterSpec:
        """Presets and device names filled in from the catalogue; unknown ones raise :class:`InvalidInput`."""
        from profiler.catalogue import resolve_cluster

        return resolve_cluster(cluster)

    def devices(self) -> list[dict[str, Any]]:
        """The device catalogue, with the source of each number."""
        from profiler.catalogue import list_devices

        return [device.model_dump(mode="json") for device in list_devices()]

    def node_presets(self) -> list[dict[str, Any]]:
        """The node presets of the catalogue."""
        from profiler.catalogue import list_presets

        return [preset.model_dump(mode="json") for preset in list_presets()]

    def local_cluster(self, num_devices: int, progress: ProgressSink = ignore) -> ClusterSpec:
        """This machine as a cluster of ``num_devices`` devices. Isolated: looks at the machine with torch."""
        from profiler.measure import local_cluster

        return local_cluster(num_devices)

    @reporting
    def profile(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, *,
        strategies: Sequence[str] = (), quick: bool = True, progress: ProgressSink = ignore,
    ) -> Profile:  # fmt: skip
        """Measure what this model does on the devices here. Isolated: starts worker processes."""
        from profiler.measure import profile_cluster

        plans = [self.plan_of(text, graph, cluster, workload) for text in strategies] or None
        return profile_cluster(
            graph, cluster, workload, plans=plans, progress=progress, quick=quick, allow_factory=self.allow_factory
        )

    # plans -----------------------------------------------------------------------------------------------------------

    @reporting
    def plan(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, profile: Profile | None,
        options: PlanOptions, progress: ProgressSink = ignore, calibration: Calibration | None = None,
    ) -> PlanAnswer:  # fmt: skip
        """The best plan that has the fields of ``options.strategy``, if any. Isolated: may compute for minutes."""
        from planner.search import SearchOptions, search

        chosen = SearchOptions(time_limit_s=options.time_limit_s, top=options.top, seed=options.seed, strategy=options.strategy)
        model = cost_model(graph, cluster, workload, profile, calibration)
        return search(graph, cluster, workload, profile=profile, options=chosen, progress=progress, cost_model=model)

    @reporting
    def plan_of(self, strategy: str, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> Plan:
        """A strategy made explicit and checked; raises :class:`InvalidInput` with every violation."""
        from planner.strategy import plan_from_strategy

        plan = plan_from_strategy(strategy, graph, cluster, workload)
        violations = self.violations(plan, graph, cluster, workload)
        if violations:
            raise InvalidInput(violations, subject=f"strategy '{strategy}'")
        return plan

    @reporting
    def violations(self, plan: Plan, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> list[Violation]:
        """Every rule that the plan breaks."""
        from planner.validate import validate

        return validate(plan, graph, cluster, workload)

    @reporting
    def estimate(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, plan: Plan, profile: Profile | None,
        calibration: Calibration | None = None,
    ) -> Prediction:  # fmt: skip
        """Step time and memory of a valid plan."""
        from simulator.predict import predict

        model = cost_model(graph, cluster, workload, profile, calibration)
        return predict(graph, cluster, workload, plan, cost_model=model)

    @reporting
    def memory(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, strategy: str | None = None, *,
        micro_batch: int = 1, host_buffer_factor: float = 1.0,
    ) -> MemoryReport:  # fmt: skip
        """What the job holds: states at every ZeRO stage, activations, loss, and the peak of a strategy. No time is simulated."""
        from simulator.cost_model import CostModel
        from simulator.memory_report import memory_report

        plan = None if strategy is None else self.plan_of(strategy, graph, cluster, workload)
        model = CostModel(graph, cluster, workload)
        return memory_report(model, plan, micro_batch=micro_batch, host_buffer_factor=host_buffer_factor)

    @reporting
    def states(
        self, workload: TrainingSpec, *, num_params: float, largest_layer_params: float, devices: int, nodes: int = 1,
        host_buffer_factor: float = 1.0,
    ) -> MemoryReport:  # fmt: skip
        """Model states of a model that is known by its counts alone."""
        from simulator.memory_report import states_report

        return states_report(
            num_params=num_params, largest_layer_params=largest_layer_params, devices=devices, nodes=nodes,
            precision=workload.precision, optimizer=workload.optimizer, host_buffer_factor=host_buffer_factor,
        )  # fmt: skip

    @reporting
    def utilization(
        self, graph: ModelGraph | None, device: str, *, dtype: str = "bfloat16", seq_len: int | None = None,
        tokens_per_s: float | None = None, achieved_flop_per_s: float | None = None,
        convention: FlopConvention = FlopConvention(),  # noqa: B008  (frozen)
    ) -> Utilization:  # fmt: skip
        """MFU of one device of the catalogue from tokens per second of a model, or from an achieved FLOP rate."""
        from profiler.catalogue import device as find_device
        from simulator.utilization import utilization, utilization_of_rate

        found = find_device(device)
        if achieved_flop_per_s is not None:
            return utilization_of_rate(found, achieved_flop_per_s=achieved_flop_per_s, dtype=dtype)
        if graph is None or seq_len is None or tokens_per_s is None:
            raise InvalidInputValue("rate_not_given", "give a model, a sequence length and tokens per second, or a FLOP rate")
        return utilization(graph, found, seq_len=seq_len, tokens_per_s=tokens_per_s, dtype=dtype, convention=convention)

    @reporting
    def trace(
        self, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec, plan: Plan, profile: Profile | None,
        calibration: Calibration | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Chrome/Perfetto trace of one predicted step."""
        from simulator.predict import simulate
        from simulator.trace import chrome_trace

        model = cost_model(graph, cluster, workload, profile, calibration).for_plan(plan)
        return chrome_trace(model, plan, simulate(model, plan))

    # executions ------------------------------------------------------------------------------------------------------

    @reporting
    def execute(
        self,
        plan: Plan,
        graph: ModelGraph,
        workload: TrainingSpec,
        *,
        steps: int,
        warmup_steps: int,
        profile: Profile | None = None,
        output_dir: Path | None = None,
        run_time_limit_s: float = 1800.0,
        progress: ProgressSink = ignore,
    ) -> Measurement:
        """Run the plan on this machine. Isolated: starts one worker process per device."""
        from executor.run import run_plan

        return run_plan(
            plan,
            graph,
            workload,
            steps=steps,
            warmup_steps=warmup_steps,
            profile=profile,
            output_dir=output_dir,
            progress=progress,
            timeout_s=run_time_limit_s,
            allow_factory=self.allow_factory,
        )

    def dry_run(self, plan: Plan, graph: ModelGraph, workload: TrainingSpec) -> list[dict[str, Any]]:
        """Materialise the first rank of every stage on a fake process group: what each would hold. Imports torch."""
        from executor.dry_run import dry_run

        ranks = sorted({devices[0] for pipeline in plan.pipelines for devices in pipeline.ranks()})
        reports = [dry_run(plan, graph, rank, workload, allow_factory=self.allow_factory) for rank in ranks]
        return [report.model_dump(mode="json") for report in reports]

    def reference_losses(
        self, graph: ModelGraph, workload: TrainingSpec, steps: int, progress: ProgressSink = ignore
    ) -> list[float]:
        """Losses of the unsharded model in one process on the same data. Isolated: imports torch."""
        from executor.reference import reference_losses

        return reference_losses(graph, workload, steps, allow_factory=self.allow_factory)

    def compare(self, prediction: Prediction, measurement: Measurement) -> Comparison:
        """Predicted against measured, term by term."""
        from executor.compare import compare

        return compare(prediction, measurement)

    @reporting
    def calibrate(
        self, graph: ModelGraph, cluster: ClusterSpec, profile: Profile | None, measurements: Sequence[Measurement], *,
        plans: Sequence[Plan] = (), workload: TrainingSpec | None = None, progress: ProgressSink = ignore,
    ) -> Calibration:  # fmt: skip
        """Factors of the cluster's prices, refitted from measured runs of one model. Isolated: may compute for a minute."""
        from planner.calibration import calibrate_measurements

        return calibrate_measurements(graph, cluster, profile, measurements, plans=plans, workload=workload)


def fits(prediction: Prediction) -> bool:
    """Whether every rank keeps below its capacity, allocator margin and process baseline included."""
    from simulator.predict import fits as every_rank_fits

    return every_rank_fits(prediction)
