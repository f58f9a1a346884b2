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
from typing import NamedTuple

from simulator.stage_cost import StageCost
from specs.plan import CollectiveOptions
from specs.schedule import Action, passes_of

# Beside op classes: inputs and gradients that stay after the first part of a split backward until weight gradients are made.
WAITING = "weight gradients to come"


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
    rank keeps. ``buffer_bytes``: communication buffers that are there from the start. ``narrow_shards``: as
    ``Software.keeps_narrow_shards``.
    """

    grads_live_in_buckets: bool = True
    flat_copies: float = 1.0
    keeps_stage_outputs: bool = True
    extra_grad_bytes: float = 0.0
    extra_state_bytes: float = 0.0
    buffer_bytes: float = 0.0
    narrow_shards: bool = True


class _Doing(NamedTuple):
    """How far an action has come: forwards have passed the units before ``unit``, the others those after it."""

    kind: str
    stage: int
    unit: int

    def change(self, stage: int, index: int, *, for_weights: bool) -> int:
        """How many more times a unit's saved tensors are held than before the action: all of them, or those that wait for its
        weight gradients."""
        if stage != self.stage:
            return 0
        if self.kind == "F":
            return int(index < self.unit and not for_weights)
        if index <= self.unit or (for_weights and self.kind == "B") or (not for_weights and self.kind == "W"):
            return 0
        return 1 if for_weights and self.kind == "I" else -1


class _Walked(NamedTuple):
    """What an action left behind, and the most that was held during it."""

    saved: float
    outputs: float
    grads: float
    highest: float


class RankMemory:
    """Walks a row of actions; see the module docstring. ``stages``: stage number -> cost, of the stages on this rank.
    ``overlaps``: a backward runs while the forward before it may be at its fullest (``specs.schedule.passes_of``)."""

    def __init__(
        self,
        stages: dict[int, StageCost],
        row: Sequence[Action],
        *,
        num_stages: int,
        options: CollectiveOptions,
        rules: MemoryRules,
        overlaps: bool = False,
    ) -> None:
        self.passes = passes_of(row, overlaps=overlaps)
        self.stages, self.row, self.num_stages, self.options, self.rules = stages, row, num_stages, options, rules
        self.peak = MemoryPeak()
        self.highest: dict[Action, float] = {}
        self.held_at_the_end = 0.0  # while the optimizer runs
        self.saved = 0.0
        self.outputs = 0.0
        self.grads = 0.0
        self._beside = self._most = 0.0
        self._has_grad: set[tuple[int, int]] = set()
        # by stage: micro-batches whose saved tensors are held, and those of which only what waits for weight gradients is
        self._counts = {(stage, for_weights): 0 for stage in stages for for_weights in (False, True)}
        self._doing: _Doing | None = None
        self._at_peak: tuple[dict[tuple[int, bool], int], _Doing | None] = ({}, None)
        self._walked: dict[tuple[object, ...], _Walked] = {}
        self._static = self._static_terms()
        self._held = sum(self._static.values()) + self.rules.buffer_bytes
        self._kept = sum(cost.local_weight_bytes for cost in stages.values() if cost.stage.zero in (1, 2))
        self._windows: dict[tuple[int, int, int], float] = {}

    def run(self) -> MemoryPeak:
        """The peak over the step."""
        self._note("between steps", workspace=0.0, gathered=0.0)
        for actions in self.passes:
            for action in actions:
                paired = len(actions) > 1 and action.kind in "BI"
                self._act(action, actions[0].stage if paired else None)
        self.held_at_the_end = self._note("optimizer step", workspace=0.0, gathered=self._kept)
        self.peak.saved_by_class = self._by_class()
        return self.peak

    def _act(self, action: Action, beside: int | None) -> None:
        """One action, walked unit by unit unless it was before with as much in flight. ``beside``: the stage whose forward may be
        at its fullest meanwhile."""
        key = (action.stage, action.kind, beside, len(self._has_grad), *self._counts.values())
        walked = self._walked.get(key)
        if walked is None:
            self._most = 0.0
            self._beside = 0.0 if beside is None else max(unit.forward_peak_bytes for unit in self.stages[beside].units)
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                self._weight_gradients(action)
            else:
                self._backward(action, whole=action.kind == "B")
            self._doing, self._beside = None, 0.0
            walked = self._walked[key] = _Walked(self.saved, self.outputs, self.grads, self._most)
        self.saved, self.outputs, self.grads, self.highest[action] = walked
        self._counts[action.stage, False] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        self._counts[action.stage, True] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]

    def _by_class(self) -> dict[str, float]:
        """Bytes held at the peak by the class of the op that keeps them."""
        counts, doing = self._at_peak
        found: dict[str, float] = {}
        for (stage, for_weights), count in counts.items():
            held: dict[int, int] = {}
            units = {id(unit): unit for unit in self.stages[stage].units}
            for index, unit in enumerate(self.stages[stage].units):
                more = doing.change(stage, index, for_weights=for_weights) if doing is not None else 0
                held[id(unit)] = held.get(id(unit), 0) + count + more
            for number, unit in units.items():
                sizes = {WAITING: unit.weight_saved_bytes} if for_weights else unit.saved_by_class
                for name, size in sizes.items():
                    found[name] = found.get(name, 0.0) + held[number] * size
        return found

    def _static_terms(self) -> dict[str, float]:
        terms = {"params": 0.0, "optimizer": 0.0, "grads": 0.0}
        for cost in self.stages.values():
            share = cost.state_share
            if cost.stage.zero == 0:
                terms["params"] += cost.local_weight_bytes
            elif not cost.has_master or (cost.stage.zero == 3 and self.rules.narrow_shards):
                terms["params"] += cost.local_weight_bytes * share
            terms["optimizer"] += cost.num_trainable * (cost.state_bytes + self.rules.extra_state_bytes) * share
            terms["grads"] += cost.num_trainable * self.rules.extra_grad_bytes
            if self._is_ddp(cost):
                terms["grads"] += cost.num_trainable * cost.grad_bytes
        return terms

    def _is_ddp(self, cost: StageCost) -> bool:
        one_stage = self.num_stages == 1 and cost.dp_shape.size > 1
        return cost.stage.zero == 0 and one_stage and self.rules.grads_live_in_buckets

    def _gathered(self, stage: int, index: int, step: int) -> float:
        """Gathered weights while unit ``index`` runs. Zero 1 and 2: those of the step; zero 3: its own and the prefetched ones
        (``step`` +1 forward, -1 backward)."""
        cost = self.stages[stage]
        if cost.stage.zero != 3 or cost.shard_degree == 1:
            return self._kept
        key = (stage, index, step)
        if key not in self._windows:
            ahead = range(index, index + step * (self.options.prefetch_units + 1), step)
            # units that share a parameter are gathered together: it is there from the first of them to the last
            shared = 0.0 if cost.tied_owner is None or cost.tied_owner in ahead else cost.tied_params * cost.weight_bytes
            self._windows[key] = shared + sum(cost.unit_weight_bytes(unit) for unit in ahead if 0 <= unit < len(cost.params))
        return self._windows[key]

    def _flat_weights(self, cost: StageCost, index: int) -> float:
        """The flat buffer that a unit's weights are gathered into before they are unpacked."""
        return self.rules.flat_copies * cost.unit_weight_bytes(index)

    def _forward(self, action: Action) -> None:
        cost = self.stages[action.stage]
        for index, unit in enumerate(cost.units):
            self._doing = _Doing("F", action.stage, index)
            gathered = self._gathered(action.stage, index, 1)
            self._note(action, unit.saved_bytes + unit.forward_peak_bytes, gathered)
            if cost.shard_degree > 1:
                self._note(action, 0.0, gathered, self._flat_weights(cost, index))
            self.saved += unit.saved_bytes
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs += cost.units[-1].output_bytes

    def _backward(self, action: Action, *, whole: bool) -> None:
        """The backward of a stage, or (not ``whole``) the part that makes no gradients of parameters."""
        cost = self.stages[action.stage]
        for index in reversed(range(len(cost.units))):
            unit, self._doing = cost.units[index], _Doing(action.kind, action.stage, index)
            if whole:
                self._gradients(action, index, unit.backward_peak_bytes, self._gathered(action.stage, index, -1))
            else:
                self._note(action, unit.input_backward_peak_bytes, self._gathered(action.stage, index, -1))
                self.saved += unit.weight_saved_bytes
            self.saved -= unit.saved_bytes
        if action.stage + 1 < self.num_stages and self.rules.keeps_stage_outputs:
            self.outputs -= cost.units[-1].output_bytes

    def _weight_gradients(self, action: Action) -> None:
        """The other part of a split backward. Sharded weights are not gathered for it."""
        cost = self.stages[action.stage]
        for index in reversed(range(len(cost.units))):
            self._doing = _Doing("W", action.stage, index)
            self._gradients(action, index, 0.0, self._kept)
            self.saved -= cost.units[index].weight_saved_bytes

    def _gradients(self, action: Action, index: int, workspace: float, gathered: float) -> None:
        """A unit's gradients appear, on top of ``workspace``; where sharded they are then reduced from flat buffers."""
        cost = self.stages[action.stage]
        full = cost.unit_grad_bytes(index)
        transient = full  # what autograd has just computed, until it is added or copied to where it stays
        if (action.stage, index) not in self._has_grad:
            self._has_grad.add((action.stage, index))
            self.grads += self._kept_grads(cost, full)
            transient = full if self._kept_grads(cost, full) < full else 0.0
        if cost.tied_owner is not None and index >= cost.tied_owner:  # the head's part waits until the embedding's is there
            transient += cost.tied_params * cost.grad_bytes
        self._note(action, workspace + transient, gathered)
        if cost.stage.zero >= 2 and cost.shard_degree > 1:
            self._note(action, 0.0, gathered, (1 + self.rules.flat_copies) * full)

    def _kept_grads(self, cost: StageCost, full: float) -> float:
        """Bytes that a unit's gradient adds for the rest of the step at its first backward."""
        if cost.stage.zero >= 2:
            return full * cost.state_share
        if self._is_ddp(cost):
            return full if self._num_passes(cost) > 1 else 0.0
        return full

    def _num_passes(self, cost: StageCost) -> int:
        return sum(1 for action in self.row if action.kind == "F" and self.stages[action.stage] is cost)

    def _note(self, moment: Action | str, workspace: float, gathered: float, comm_buffers: float = 0.0) -> float:
        """Bytes held at a moment; the most so far is the peak."""
        workspace += self._beside
        total = self._held + self.grads + self.saved + self.outputs + gathered + workspace + comm_buffers
        self._most = max(self._most, total)
        if total > self.peak.bytes:
            terms = {
                **self._static, "gathered": gathered, "workspace": workspace,
                "comm_buffers": comm_buffers + self.rules.buffer_bytes, "activations": self.saved + self.outputs,
            }  # fmt: skip
            terms["grads"] += self.grads
            self.peak = MemoryPeak(total, terms, f"{moment}")
            self._at_peak = (dict(self._counts), self._doing)
        return total
