"""The rules of the strategy space, one function a rule: used to enumerate, to judge a strategy text, and to validate a plan.

A rule gets plain numbers and returns the violations it finds (none when it holds): what the numbers are, what is allowed, and
the nearest allowed value. ``loc`` is where the caller's user wrote the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from profiler.opset import OpClass
from profiler.placement import place_block
from simulator.exchange import expert_params
from specs.errors import Violation, nearest_name, nearest_number
from specs.graph import ModelGraph
from specs.plan import RecomputeMode
from specs.schedule import SCHEDULES, ScheduleRule, check_rules
from specs.training import TrainingSpec

Loc = tuple[str | int, ...]

# Sizes that tp must divide: attribute of the graph -> what people call it. The vocabulary is free: its shards are padded.
TP_SIZES: dict[str, str] = {"heads": "attention heads", "kv_heads": "key/value heads", "ffn": "ffn width"}


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*low, *(number // value for value in low)})


# --- tensor parallel ------------------------------------------------------------------------------------------------


def tp_sizes(graph: ModelGraph) -> dict[str, int]:
    """The sizes of this model that tp must divide, as far as its attributes tell."""
    return {name: int(graph.attributes[name]) for name in TP_SIZES if isinstance(graph.attributes.get(name), int)}


def tp_divides_sizes(graph: ModelGraph, tp: int, loc: Loc) -> list[Violation]:
    """Attention heads, key/value heads and ffn width are multiples of tp; each broken one is named."""
    sizes = tp_sizes(graph)
    if not sizes:
        return _tp_splits_something(graph, tp, loc)
    jointly = [value for value in divisors(sizes.get("heads", next(iter(sizes.values())))) if _divides_all(sizes, value)]
    found = []
    for name, size in sizes.items():
        if size % tp:
            reason = " (key/value heads are not replicated)" if name == "kv_heads" else ""
            found.append(
                Violation(
                    code=f"{name}_divisible_by_tp", loc=loc, actual=tp, allowed=divisors(size), nearest=nearest_number(tp, jointly),
                    message=f"{TP_SIZES[name]} {size} is not a multiple of tp {tp}{reason}",
                )
            )  # fmt: skip
    return found


def _divides_all(sizes: dict[str, int], tp: int) -> bool:
    return all(size % tp == 0 for size in sizes.values())


def _tp_splits_something(graph: ModelGraph, tp: int, loc: Loc) -> list[Violation]:
    """A model that says nothing about heads: tp must split a parameter of some block, else it only costs."""
    if tp == 1 or _splits_any(graph, tp):
        return []
    allowed = [value for value in range(1, tp + 1) if value == 1 or _splits_any(graph, value)]
    message = f"tp {tp} splits no parameter of this model"
    return [
        Violation(
            code="tp_splits_nothing", loc=loc, actual=tp, allowed=allowed, nearest=nearest_number(tp, allowed), message=message
        )
    ]


def _splits_any(graph: ModelGraph, tp: int) -> bool:
    return any(place_block(block, tp, False).sharded_any() for block in graph.blocks)


def tp_inside_node(tp: int, node_sizes: Iterable[int], loc: Loc) -> list[Violation]:
    """tp groups lie inside a node: tp divides the devices used of every node."""
    sizes = sorted(set(node_sizes))
    if all(size % tp == 0 for size in sizes):
        return []
    allowed = [value for value in divisors(max(sizes, default=1)) if all(size % value == 0 for size in sizes)]
    shown = " and ".join(str(size) for size in sizes)
    return [
        Violation(
            code="tp_inside_node", loc=loc, actual=tp, allowed=allowed, nearest=nearest_number(tp, allowed),
            message=f"tp {tp} does not fit into whole nodes of {shown} devices: a tensor-parallel group must stay inside a node",
        )
    ]  # fmt: skip


def sequence_divisible_by_tp(seq_len: int, tp: int, sequence_parallel: bool, loc: Loc) -> list[Violation]:
    """Under sequence parallel each tp rank holds an equal part of the sequence."""
    if not sequence_parallel or seq_len % tp == 0:
        return []
    padded = -(-seq_len // tp) * tp
    return [
        Violation(
            code="sequence_divisible_by_tp", loc=loc, actual=seq_len, allowed=f"multiples of {tp}", nearest=padded,
            message=f"sequence length {seq_len} is not a multiple of tp {tp}, which sequence_parallel needs",
        )
    ]  # fmt: skip


# --- context and expert parallel --------------------------------------------------------------------------------------


def sequence_divisible_by_cp(seq_len: int, cp: int, tp: int, sequence_parallel: bool, loc: Loc) -> list[Violation]:
    """Each context-parallel rank holds an early and a late part of the sequence, each of which sequence parallel splits over tp:
    the length is a multiple of cp x lcm(2, tp)."""
    step = cp * math.lcm(2, tp if sequence_parallel else 1)
    if cp == 1 or seq_len % step == 0:
        return []
    return [
        Violation(
            code="sequence_divisible_by_cp", loc=loc, actual=seq_len, allowed=f"multiples of {step}",
            nearest=-(-seq_len // step) * step,
            message=f"sequence length {seq_len} is not a multiple of {step}, which cp {cp} needs (an early and a late part a rank)",
        )
    ]  # fmt: skip


def cp_splits_attention(graph: ModelGraph, cp: int, loc: Loc) -> list[Violation]:
    """What mixes tokens is attention alone: a scan along the sequence has no exchange that this version prices."""
    if cp == 1 or (op_classes_of(graph) & {OpClass.ATTENTION.value} and not op_classes_of(graph) & {OpClass.SCAN.value}):
        return []
    message = f"cp {cp}: the model mixes tokens by other ops than attention (or not at all)"
    return [Violation(code="cp_without_attention", loc=loc, actual=cp, allowed=[1], nearest=1, message=message)]


def ep_divides_experts(num_experts: int, ep: int, loc: Loc) -> list[Violation]:
    """Every expert-parallel rank holds equally many whole experts. ``num_experts`` 0: the model has none."""
    if ep == 1 or (num_experts and num_experts % ep == 0):
        return []
    allowed = divisors(num_experts) if num_experts else [1]
    has = f"{num_experts} experts are not a multiple of ep {ep}" if num_experts else f"ep {ep}: the model has no experts"
    return [
        Violation(
            code="experts_divisible_by_ep", loc=loc, actual=ep, allowed=allowed, nearest=nearest_number(ep, allowed), message=has
        )
    ]


def ep_divides_ranks(ep: int, ranks: int, loc: Loc, *, of: str) -> list[Violation]:
    """Expert-parallel groups are made of the ranks of a stage. ``of``: which, in words."""
    if ranks % ep == 0:
        return []
    allowed = divisors(ranks)
    message = f"ep {ep} does not divide {of} = {ranks} ranks"
    return [
        Violation(
            code="ep_divides_ranks", loc=loc, actual=ep, allowed=allowed, nearest=nearest_number(ep, allowed), message=message
        )
    ]


def whole_experts_rule(whole_experts: bool, ep: int, tp: int, sequence_parallel: bool, loc: Loc) -> list[Violation]:
    """Experts that are not split over tp take their tokens from every tp rank, so these must hold different ones."""
    if not whole_experts or (ep > 1 and tp > 1 and sequence_parallel):
        return []
    message = (
        f"whole_experts with ep {ep}, tp {tp}, sequence_parallel {str(sequence_parallel).lower()}: needs ep and tp above 1 and "
    )
    return [
        Violation(code="whole_experts", loc=loc, actual=True, allowed=[False], nearest=False, message=message + "sequence_parallel")
    ]


def op_classes_of(graph: ModelGraph) -> set[str]:
    """Classes of the model's ops."""
    return {op.op_class.value for block in graph.blocks for op in place_block(block).ops}


