"""PlanAnswer: what the planner says, with its certificate. Infeasible and timed out are answers too."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from specs.base import Document, Spec
from specs.plan import Plan
from specs.prediction import Assumption, Prediction

Status = Literal["optimal", "feasible", "infeasible", "timed_out"]


class SearchRecord(Spec):
    """How the answer was found. ``gap`` = step time of the plan / ``best_bound_s`` - 1; 0 with status optimal."""

    candidates: int = 0
    priced: int = Field(default=0, description="candidates whose bound was computed")
    confirmed: int = Field(default=0, description="candidates confirmed in the event simulator")
    wall_s: float = 0.0
    best_bound_s: float | None = None
    gap: float | None = None
    seed: int = 0
    space: dict[str, list[int | str]] = Field(default={}, description="values tried per dimension")


class Alternative(Spec):
    """The best plan of another kind."""

    strategy: str
    step_time_s: float
    peak_bytes: float
    plan: Plan | None = None
    why_not: str = Field(default="", description="what it loses against the chosen plan, in words and numbers")


class BrokenLimit(Spec):
    """A limit that no candidate keeps, and the cheapest way around it."""

    limit: str
    message: str
    needed: float | None = None
    available: float | None = None
    unit: str = ""
    relaxations: tuple[str, ...] = ()
    state_bytes: float | None = Field(default=None, description="memory: states of one device when split over all of them")
    devices_for_states: int | None = Field(default=None, description="memory: fewest devices that hold the states alone")
    offload_host_bytes: float | None = Field(default=None, description="memory: host memory that the optimizer's states would need")


class PlanAnswer(Document):
    """The planner's answer; ``plan`` and ``prediction`` are ``None`` when infeasible."""

    kind: ClassVar[str] = "plan answer"
    status: Status
    plan: Plan | None = None
    prediction: Prediction | None = None
    search: SearchRecord = SearchRecord()
    alternatives: tuple[Alternative, ...] = ()
    rejected: dict[str, int] = Field(default={}, description="number of rejected candidates by reason")
    assumptions: tuple[Assumption, ...] = ()
    limits: tuple[BrokenLimit, ...] = ()
    explanation: tuple[str, ...] = ()
