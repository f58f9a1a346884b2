"""Collectives of sharded and replicated states: how long a unit's gather, reduce-scatter and all-reduce take, experts apart.

Parameters of a rank's experts are replicated (and sharded) only over the ranks that hold the same experts.
"""

from __future__ import annotations

from simulator.network import Network
from simulator.stage_cost import StageCost


class StateComm:
    """Prices the data-parallel collectives of stages."""

    def __init__(self, network: Network, *, by_tensor: bool) -> None:
        self.network, self.by_tensor = network, by_tensor

    def gather_s(self, cost: StageCost, indices: range) -> tuple[float, float]:
        """(seconds, bytes received) of gathering the weights of units, one call each, or one call for each tensor."""
        seconds = moved = 0.0
        for index in indices:
            unit = cost.params[index]
            expert = unit.expert * cost.weight_bytes
            dense = cost.unit_weight_bytes(index) - expert
            calls = max(1, unit.num_tensors) if self.by_tensor else 1
            seconds += calls * self.network.collective("all_gather", dense / calls, cost.shard_shape).seconds
            moved += dense * (cost.shard_degree - 1) / cost.shard_degree
            if expert and cost.expert_shape is not None:
                seconds += self.network.collective("all_gather", expert, cost.expert_shape).seconds
                moved += expert * (cost.expert_degree - 1) / cost.expert_degree
        return seconds, moved

    def reduce_scatter_s(self, cost: StageCost, index: int) -> tuple[float, float]:
        """(seconds, bytes sent) of a unit's gradients: scattered in the shard group, summed between replicas of the shard."""
        unit = cost.params[index]
        dense, expert = (unit.trainable - unit.expert) * cost.reduce_bytes, unit.expert * cost.reduce_bytes
        seconds = self.network.collective("reduce_scatter", dense, cost.shard_shape).seconds
        seconds += self.network.collective("all_reduce", dense / cost.shard_degree, cost.replica_shape).seconds
        moved = dense * (cost.shard_degree - 1) / cost.shard_degree
        if expert and cost.expert_shape is not None:
            seconds += self.network.collective("reduce_scatter", expert, cost.expert_shape).seconds
            moved += expert * (cost.expert_degree - 1) / cost.expert_degree
        return seconds, moved

    def all_reduce_s(self, cost: StageCost, dense_bytes: float, expert_bytes: float = 0.0) -> tuple[float, float]:
        """(seconds, bytes sent) of summing gradients over all ranks that hold the same parameters."""
        seconds = self.network.collective("all_reduce", dense_bytes, cost.dp_shape).seconds
        moved = 2 * dense_bytes * (cost.dp_shape.size - 1) / cost.dp_shape.size
        if expert_bytes and cost.expert_shape is not None:
            seconds += self.network.collective("all_reduce", expert_bytes, cost.expert_shape).seconds
            moved += 2 * expert_bytes * (cost.expert_shape.size - 1) / cost.expert_shape.size
        return seconds, moved