def num_experts(graph: ModelGraph) -> int:
    """Experts of a layer, the greatest common divisor where layers differ; 0 where there are none."""
    counts = set()
    for block in graph.blocks:
        placed = place_block(block)
        names = expert_params(placed)
        counts |= {int(placed.params[name].shape[0](1, 1)) for name in names}
    return math.gcd(*counts) if counts else 0


# --- batch and schedule ---------------------------------------------------------------------------------------------


def batch_splits(global_batch: int, dp: int, micro_batch: int, loc: Loc) -> list[Violation]:
    """The global batch, which is never changed, is num_micro_batches x micro_batch x dp."""
    if global_batch % (dp * micro_batch) == 0:
        return []
    if global_batch % dp:
        allowed = divisors(global_batch)
        return [
            Violation(
                code="batch_divisible_by_dp", loc=(*loc, "dp"), actual=dp, allowed=allowed, nearest=nearest_number(dp, allowed),
                message=f"global batch {global_batch} is not a multiple of dp {dp}",
            )
        ]  # fmt: skip
    allowed = divisors(global_batch // dp)
    return [
        Violation(
            code="batch_divisible_by_micro_batch", loc=(*loc, "micro_batch"), actual=micro_batch, allowed=allowed,
            nearest=nearest_number(micro_batch, allowed),
            message=f"global batch {global_batch} over dp {dp} leaves {global_batch // dp} sequences a rank, "
            f"not a multiple of micro_batch {micro_batch}",
        )
    ]  # fmt: skip


def micro_batch_allowed(workload: TrainingSpec, micro_batch: int, loc: Loc) -> list[Violation]:
    """The workload may list the micro-batch sizes that it wants."""
    allowed = sorted(workload.micro_batches)
    if not allowed or micro_batch in allowed:
        return []
    return [
        Violation(
            code="micro_batch_not_allowed", loc=loc, actual=micro_batch, allowed=allowed,
            nearest=nearest_number(micro_batch, allowed), message=f"the workload does not allow micro_batch {micro_batch}",
        )
    ]  # fmt: skip


def schedule_rules(
    name: str, *, pp: int, num_micro_batches: int, stages_per_rank: int = 1, loc: Loc, micro_batch: int, dp: int
) -> list[Violation]:
    """Rules of the named schedule. With too few micro-batches, or a number that does not divide into groups, the message names the
    micro-batch and the global batch next to the given ones that work."""
    if pp == 1 and name in SCHEDULES:
        return []
    found = []
    for violation in check_rules(name, num_ranks=pp, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank):
        message = violation.message
        if violation.code.startswith("micro_batches"):
            message += "; " + _what_works(SCHEDULES[name], pp, num_micro_batches, micro_batch, dp)
        found.append(
            Violation(
                code=violation.code, message=message, loc=loc, actual=violation.actual, allowed=violation.allowed,
                nearest=violation.nearest,
            )
        )  # fmt: skip
    return found


def _what_works(rule: ScheduleRule, pp: int, num_micro_batches: int, micro_batch: int, dp: int) -> str:
    """The nearest micro-batch at this global batch, and the nearest global batch at this micro-batch."""
    sequences = num_micro_batches * micro_batch
    size = nearest_number(micro_batch, (size for size in divisors(sequences) if rule.allows(sequences // size, pp)))
    first = f"no micro_batch makes enough of {sequences} sequences a rank"
    if size is not None:
        first = f"micro_batch {size} gives {sequences // size}"
    batch = rule.nearest(num_micro_batches, pp) * micro_batch * dp
    return f"{first}; with micro_batch {micro_batch} a global batch of {batch} would do"


# --- stages, sharding, recompute ------------------------------------------------------------------------------------


def pp_at_most_units(pp: int, num_units: int, loc: Loc, chunks: int = 1) -> list[Violation]:
    """Every stage holds at least one unit; ``chunks`` stages a pipeline rank."""
    if pp * chunks <= num_units:
        return []
    stages = f"{pp} x {chunks} chunks = {pp * chunks}" if chunks > 1 else f"{pp}"
    return [
        Violation(
            code="more_stages_than_units", loc=loc, actual=pp, allowed=f"<= {num_units // chunks}", nearest=num_units // chunks,
            message=f"{stages} stages cannot each hold one of the model's {num_units} units",
        )
    ]  # fmt: skip


def split_covers_units(split: Sequence[int], *, num_stages: int, num_units: int, loc: Loc) -> list[Violation]:
    """A split names the units of each stage: one positive number a stage, all units exactly once."""
    found = []
    if len(split) != num_stages:
        found.append(
            Violation(
                code="split_per_stage", loc=loc, actual=len(split), allowed=[num_stages], nearest=num_stages,
                message=f"split has {len(split)} numbers for {num_stages} stages",
            )
        )  # fmt: skip
    if any(count < 1 for count in split):
        found.append(Violation(code="empty_stage", loc=loc, message="every stage needs at least one unit", actual=list(split)))
    if sum(split) != num_units:
        even = [num_units // num_stages + (1 if stage < num_units % num_stages else 0) for stage in range(num_stages)]
        found.append(
            Violation(
                code="split_covers_units", loc=loc, actual=sum(split), allowed=[num_units],
                nearest=even if num_stages <= num_units else None,
                message=f"split adds up to {sum(split)} of the model's {num_units} units (embedding and head count as units)",
            )
        )  # fmt: skip
    return found


def zero_with_pipeline(zero: int, pp: int, loc: Loc) -> list[Violation]:
    """Under a pipeline parameters stay gathered for the whole step, so sharding them saves nothing."""
    if zero < 3 or pp == 1:
        return []
    return [
        Violation(
            code="zero_3_with_pipeline", loc=loc, actual=zero, allowed=[0, 1, 2], nearest=2,
            message=f"zero 3 with pp {pp}: parameters are needed by every micro-batch and stay gathered, "
            "so sharding them would save nothing; use zero 2 or pp 1",
        )
    ]  # fmt: skip


def shard_group_divides_dp(shard_group: int | None, dp: int, zero: int, loc: Loc) -> list[Violation]:
    """States are sharded over ``shard_group`` of the dp ranks and replicated over the rest."""
    if shard_group is None:
        return []
    if dp % shard_group:
        allowed = divisors(dp)
        return [
            Violation(
                code="shard_group_divides_dp", loc=loc, actual=shard_group, allowed=allowed,
                nearest=nearest_number(shard_group, allowed), message=f"dp {dp} is not a multiple of shard_group {shard_group}",
            )
        ]  # fmt: skip
    if zero == 0:
        message = f"shard_group {shard_group} has no meaning with zero 0, which shards nothing"
        return [Violation(code="shard_group_without_zero", loc=loc, actual=shard_group, message=message, nearest=None)]
    return []


def devices_enough(needed: int, available: int, loc: Loc, *, limit: str = "the cluster has") -> list[Violation]:
    """pp x dp x tp devices are there."""
    if needed <= available:
        return []
    return [
        Violation(
            code="devices_enough", loc=loc, actual=needed, allowed=f"<= {available}", nearest=available,
            message=f"pp x dp x cp x tp = {needed} devices, {limit} {available}",
        )
    ]  # fmt: skip


def recompute_classes(mode: RecomputeMode, op_classes: Sequence[str], loc: Loc) -> list[Violation]:
    """Selective recompute lists known op classes; other modes list none."""
    known = [item.value for item in OpClass]
    found = [
        Violation(
            code="unknown_op_class", loc=loc, actual=name, allowed=known, nearest=nearest_name(name, known),
            message=f"op class '{name}' is not known",
        )
        for name in op_classes
        if name not in known
    ]  # fmt: skip
    if mode == RecomputeMode.SELECTIVE and not op_classes:
        found.append(
            Violation(
                code="selective_without_classes", loc=loc, allowed=known, nearest="attention",
                message="selective recompute needs the op classes to recompute: recompute=selective:attention",
            )
        )  # fmt: skip
    if mode != RecomputeMode.SELECTIVE and op_classes:
        found.append(
            Violation(
                code="classes_without_selective", loc=loc, actual=list(op_classes),
                message=f"op classes have no meaning with recompute {mode.value}",
            )
        )  # fmt: skip
    return found


def devices_divisible(available: int, pp: int, tp: int, loc: Loc, *, cp: int = 1) -> list[Violation]:
    """Without a given dp, pp x cp x tp must divide the devices: leaving some out is the user's word, never silent."""
    each = pp * cp * tp
    if available % each == 0:
        return []
    dp = available // each
    degrees = f"pp {pp} x cp {cp} x tp {tp}" if cp > 1 else f"pp {pp} x tp {tp}"
    return [
        Violation(
            code="devices_divisible", loc=loc, actual=available, allowed=f"multiples of {each}", nearest=each * dp,
            message=f"{degrees} does not divide {available} devices; say dp={dp} to leave {available - each * dp} unused",
        )
    ]  # fmt: skip
