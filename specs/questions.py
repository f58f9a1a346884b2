"""Answers to 'what changes between two plans', 'why not this one' and 'how many devices do I need'."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.answer import BrokenLimit, Status
from specs.base import Document, Spec
from specs.prediction import Assumption


class Change(Spec):
    """One thing that two plans do not share."""

    what: str
    before: Any = None
    after: Any = None


class RankMove(Spec):
    """Ranks that move alike: bytes of states that one of them needs, has already, and must get from elsewhere."""

    ranks: tuple[int, ...]
    needs_bytes: float
    held_bytes: float
    moves_bytes: float


class Resharding(Spec):
    """Whether a framework's checkpoints of the first plan load into the second."""

    framework: str
    loads: bool
    how: str


class PlanDiff(Document):
    """What changes from one plan to another. States: weights, master weights and optimizer states; gradients do not live on.

    ``checkpoint_bytes``: one whole copy of those states. ``moved_bytes``: what all ranks together must get from elsewhere;
    ``move_time_s``: of the fullest rank over its node's uplink, where a cluster is given.
    """

    kind: ClassVar[str] = "plan difference"
    changes: tuple[Change, ...]
    checkpoint_bytes: float
    moved_bytes: float
    most_moved_bytes: float = Field(default=0.0, description="by one rank")
    moved_by_kind: dict[str, float] = {}
    ranks: tuple[RankMove, ...] = ()
    move_time_s: float | None = None
    resharding: tuple[Resharding, ...] = ()
    notes: tuple[str, ...] = ()


class TermDelta(Spec):
    """One term of two plans; seconds or bytes."""

    term: str
    chosen: float
    asked: float

    @property
    def delta(self) -> float:
        """What the asked plan costs more."""
        return self.asked - self.chosen


class BrokenRule(Spec):
    """A rule that forbids the asked plan."""

    code: str
    loc: tuple[str | int, ...] = ()
    message: str
    actual: Any = None
    allowed: Any = None
    nearest: Any = None


class WhyNot(Document):
    """Why not this strategy: a rule forbids it, it does not fit, or it is slower than the chosen plan, term by term."""

    kind: ClassVar[str] = "why not"
    asked: str
    chosen: str
    verdict: Literal["forbidden", "does_not_fit", "slower", "faster", "same"]
    reason: str
    rules: tuple[BrokenRule, ...] = ()
    step_time: TermDelta | None = Field(default=None, description="seconds")
    terms: tuple[TermDelta, ...] = Field(default=(), description="seconds, largest difference first")
    memory: TermDelta | None = Field(default=None, description="peak bytes of the fullest device")
    memory_terms: tuple[TermDelta, ...] = Field(default=(), description="bytes of the fullest device")
    missing_bytes: float | None = Field(default=None, description="of the fullest device, margin and baseline included")
    notes: tuple[str, ...] = ()


class SizePoint(Spec):
    """The best plan on one number of devices."""

    devices: int
    status: Status
    strategy: str = ""
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_device: float | None = None
    efficiency: float | None = Field(default=None, description="tokens per second and device over the best of the curve")
    peak_bytes: float | None = None
    capacity_bytes: float | None = None
    usd_per_step: float | None = None
    usd_per_billion_tokens: float | None = None
    limits: tuple[BrokenLimit, ...] = ()


class Recommendation(Document):
    """How many devices of one type: the fewest that train the job at all, the cheapest per token, and the curve."""

    kind: ClassVar[str] = "recommendation"
    device: str
    node: str
    devices_per_node: int
    fewest_devices: int | None = None
    cheapest_devices: int | None = Field(default=None, description="fewest dollars per token; unpriced: most tokens per device")
    efficient_devices: int | None = Field(default=None, description="most devices that keep 'efficient_at_least'")
    efficient_at_least: float = 0.8
    multiple_of: int = Field(default=1, description="devices come in multiples of this: pp x tp of the given strategy")
    curve: tuple[SizePoint, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
