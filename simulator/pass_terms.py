"""Seconds of a pass through units by time term, as the step simulation queues them: compute, collectives in it, copies, waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.cost_model import CostModel
from simulator.exchange import exposed_s
from simulator.runtime_rules import RuntimeRules
from simulator.stage_cost import StageCost


class PassTerms:
    """Terms of forward and backward passes of stages and of what the runtime does around them."""

    def __init__(self, model: CostModel, rules: RuntimeRules) -> None:
        self.model, self.rules, self.software = model, rules, model.software

    def forward(self, cost: StageCost, indices: Sequence[int]) -> dict[str, float]:
        """Forward of some of a stage's units."""
        units = [cost.units[index] for index in indices]
        terms = {
            "forward": cost.slowdown * sum(unit.forward_s for unit in units),
            "tp_comm": sum(unit.tp_forward_s + self._tp_wait_s(cost, unit.forward_s, unit.tp_forward_calls) for unit in units),
        }
        return _with_exchanges(terms, [unit.exchange_forward for unit in units])

    def backward(self, cost: StageCost, indices: Sequence[int], accumulates: bool, kind: str = "B") -> dict[str, float]:
        """Backward of some units, recompute included; ``accumulates``: their gradients are added to those of earlier passes.

        ``kind``: all of it (``B``), without the gradients of parameters (``I``), or those alone (``W``).
        """
        units = [cost.units[index] for index in indices]
        add = 0.0
        if accumulates:  # gradients of later micro-batches are added: two reads and a write
            add = sum(self.model.grad_add_s(cost.device, cost.params[index].trainable) for index in indices)
        if kind == "W":
            return {"backward": cost.slowdown * (sum(unit.weight_grad_s for unit in units) + add)}
        if kind == "I":
            units = [
                replace(unit, backward_s=unit.backward_s - unit.weight_grad_s, tp_backward_s=unit.tp_split_backward_s)
                for unit in units
            ]
        terms = {
            "backward": cost.slowdown * (sum(unit.backward_s for unit in units) + add),
            "recompute": cost.slowdown * sum(unit.recompute_s for unit in units),
            "tp_comm": sum(
                unit.tp_backward_s + unit.tp_recompute_s + self._tp_wait_s(cost, unit.backward_s, unit.tp_backward_calls)
                for unit in units
            ),
        }
        return _with_exchanges(terms, [unit.exchange_backward for unit in units])

    def overlapped(self, forward: StageCost, backward: StageCost, accumulates: bool) -> dict[str, float]:
        """Forward of one stage beside backward of another: the exchange of each runs beside the compute of the other (DualPipe,
        arXiv 2412.19437 §3.2.1)."""
        first = self.forward(forward, range(len(forward.units)))
        second = self.backward(backward, range(len(backward.units)), accumulates)
        exposed = exposed_s(first.pop("ep_comm", 0.0), second["backward"] + second["recompute"])
        exposed += exposed_s(second.pop("ep_comm", 0.0), first["forward"])
        return _with_exchanges(first, [second, {"ep_comm": exposed}])

    def _tp_wait_s(self, cost: StageCost, work_s: float, calls: int) -> float:
        """Waiting for the slowest tensor-parallel rank at each collective of a unit."""
        return self.model.skew_wait_s(cost.device, cost.slowdown * work_s, cost.tp_shape.size, calls)

    def dp_wait_s(self, cost: StageCost, work_s: float) -> float:
        """Waiting for the slowest data-parallel rank at a unit's gather or reduction, or once a step (DDP)."""
        return self.model.skew_wait_s(cost.device, work_s, cost.dp_shape.size)

    def unpack_s(self, cost: StageCost, index: int) -> float:
        """Copying a unit's gathered flat buffer into its parameters."""
        copies = self.rules.gather_copies if self.software.gather_copies is None else self.software.gather_copies
        return copies * self.model.copy_s(cost.device, cost.unit_weight_bytes(index), fresh=True)

    def pack_s(self, cost: StageCost, index: int) -> float:
        """Copying a unit's gradients into the flat buffer that is reduced."""
        copies = self.rules.reduce_copies if self.software.reduce_copies is None else self.software.reduce_copies
        return copies * self.model.copy_s(cost.device, cost.unit_reduce_bytes(index), fresh=True)

    def p2p_s(self, cost: StageCost, size_bytes: float, source: int, target: int) -> float:
        """Seconds from stage to stage; where the tp ranks hold the same tensor, split over them and gathered after if so set."""
        degree = cost.tp_shape.size
        if not self.software.p2p_split or degree == 1 or cost.stage.sequence_parallel:
            return self.model.network.p2p(size_bytes, source, target).seconds
        gather = self.model.network.collective("all_gather", size_bytes, cost.tp_shape).seconds
        return self.model.network.p2p(size_bytes / degree, source, target).seconds + gather


def _with_exchanges(terms: dict[str, float], exchanged: Sequence[dict[str, float]]) -> dict[str, float]:
    """``terms`` with the units' context- and expert-parallel exchanges added."""
    for part in exchanged:
        for name, seconds in part.items():
            terms[name] = terms.get(name, 0.0) + seconds
    return terms
