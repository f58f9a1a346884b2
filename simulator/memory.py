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
from simulator.unit_cost import UnitCost
from specs.plan import CollectiveOptions
from specs.schedule import Action


@dataclass
class MemoryPeak:
    """The fullest moment of a rank. ``saved_by_class``: the activations by the class of the op that keeps them."""

    bytes: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    moment: str = ""
    saved_by_class: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryRules:
    """What the runtime holds besides tensors of the model.

    ``grads_live_in_buckets``: DDP's buckets are there from the start and hold the gradients; those accumulated before the
    synchronising micro-batch are apart. ``flat_copies``: flat buffers of a unit's size, while its weights are gathered or its
    gradients reduced, besides source and result. ``keeps_stage_outputs``: a stage's outputs live until its backward.
    ``extra_grad_bytes``: per local parameter, a second copy of its gradient. ``extra_state_bytes``: per parameter whose states the
    rank keeps. ``buffer_bytes``: communication buffers that are there from the start.
    """

    grads_live_in_buckets: bool = True
    flat_copies: float = 1.0
    keeps_stage_outputs: bool = True
    extra_grad_bytes: float = 0.0
    extra_state_bytes: float = 0.0
    buffer_bytes: float = 0.0


@dataclass
class _Held:
    """How many times a unit's saved tensors are held."""

    unit: UnitCost
    count: int = 0


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
        self._held: dict[int, _Held] = {}
        self._held_at_peak: list[tuple[UnitCost, int]] = []
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
        for unit, count in self._held_at_peak:
            for name, size in unit.saved_by_class.items():
                self.peak.saved_by_class[name] = self.peak.saved_by_class.get(name, 0.0) + count * size
        return self.peak

    def _save(self, unit: UnitCost, count: int) -> None:
        """A unit's saved tensors come (+1) or go (-1)."""
        self.saved += count * unit.saved_bytes
        held = self._held.setdefault(id(unit), _Held(unit))
        held.count += count

    def _static_terms(self) -> dict[str, float]:
        terms = {"params": 0.0, "optimizer": 0.0, "grads": 0.0}
        for cost in self.stages.values():
            share = cost.state_share
            if cost.stage.zero == 0:
                terms["params"] += cost.local_weight_bytes
            elif not cost.has_master or cost.stage.zero == 3:
                terms["params"] += cost.local_weight_bytes * share
            terms["optimizer"] += cost.num_trainable * (cost.state_bytes + self.rules.extra_state_bytes) * share
            terms["grads"] += cost.num_trainable * self.rules.extra_grad_bytes
            if self._is_ddp(cost):
                terms["grads"] += cost.num_trainable * cost.grad_bytes
        return terms

    def _is_ddp(self, cost: StageCost) -> bool:
        one_stage = self.num_stages == 1 and cost.dp_shape.size > 1
        return cost.stage.zero == 0 and one_stage and self.rules.grads_live_in_buckets

    def _kept_gathered(self) -> float:
        """Weights that stay gathered during the whole step (zero 1 and 2)."""
        return sum(cost.local_weight_bytes for cost in self.stages.values() if cost.stage.zero in (1, 2))

    def _gathered(self, cost: StageCost, index: int, step: int) -> float:
        """Gathered weights while unit ``index`` runs; zero 3: its own and the prefetched (``step`` +1 forward, -1 backward)."""
        if cost.stage.zero != 3 or cost.shard_degree == 1:
            return self._kept_gathered()
        ahead = range(index, index + step * (self.options.prefetch_units + 1), step)
        # units that share a parameter are gathered together: it is there from the first of them to the last
        shared = 0.0 if cost.tied_owner is None or cost.tied_owner in ahead else cost.tied_params * cost.weight_bytes
        return shared + sum(cost.unit_weight_bytes(unit) for unit in ahead if 0 <= unit < len(cost.params))

    def _flat_weights(self, cost: StageCost, index: int) -> float:
        """The flat buffer that a unit's weights are gathered into before they are unpacked."""
        return self.rules.flat_copies * cost.unit_weight_bytes(index) if cost.shard_degree > 1 else 0.0

    def _forward(self, action: Action) -> None:
        cost = self.stages[action.stage]
        for index, unit in enumerate(cost.units):
            self._note(f"{action}", unit.saved_bytes + unit.forward_peak_bytes, self._gathered(cost, index, 1))
            if self._flat_weights(cost, index):
                self._note(f"{action}", 0.0, self._gathered(cost, index, 1), self._flat_weights(cost, index))
            self._save(unit, 1)
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs += cost.units[-1].output_bytes

    def _backward(self, action: Action) -> None:
        cost = self.stages[action.stage]
        for index in reversed(range(len(cost.units))):
            unit, full = cost.units[index], cost.unit_grad_bytes(index)
            first = (action.stage, index) not in self._has_grad
            transient = full  # what autograd has just computed, until it is added or copied to where it stays
            if first:
                self._has_grad.add((action.stage, index))
                self.grads += self._kept_grads(cost, full)
                transient = full if self._kept_grads(cost, full) < full else 0.0
            if cost.tied_owner is not None and index >= cost.tied_owner:  # the head's part waits until the embedding's is there
                transient += cost.tied_params * cost.grad_bytes
            self._note(f"{action}", unit.backward_peak_bytes + transient, self._gathered(cost, index, -1))
            if cost.stage.zero >= 2 and cost.shard_degree > 1:
                flat = (1 + self.rules.flat_copies) * full
                self._note(f"{action}", 0.0, self._gathered(cost, index, -1), flat)
            self._save(unit, -1)
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs -= cost.units[-1].output_bytes

    def _kept_grads(self, cost: StageCost, full: float) -> float:
        """Bytes that a unit's gradient adds for the rest of the step at its first backward."""
        if cost.stage.zero >= 2:
            return full * cost.state_share
        if self._is_ddp(cost):
            return full if self._num_passes(cost) > 1 else 0.0
        return full

    def _num_passes(self, cost: StageCost) -> int:
        return sum(1 for action in self.row if action.kind == "F" and self.stages[action.stage] is cost)

    def _note(self, moment: str, workspace: float, gathered: float, comm_buffers: float = 0.0) -> None:
        buffers = comm_buffers + self.rules.buffer_bytes
        terms = {**self._static, "gathered": gathered, "workspace": workspace, "comm_buffers": buffers}
        terms["grads"] += self.grads
        terms["activations"] = self.saved + self.outputs
        total = sum(terms.values())
        self.curve.append((moment, total))
        if total > self.peak.bytes:
            self.peak = MemoryPeak(total, terms, moment)
            self._held_at_peak = [(held.unit, held.count) for held in self._held.values()]
