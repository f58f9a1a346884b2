"""From a row's parallel sizes to a plan: every stage, device and schedule written out, with what had to be assumed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from planner.validate_runs.frameworks import Framework
from planner.validate_runs.runs import PublishedRun, SkippedRun
from simulator.kept import DISCARDED
from simulator.memory_walk import EVERY_SECOND_PRODUCT
from specs.plan import CollectiveOptions, Mesh, Pipeline, PipelineSchedule, Plan, RecomputeMode, RecomputeRun, Stage
from specs.schedule import SCHEDULES

# Tokens per device and pass where the row gives no micro-batch and no pipeline limits it.
DEFAULT_TOKENS_PER_PASS = 8192
# Micro-batches per pipeline rank that keep the bubble near a tenth of the step.
FEW_BUBBLES = 8
# Layer counts of a stage boundary list in the notes, as AMP's artifact prints them.
_CUTS = re.compile(r"pipeline cut over (\d+) stages units \[([\d, ]+)\]")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Degrees of a run, all given or derived. ``chunks``: model chunks per pipeline rank (virtual stages)."""

    dp: int
    tp: int
    cp: int
    ep: int
    pp: int
    chunks: int
    micro_batch: int
    num_micro_batches: int
    global_batch: int
    seq_len: int
    zero: int
    shard_group: int | None
    whole_experts: bool = False


ZERO_STAGES = {
    "": 0, "none": 0, "ddp": 0, "0": 0, "zero1": 1, "1": 1, "zero2": 2, "2": 2, "fsdp-grad-op(zero2)": 2, "zero3": 3, "3": 3,
    "fsdp": 3, "fsdp2": 3, "hsdp": 3,
}  # fmt: skip


def sizes_of(run: PublishedRun, framework: Framework, assumed: list[str]) -> Sizes:
    """Degrees and batches of a row; raises :class:`SkippedRun` where they cannot be expressed or do not fit together."""
    _expressible(run)
    num_gpus, seq_len = run.num_gpus or 0, run.seq_len or 0
    if not num_gpus or not seq_len:
        raise SkippedRun("cluster_not_given", "the row does not give num_gpus and seq_len")
    if run.tp is None and run.pp is None and num_gpus > 1:
        if ZERO_STAGES.get(run.zero_stage.lower(), 3) < 2:  # sharded weights stand for a model that is not cut otherwise
            raise SkippedRun("parallel_sizes_not_given", "the row gives neither tp nor pp nor a sharding of weights or gradients")
        assumed.append("data parallel only: the row gives a sharding but neither tp nor pp")
    tp, pp, cp, ep = run.tp or 1, run.pp or 1, run.cp or 1, run.ep or 1
    dp, rest = divmod(num_gpus, tp * pp * cp)
    if rest or not dp:
        raise SkippedRun("sizes_do_not_match", f"{num_gpus} devices are no multiple of tp {tp} x pp {pp} x cp {cp}")
    if ep > 1 and (not run.moe_experts or run.moe_experts % ep):
        raise SkippedRun("sizes_do_not_match", f"{run.moe_experts} experts are no multiple of ep {ep}")
    whole = _whole_experts(run, framework, (dp, cp, tp, ep), assumed)
    zero = _zero(run, framework)
    chunks = _chunks(run, pp, assumed)
    micro = run.micro_batch or _default_micro_batch(run, dp, pp, assumed)
    batch = run.global_batch or _smallest_batch(dp, pp, micro, assumed)
    micro = _divisor(batch, dp, micro, assumed)
    passes = batch // (dp * micro)
    if pp > 1 and passes < pp and framework_schedule(run) == "1f1b":
        assumed.append(f"all forwards first: {passes} micro-batches do not fill {pp} stages, where 1F1B does the same")
    if chunks > 1 and passes % pp and framework_schedule(run) in ("1f1b", "gpipe"):
        assumed.append(f"1F1B in place of interleaving: {passes} micro-batches are no multiple of {pp} stages")
        chunks = 1
    return Sizes(dp, tp, cp, ep, pp, chunks, micro, passes, batch, seq_len, zero, _shard_group(run, dp, zero, assumed), whole)


