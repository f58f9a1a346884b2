"""Memory of one pipeline rank over a step, in schedule order; the peak says when and made of what.

States per parameter (bytes): weight w, gradient g, optimizer s (master weight included), G = shard degree.

zero 0   w + g + s                      zero 1   w + g + s/G  (weights gathered for the step)
zero 2   w + g/G + s/G (+ one unit's full gradients)      zero 3   (w + g + s)/G + gathered units (+ one unit's full gradients)

With no master weight the sharded weight itself (w/G) stays beside the gathered one. Source: Rajbhandari et al., arXiv
1910.02054 §3 and §5; Zhao et al., arXiv 2304.11277 §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.stage_cost import StageCost
from specs.plan import CollectiveOptions
from specs.schedule import Action


@dataclass
class MemoryPeak:
    """The fullest moment of a rank."""

    bytes: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    moment: str = ""


@dataclass(frozen=True)
class MemoryRules:
    """What the runtime holds besides tensors of the model. ``ddp_bucket_copies``: gradient buckets apart from the gradients."""

    ddp_bucket_copies: bool = False
    keeps_stage_outputs: bool = True


class RankMemory:
    """Walks a row of actions; see the module docstring. ``stages``: stage number -> cost, of the stages on this rank."""

    def __init__(
        self,
        stages: dict[int, StageCost],
        row: Sequence[Action],
        *,
        num_stages: int,
        options: CollectiveOptions,
        rules: MemoryRules,
    ) -> None:
        self.stages, self.row, self.num_stages, self.options, self.rules = stages, row, num_stages, options, rules
        self.peak = MemoryPeak()
        self.curve: list[tuple[str, float]] = []
        self.saved = 0.0
        self.outputs = 0.0
        self.grads = 0.0
        self._has_grad: set[tuple[int, int]] = set()
        self._static = self._static_terms()

    def run(self) -> MemoryPeak:
        """The peak over the step."""
        self._note("between steps", workspace=0.0, gathered=0.0)
        for action in self.row:
            if action.kind == "F":
                self._forward(action)
            elif action.kind in "BI":
                self._backward(action)
        self._note("optimizer step", workspace=0.0, gathered=self._kept_gathered())
        return self.peak

    def _static_terms(self) -> dict[str, float]:
        terms = {"params": 0.0, "optimizer": 0.0, "comm_buffers": 0.0}
        for cost in self.stages.values():
            share = 1.0 / cost.shard_degree
            if cost.stage.zero == 0:
                terms["params"] += cost.num_params * cost.weight_bytes
            elif not cost.has_master or cost.stage.zero == 3:
                terms["params"] += cost.num_params * cost.weight_bytes * share
            terms["optimizer"] += cost.num_trainable * cost.state_bytes * share
            if cost.stage.zero == 0 and cost.dp_shape.size > 1 and self.num_stages == 1 and self.rules.ddp_bucket_copies:
                terms["comm_buffers"] += cost.num_trainable * cost.grad_bytes
        return terms

    def _kept_gathered(self) -> float:
        """Weights that stay gathered during the whole step (zero 1 and 2)."""
        return sum(cost.num_params * cost.weight_bytes for cost in self.stages.values() if cost.stage.zero in (1, 2))

    def _gathered(self, cost: StageCost, index: int, step: int) -> float:
        """Gathered weights while unit ``index`` runs; zero 3: its own and the prefetched (``step`` +1 forward, -1 backward)."""
        if cost.stage.zero != 3 or cost.shard_degree == 1:
            return self._kept_gathered()
        ahead = range(index, index + step * (self.options.prefetch_units + 1), step)
        return sum(cost.unit_weight_bytes(unit) for unit in ahead if 0 <= unit < len(cost.params))

    def _forward(self, action: Action) -> None:
        cost = self.stages[action.stage]
        for index, unit in enumerate(cost.units):
            self._note(f"{action}", unit.saved_bytes + unit.forward_peak_bytes, self._gathered(cost, index, 1))
            self.saved += unit.saved_bytes
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs += cost.units[-1].output_bytes

    def _backward(self, action: Action) -> None:
        cost = self.stages[action.stage]
        for index in reversed(range(len(cost.units))):
            unit, full = cost.units[index], cost.unit_grad_bytes(index)
            first = (action.stage, index) not in self._has_grad
            transient = full
            if first:
                self._has_grad.add((action.stage, index))
                self.grads += full / cost.shard_degree if cost.stage.zero >= 2 else full
                transient = full if cost.stage.zero >= 2 and cost.shard_degree > 1 else 0.0
            self._note(f"{action}", unit.backward_peak_bytes + transient, self._gathered(cost, index, -1))
            self.saved -= unit.saved_bytes
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs -= cost.units[-1].output_bytes

    def _note(self, moment: str, workspace: float, gathered: float) -> None:
        terms = {**self._static, "grads": self.grads, "gathered": gathered, "workspace": workspace}
        terms["activations"] = self.saved + self.outputs
        total = sum(terms.values())
        self.curve.append((moment, total))
        if total > self.peak.bytes:
            self.peak = MemoryPeak(total, terms, moment)
