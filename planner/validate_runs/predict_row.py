"""From one row to its prediction: model, cluster, workload and plan, then the simulator. No measured value is in reach here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from planner.validate_runs.clusters import cluster_of
from planner.validate_runs.frameworks import Framework, framework_of, precision_of
from planner.validate_runs.models import ADAPTER_RANK, ENCODERS, is_adapted, model_of
from planner.validate_runs.plans import Sizes, plan_of, sizes_of
from planner.validate_runs.runs import PublishedRun, SkippedRun
from profiler.hf import DecoderConfig
from simulator.cost_model import CostModel
from simulator.predict import fits
from simulator.steady_state import fits_long, predict_long
from specs.errors import InvalidInput
from specs.graph import ModelGraph
from specs.prediction import Prediction
from specs.training import Adapters, Optimizer, TrainingSpec

Capture = Callable[[DecoderConfig], ModelGraph]


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """A predicted row."""

    run: PublishedRun
    prediction: Prediction
    framework: str
    strategy: str
    recompute: str
    fits: bool
    assumed: tuple[str, ...] = ()
    memory_reading: str = "reserved"

    @property
    def reported_memory_bytes(self) -> float:
        """Peak memory as the run's source reads it."""
        memory = self.prediction.memory
        if self.memory_reading == "allocated":
            return memory.peak_bytes
        reserved = memory.reserved_bytes or memory.peak_bytes
        return reserved if self.memory_reading == "device" else reserved - memory.baseline_bytes

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput as tables print it."""
        return self.prediction.tokens_per_s / (self.run.num_gpus or 1)


@dataclass
class RunPredictor:
    """Predicts rows; graphs and cost models are shared between rows that have them in common."""

    capture: Capture
    _graphs: dict[str, ModelGraph] = field(default_factory=dict)
    _models: dict[tuple[object, ...], CostModel] = field(default_factory=dict)

    def predict(self, run: PublishedRun) -> RunPrediction:
        """The prediction of a row; raises :class:`SkippedRun` where it cannot be predicted."""
        framework = framework_of(run)
        assumed: list[str] = []
        model = model_of(run, vocab_multiple=framework.vocab_multiple(run.tp or 1))
        settings = model.settings
        run = replace(run, layers=settings.layers, moe_experts=settings.experts or None, seq_len=settings.max_positions)
        sizes = sizes_of(run, framework, assumed)
        cluster, link_assumptions = cluster_of(run)
        assumed += [*model.assumed, *link_assumptions]
        workload = workload_of(run, framework, sizes)
        graph = self._graph(model.settings)
        key = (id(graph), id(cluster), workload.content_hash(), framework.software)
        if key not in self._models:
            try:
                self._models[key] = CostModel(graph, cluster, workload, software=framework.software)
            except InvalidInput as error:
                raise SkippedRun("not_priceable", str(error)) from None
        return self._with_recompute(run, self._models[key], sizes, framework, assumed)

    def _graph(self, settings: DecoderConfig) -> ModelGraph:
        key = settings.model_dump_json()
        if key not in self._graphs:
            self._graphs[key] = self.capture(settings)
        return self._graphs[key]

    def _with_recompute(
        self, run: PublishedRun, model: CostModel, sizes: Sizes, framework: Framework, assumed: list[str]
    ) -> RunPrediction:
        modes = recompute_modes(run, model.workload.attention_kernel, framework.selective)
        mode = next((mode for mode in modes[:-1] if self._fits(run, model, sizes, framework, mode)), modes[-1])
        prediction = self._prediction(run, model, sizes, framework, mode)
        if len(modes) > 1:
            assumed.append(f"recompute {mode}: the least that fits")
        strategy = plan_of(run, sizes, framework, mode, 1 if sizes.pp == 1 else sizes.pp).strategy
        fitting, reading = fits(prediction), memory_reading(run, framework)
        return RunPrediction(run, prediction, framework.name, strategy, mode, fitting, tuple(assumed), reading)

    def _fits(self, run: PublishedRun, model: CostModel, sizes: Sizes, framework: Framework, mode: str) -> bool:
        with _expressed():
            return fits_long(model, lambda passes: plan_of(run, sizes, framework, mode, passes), sizes.num_micro_batches)

    def _prediction(self, run: PublishedRun, model: CostModel, sizes: Sizes, framework: Framework, mode: str) -> Prediction:
        with _expressed():
            return predict_long(model, lambda passes: plan_of(run, sizes, framework, mode, passes), sizes.num_micro_batches)


@contextmanager
def _expressed() -> Iterator[None]:
    """A row is skipped where its plan breaks a rule."""
    try:
        yield
    except InvalidInput as error:
        raise SkippedRun("not_expressible", str(error)) from None


# Words of a row's notes that say how its memory was read.
READINGS = (("nvidia-smi", "device"), ("reserved", "reserved"), ("allocated", "allocated"), ("peak active", "allocated"))


def memory_reading(run: PublishedRun, framework: Framework) -> str:
    """``allocated``, ``reserved`` or ``device``: by the notes, else as the framework prints it."""
    notes = run.notes.lower()
    return next((reading for word, reading in READINGS if word in notes), framework.memory_reading)


def recompute_modes(run: PublishedRun, attention_kernel: str, selective: str) -> tuple[str, ...]:
    """``none``, ``attention``, ``operators``, ``modules``, ``full`` or ``full of S`` (a share S of the layers).

    Several, least first, where the row leaves it open.
    """
    word = run.recompute.lower()
    if word == "selective":
        if not _by_layers(run):
            return ("attention",)
        return ("operators",) if selective == "operators" and "every other layer" not in run.notes.lower() else ("full of 0.5",)
    if word in ("none", "full"):
        return (word,)
    partly = ("full of 0.25", "full of 0.5", "full of 0.75", "full")
    first = ("attention",) if attention_kernel == "math" else ("modules",) if selective == "modules" else ()
    return ("none", *first, *partly)


def _by_layers(run: PublishedRun) -> bool:
    """PyTorch-native trainers recompute a share of layers or ops; Megatron's selective recompute is attention's core."""
    return run.zero_stage.lower().startswith(("fsdp", "hsdp"))


def workload_of(run: PublishedRun, framework: Framework, sizes: Sizes) -> TrainingSpec:
    """The workload. Without a word on attention, kernels are fused from 2023 on, but not where attention alone is recomputed:
    that is what Megatron's selective recompute is for."""
    flash = run.flash_attention
    if flash is None:
        flash = (run.year or 2024) >= 2023 and (run.recompute.lower() != "selective" or _by_layers(run))
    return TrainingSpec(
        global_batch=sizes.global_batch, seq_len=sizes.seq_len, precision=precision_of(run, framework),
        attention_kernel="flash" if flash else "math", loss_kernel=framework.loss_kernel,
        optimizer=Optimizer(state_dtype=framework.state_dtype),
        adapters=Adapters(rank=ADAPTER_RANK, beside="attention") if is_adapted(run) else None,
    )  # fmt: skip


def is_encoder(run: PublishedRun) -> bool:
    """BERT-like: attention looks both ways."""
    return run.family.lower() in ENCODERS
