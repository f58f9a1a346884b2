"""What the parts of the step simulation share: a folded pipeline rank, and putting work on its streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.cost_model import CostModel
from simulator.engine import Engine
from simulator.runtime_rules import RuntimeRules
from simulator.stage_cost import StageCost
from specs.plan import Plan
from specs.schedule import Action


@dataclass
class RankStep:
    """One pipeline rank of one pipeline. ``compute`` and ``comm``: its streams. After the simulation: ``link_bytes`` that it sends
    by axis, ``terms`` its exclusive seconds."""

    pipeline: int
    rank: int
    stages: dict[int, StageCost]
    row: tuple[Action, ...]
    compute: int
    comm: int
    link_bytes: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)

    def count(self, axis: str, num_bytes: float) -> None:
        """Add to the bytes that the rank sends along an axis."""
        self.link_bytes[axis] = self.link_bytes.get(axis, 0.0) + num_bytes


class Work(NamedTuple):
    """Seconds on a compute stream and how they split by time term."""

    seconds: float
    terms: dict[str, float]

    @classmethod
    def of(cls, terms: Mapping[str, float]) -> Work:
        """The work of some terms; those of no time are left out."""
        used = {name: seconds for name, seconds in terms.items() if seconds > 0}
        return cls(sum(used.values()), used)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part needs: the engine that the tasks go to, prices, plan, and how the runtime behaves."""

    engine: Engine
    model: CostModel
    plan: Plan
    rules: RuntimeRules

    def compute(self, rank: RankStep, work: Work, after: Sequence[int], label: tuple[object, ...], wait_term: str) -> int:
        """Queue work on the rank's compute stream."""
        return self.engine.task(rank.compute, work.seconds, after=after, label=label, terms=work.terms, wait_term=wait_term)

    def alone(self, rank: RankStep, term: str, seconds: float, label: str, after: Sequence[int] = ()) -> int:
        """Queue work of one term on the compute stream, which waits for it."""
        return self.compute(rank, Work.of({term: seconds}), after, (label,), term)
