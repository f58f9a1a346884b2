"""Whatever the planner may emit for small models trains like one process: a sample of its whole space on four devices."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from executor.support import plan_violations
from planner.layout import pools
from planner.space import enumerate_space
from planner.strategy import plan_from_strategy
from specs.plan import Plan
from tests.executor_models import graph_of
from tests.executor_parity import compare_with_reference, workload_for
from tests.plans import gpu_cluster

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

GLOBAL_BATCH = 8
PLANS_OF_A_MODEL = 8


def sampled_plans(model: str) -> list[Plan]:
    """Plans of distinct strategies that use all four devices and that the executor does not refuse, drawn with a fixed seed."""
    graph, workload, cluster = graph_of(model), workload_for(GLOBAL_BATCH), gpu_cluster(4)
    space = enumerate_space(graph, workload, pools(cluster))
    strategies = {space.strategy(row).text(): space.strategy(row) for row in range(len(space.rows))}
    whole = [strategy for strategy in strategies.values() if strategy.pp * (strategy.dp or 1) * strategy.tp == 4]
    random.Random(model).shuffle(whole)
    plans = (plan_from_strategy(strategy, graph, cluster, workload) for strategy in whole)
    return list(islice((plan for plan in plans if not plan_violations(plan, graph)), PLANS_OF_A_MODEL))


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
def test_a_sample_of_the_planners_space_trains_like_one_process(model: str) -> None:
    for plan in sampled_plans(model):
        print(plan.strategy)  # shown with a failure
        compare_with_reference(model, plan)