def _whole_experts(run: PublishedRun, framework: Framework, degrees: tuple[int, int, int, int], assumed: list[str]) -> bool:
    """Whether experts are not split over tp: as the framework has it, or because expert parallel has no other room."""
    dp, cp, tp, ep = degrees
    if (dp * cp * tp) % ep:
        raise SkippedRun("sizes_do_not_match", f"ep {ep} does not divide the {dp * cp * tp} devices of a stage")
    if tp == 1 or ep == 1:
        return False
    forced = (dp * cp) % ep != 0
    if forced and not sequence_parallel(run, tp, framework):
        raise SkippedRun("experts_over_tensor_parallel", f"ep {ep} reaches over tp {tp} without sequence parallel")
    whole = forced or (framework.whole_experts and sequence_parallel(run, tp, framework))
    if whole:
        assumed.append(f"whole experts: ep {ep} reaches over tp {tp}")
    return whole


def _expressible(run: PublishedRun) -> None:
    if run.offload.lower() not in ("", "none"):
        raise SkippedRun("offload", f"offload of {run.offload}: plans of this version keep everything on the device")
    if "qlora" in f"{run.model} {run.notes}".lower():
        raise SkippedRun("precision_not_described", "the frozen base is kept in 4 bits and widened for every product")
    if (run.pp or 1) > 1:
        framework_schedule(run)


def _zero(run: PublishedRun, framework: Framework) -> int:
    stage = run.zero_stage.lower()
    if stage not in ZERO_STAGES:
        raise SkippedRun("sharding_not_known", f"zero_stage '{run.zero_stage}'")
    zero = ZERO_STAGES[stage] if stage else framework.default_zero
    # under a pipeline parameters stay gathered during the step and gradients are reduced once (torchtitan's default policy)
    return 1 if zero >= 2 and (run.pp or 1) > 1 else zero


def _shard_group(run: PublishedRun, dp: int, zero: int, assumed: list[str]) -> int | None:
    if zero == 0 or dp == 1:
        return None
    group = run.shard_group
    if group is None and run.zero_stage.lower() == "hsdp":
        group = min(dp, run.gpus_per_node or 8)
        assumed.append(f"states sharded over {group} devices")
    return group if group and group < dp and dp % group == 0 else None


def framework_schedule(run: PublishedRun) -> str:
    """The schedule's generator for a row: ``1f1b`` stands for every one-forward-one-backward kind, with several chunks per rank for
    interleaving too; a zero-bubble schedule of no other name is ZB-H1."""
    name = run.schedule.lower()
    words = ("half", "v-min")
    if any(word in name for word in words) or ("dualpipe" in name and "dualpipev" not in name):
        raise SkippedRun("schedule_not_expressible", f"no plan here has schedule '{run.schedule}'")
    known = {
        "gpipe": "gpipe", "dualpipev": "dualpipe_v", "zbv": "zb_v", "zb-v": "zb_v", "zb": "zb_h1", "zero-bubble": "zb_h1",
    }  # fmt: skip
    return next((schedule for word, schedule in known.items() if word in name), "1f1b")


def _chunks(run: PublishedRun, pp: int, assumed: list[str]) -> int:
    layers = run.layers or 1
    if pp == 1:
        return 1
    if framework_schedule(run) not in ("1f1b", "gpipe"):
        return SCHEDULES[framework_schedule(run)].stages_per_rank or 1
    chunks = run.vpp or 1
    if run.vpp is None and "interleaved" in f"{run.schedule} {run.notes}".lower() and "before the interleaved" not in run.notes:
        chunks = next((count for count in (2, 3) if layers % (pp * count) == 0), 1)
        assumed.append(f"{chunks} chunks per pipeline rank")
    if chunks * pp > layers and not _ends_count(layers, chunks * pp):
        assumed.append(f"1 chunk per pipeline rank instead of {chunks}: more stages than layers")
        return 1
    return chunks


