"""A given strategy as a plan: ``plan_from_strategy``."""

from __future__ import annotations

from dataclasses import replace

from planner import rules
from planner.assemble import Assembler
from planner.layout import Pool, whole_cluster
from planner.prices import Prices
from planner.refine import Refined, Refiner
from planner.strategy_text import SUBJECT, Strategy, parse_strategy
from simulator.cost_model import CostModel
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.training import TrainingSpec

__all__ = ["Strategy", "check_strategy", "parse_strategy", "plan_from_strategy"]


def plan_from_strategy(
    strategy: str | Strategy,
    graph: ModelGraph,
    cluster: ClusterSpec,
    workload: TrainingSpec,
    cost_model: CostModel | None = None,
) -> Plan:
    """The explicit plan of a strategy on a resolved cluster.

    ``dp`` defaults to all devices that pp x tp leave; ``split`` to the one that the stage program finds (balanced by time within
    memory, by time alone where memory does not suffice: the prediction then says so), or for a schedule that the program does not
    know to the one of ``planner.even_split``. Raises :class:`InvalidInput` with every violation.
    """
    given = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    pool = _pool(cluster, given.tp, workload)
    dp = given.dp_of(pool.size)
    violations = check_strategy(given, graph, cluster, workload)
    if violations:
        raise InvalidInput(violations, subject=f"strategy '{given.text()}'")
    complete = replace(given, dp=dp)
    if given.pp > 1 and given.split is None:
        model = (cost_model or CostModel(graph, cluster, workload)).with_loss(given.loss or workload.loss_kernel)
        complete = _split(complete, pool, model, workload.global_batch)
    return Assembler(graph, cluster, workload).plan(complete, pool)


def _split(strategy: Strategy, pool: Pool, model: CostModel, global_batch: int) -> Strategy:
    prices = Prices(model)
    used = Pool(pool.places[: strategy.pp * strategy.dp_of(pool.size) * strategy.cp * strategy.tp], pool.label)
    refiner = Refiner(prices)
    passes = global_batch // (strategy.dp_of(used.size) * strategy.micro_batch)
    found = refiner.refine(strategy, used, passes)
    if not isinstance(found, Refined):
        found = refiner.refine(strategy, used, passes, ignore_memory=True)
    if not isinstance(found, Refined):
        raise InvalidInput.single("no_split", f"no split of the model's units over {strategy.pp} stages was found", subject=SUBJECT)
    return found.strategy


def _pool(cluster: ClusterSpec, tp: int, workload: TrainingSpec) -> Pool:
    """The devices for a given strategy: nodes that tp divides, in rank order, within the workload's limit on devices."""
    everything = whole_cluster(cluster)
    sizes = [group.devices_per_node or 0 for group in cluster.nodes]
    places = [place for place in everything.places if sizes[place.group] % tp == 0] or list(everything.places)
    limit = workload.limits.max_devices
    return Pool(tuple(places[:limit] if limit is not None else places), everything.label)


def check_strategy(strategy: Strategy, graph: ModelGraph, cluster: ClusterSpec, workload: TrainingSpec) -> list[Violation]:
    """Every rule that the strategy breaks on this model, cluster and workload."""

    def loc(key: str) -> tuple[str, str]:
        return (SUBJECT, key)

    pool = _pool(cluster, strategy.tp, workload)
    pp, tp = strategy.pp, strategy.tp
    found = rules.tp_divides_sizes(graph, tp, loc("tp"))
    found += rules.tp_inside_node(tp, _node_sizes(cluster, pool), loc("tp"))
    found += rules.pp_at_most_units(pp, graph.num_units(), loc("pp"), strategy.stages_per_rank)
    found += rules.micro_batch_allowed(workload, strategy.micro_batch, loc("micro_batch"))
    found += rules.zero_with_pipeline(strategy.zero, pp, loc("zero"))
    found += rules.sequence_divisible_by_tp(workload.max_seq_len, tp, strategy.sequence_parallel, loc("sequence_parallel"))
    found += rules.sequence_divisible_by_cp(workload.max_seq_len, strategy.cp, tp, strategy.sequence_parallel, loc("cp"))
    found += rules.cp_splits_attention(graph, strategy.cp, loc("cp"))
    found += rules.ep_divides_experts(rules.num_experts(graph) if strategy.ep > 1 else 0, strategy.ep, loc("ep"))
    found += rules.whole_experts_rule(strategy.whole_experts, strategy.ep, tp, strategy.sequence_parallel, loc("whole_experts"))
    found += rules.recompute_classes(strategy.recompute, strategy.op_classes, loc("recompute"))
    if strategy.split is not None and pp > 1:
        found += rules.split_covers_units(
            strategy.split, num_stages=strategy.num_stages, num_units=graph.num_units(), loc=loc("split")
        )
    return found + _check_batch(strategy, pool, workload)


def _node_sizes(cluster: ClusterSpec, pool: Pool) -> set[int]:
    return {cluster.nodes[index].devices_per_node or 1 for index in {place.group for place in pool.places}}


def _check_batch(strategy: Strategy, pool: Pool, workload: TrainingSpec) -> list[Violation]:
    """Rules about devices, dp and micro-batches."""
    pp, tp, each = strategy.pp, strategy.tp, strategy.pp * strategy.cp * strategy.tp
    limit = "the workload allows" if workload.limits.max_devices == pool.size else "the cluster has"
    if strategy.dp is None and pool.size % each and each <= pool.size:
        return rules.devices_divisible(pool.size, pp, tp, (SUBJECT, "dp"), cp=strategy.cp)
    dp = max(1, strategy.dp_of(pool.size))
    found = rules.devices_enough(dp * each, pool.size, (SUBJECT, "dp" if strategy.dp else "pp"), limit=limit)
    ranks, of = (dp * strategy.cp * tp, "dp x cp x tp") if strategy.whole_experts else (dp * strategy.cp, "dp x cp")
    found += rules.ep_divides_ranks(strategy.ep, ranks, (SUBJECT, "ep"), of=of)
    found += rules.shard_group_divides_dp(strategy.shard_group, dp, strategy.zero, (SUBJECT, "shard_group"))
    batch = rules.batch_splits(workload.global_batch, dp, strategy.micro_batch, (SUBJECT,))
    if batch:
        return found + batch
    passes = workload.global_batch // dp // strategy.micro_batch
    return found + rules.schedule_rules(
        strategy.schedule, pp=pp, num_micro_batches=passes, stages_per_rank=strategy.stages_per_rank,
        loc=(SUBJECT, "micro_batch"), micro_batch=strategy.micro_batch, dp=dp,
    )  # fmt: skip