def _default_micro_batch(run: PublishedRun, dp: int, pp: int, assumed: list[str]) -> int:
    """The largest power of two that keeps a pass at the default tokens and the pipeline filled."""
    most = max(1, DEFAULT_TOKENS_PER_PASS // (run.seq_len or 1))
    per_rank = max(1, run.global_batch // dp) if run.global_batch else 2 ** int(math.log2(most))
    if pp > 1 and run.global_batch:
        most = min(most, max(1, per_rank // (FEW_BUBBLES * pp)))
    micro = 1
    while micro * 2 <= most and per_rank % (micro * 2) == 0:
        micro *= 2
    assumed.append(f"micro-batch of {micro} sequences")
    return micro


def _smallest_batch(dp: int, pp: int, micro: int, assumed: list[str]) -> int:
    """Where only a throughput or a memory is published: one micro-batch per data-parallel rank, under a pipeline as many as
    keep its bubble small."""
    batch = dp * micro * (FEW_BUBBLES * pp if pp > 1 else 1)
    assumed.append(f"global batch of {batch} sequences, the smallest that fills the devices")
    return batch


def _divisor(batch: int, dp: int, micro: int, assumed: list[str]) -> int:
    per_rank, rest = divmod(batch, dp)
    if rest or not per_rank:
        raise SkippedRun("sizes_do_not_match", f"batch {batch} is no multiple of dp {dp}")
    if per_rank % micro == 0:
        return micro
    best = max(size for size in range(1, min(micro, per_rank) + 1) if per_rank % size == 0)
    assumed.append(f"micro-batch of {best} instead of {micro}, which does not divide {per_rank} sequences per rank")
    return best


def split_units(run: PublishedRun, num_stages: int) -> list[int]:
    """Units (embedding, layers, tail) per stage: layers spread evenly, more of them in the middle where they do not divide.

    Where the notes say that the framework counts embedding and head like layers, or print the cuts, those hold.
    """
    num_layers = run.layers or 0
    cuts = _CUTS.search(run.notes)
    if cuts is not None:
        listed = _from_cuts([int(item) for item in cuts[2].split(",")], num_layers)
        if listed is not None and len(listed) == num_stages:
            return listed
    if "transformer|embedding" in run.notes or _ends_count(num_layers, num_stages):
        return _even(num_layers + 2, num_stages)
    layers = _even(num_layers, num_stages)
    return [count + (index == 0) + (index == num_stages - 1) for index, count in enumerate(layers)]


def _ends_count(num_layers: int, num_stages: int) -> bool:
    """Layers do not share out over the stages, but do with embedding and head as two more."""
    return num_stages > 1 and num_layers % num_stages > 0 and (num_layers + 2) % num_stages == 0


def _even(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` shares that differ by at most one, the larger ones in the middle."""
    share, rest = divmod(total, parts)
    counts = [share] * parts
    order = sorted(range(parts), key=lambda index: (abs(index - (parts - 1) / 2), index))
    for index in order[:rest]:
        counts[index] += 1
    return counts


def _from_cuts(bounds: list[int], layers: int) -> list[int] | None:
    """Units of each stage from cuts over a longer list of modules: what lies before the layers counts as the embedding unit."""
    extra = bounds[-1] - layers
    before = extra // 2
    units = []
    for low, high in pairwise(bounds):
        inside = min(high, before + layers) - max(low, before)
        units.append(max(0, inside))
    units[0] += 1
    units[-1] += 1
    return units if sum(units) == layers + 2 and all(units) else None


# Kinds of selective recompute: Megatron's (attention's core), torchtitan's (all but attention and every second product), and
# Megatron Core's of results that are cheap to make again.
SELECTIVE: dict[str, tuple[str, ...]] = {
    "attention": ("attention",), "operators": (EVERY_SECOND_PRODUCT,), "modules": DISCARDED,
}  # fmt: skip


def recompute_runs(mode: str, first: int, num_units: int, total_units: int, *, share: float = 1.0) -> tuple[RecomputeRun, ...]:
    """Recompute of the layers among the units from ``first`` on (never of embedding and tail). ``share`` of them, spread evenly."""
    layers = [unit for unit in range(first, first + num_units) if 0 < unit < total_units - 1]
    if mode == "none" or not layers:
        return ()
    if mode in SELECTIVE:
        classes = SELECTIVE[mode]
        return (RecomputeRun(first_unit=layers[0], num_units=len(layers), mode=RecomputeMode.SELECTIVE, op_classes=classes),)
    if share == 1:
        return (RecomputeRun(first_unit=layers[0], num_units=len(layers), mode=RecomputeMode.FULL),)
    chosen = [unit for unit in layers if int(unit * share) > int((unit - 1) * share)]
    return tuple(RecomputeRun(first_unit=unit, num_units=1, mode=RecomputeMode.FULL) for unit in chosen)


def plan_of(run: PublishedRun, sizes: Sizes, framework: Framework, recompute: str, num_micro_batches: int | None = None) -> Plan:
    """The plan. ``num_micro_batches`` other than the run's makes a shorter step of the same pipeline."""
    passes = num_micro_batches or sizes.num_micro_batches
    num_stages = sizes.pp * sizes.chunks
    counts, first = split_units(run, num_stages), 0
    schedule = schedule_of(run, sizes, passes)
    total = sum(counts)
    per_rank = sizes.dp * sizes.cp * sizes.tp
    mode, _, share = recompute.partition(" of ")
    stages = []
    for rank, count in zip(schedule.stage_ranks(num_ranks=sizes.pp), counts, strict=True):
        stages.append(
            Stage(
                devices=tuple(range(rank * per_rank, (rank + 1) * per_rank)), first_unit=first, num_units=count,
                mesh=Mesh(dp=sizes.dp, cp=sizes.cp, tp=sizes.tp, ep=sizes.ep, whole_experts=sizes.whole_experts),
                shard_group=sizes.shard_group,
                zero=sizes.zero if sizes.dp * sizes.cp > 1 else 0, sequence_parallel=sequence_parallel(run, sizes.tp, framework),
                recompute=recompute_runs(mode, first, count, total, share=float(share or 1)),
            )
        )  # fmt: skip
        first += count
    return Plan(
        name=run.id, strategy=strategy_text(sizes, recompute), global_batch=sizes.micro_batch * sizes.dp * passes,
        seq_len=sizes.seq_len,
        pipelines=(Pipeline(stages=tuple(stages), micro_batch=sizes.micro_batch, num_micro_batches=passes),),
        schedule=schedule,
        collectives=CollectiveOptions(bucket_bytes=framework.bucket_bytes, prefetch_units=framework.prefetch_units),
    )  # fmt: skip


def schedule_of(run: PublishedRun, sizes: Sizes, passes: int) -> PipelineSchedule:
    """The schedule that the row names; interleaved where 1F1B has several chunks, all forwards first where passes are too few."""
    name = framework_schedule(run) if sizes.pp > 1 else "1f1b"
    if name in ("1f1b", "gpipe"):
        name = "interleaved" if sizes.chunks > 1 else "gpipe" if passes < sizes.pp else name
    return PipelineSchedule(name=name, stages_per_rank=sizes.chunks)


def sequence_parallel(run: PublishedRun, tp: int, framework: Framework) -> bool:
    """Whether the residual stream is split over tp."""
    if tp == 1:
        return False
    return run.sequence_parallel if run.sequence_parallel is not None else framework.default_sequence_parallel


def strategy_text(sizes: Sizes, recompute: str) -> str:
    """The short form for people."""
    parts = [f"pp={sizes.pp}", f"dp={sizes.dp}", f"tp={sizes.tp}", f"micro_batch={sizes.micro_batch}", f"zero={sizes.zero}"]
    parts += [f"{name}={degree}" for name, degree in (("cp", sizes.cp), ("ep", sizes.ep)) if degree > 1]
    if sizes.chunks > 1:
        parts.append(f"chunks={sizes.chunks}")
    return " ".join([*parts, f"recompute={recompute}"])
