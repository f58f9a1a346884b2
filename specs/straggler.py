"""StragglerModel: how a cluster's devices and links deviate from their nominal speed, fail and come back."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from specs.base import Document, InvalidInputValue, InvalidInputValues, Spec
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Jitter(Spec):
    """A random factor on a time, drawn anew in every step: mean 1, coefficient of variation ``cv`` (0: none)."""

    shape: Literal["lognormal", "gamma"] = "lognormal"
    cv: float = Field(default=0.0, ge=0, le=3, description="standard deviation over mean")


class SlowNodes(Spec):
    """Slowdowns that hit all devices of a node at once (power cap, hot air, a neighbour on the host)."""

    share: Share = Field(default=0.0, description="of the time that a node is slow")
    factor: float = Field(default=1.0, ge=1, le=100, description="on the compute time of its devices")


class SlowFleet(Spec):
    """Devices that are slow for good, where it is not known which: each device is one with probability ``share``."""

    share: Share = 0.0
    factor: float = Field(default=1.0, ge=1, le=100, description="on the compute time of such a device")


class Pauses(Spec):
    """Rare stops of one device (garbage collection, data, retries): exponential, of ``mean_s``."""

    probability: Share = Field(default=0.0, description="of a device in a step")
    mean_s: Finite = 0.0


class Failures(Spec):
    """Failures that lose the work since the last checkpoint. ``None`` = never."""

    device_mtbf_s: Positive | None = Field(default=None, description="mean time between failures of one device")
    node_mtbf_s: Positive | None = Field(default=None, description="of one node, its devices' own failures not counted")
    restart_s: Finite = Field(default=0.0, description="from failure until training goes on: detection, restart, loading")


class Checkpoints(Spec):
    """``save_s``: how long training stands still for one checkpoint."""

    save_s: Finite = 0.0
    interval_s: Positive | None = Field(default=None, description="useful work between two checkpoints; None: the best one")


class Spot(Spec):
    """Capacity that may be taken away. With ``notice_s`` of at least the checkpoint's ``save_s`` no work is lost."""

    revocations_per_hour: Finite = Field(default=0.0, description="of one node")
    notice_s: Finite = 0.0
    replacement_s: Finite = Field(default=0.0, description="until another node trains in its place, restart included")
    price_usd_per_hour: Finite | None = Field(default=None, description="of one node; None: the on-demand price")


class StragglerModel(Document):
    """Speeds and failures of a cluster. Factors multiply compute times: 1 = nominal, 1.25 = a device at 0.8 x its speed.

    ``slowdown`` of the cluster document still counts; where a device is named in both, the factors multiply.
    """

    kind: ClassVar[str] = "straggler model"
    name: str = ""
    slowdown: dict[int, float] = Field(default={}, description="device (global rank) -> factor >= 1, chronic")
    node_slowdown: dict[int, float] = Field(default={}, description="node -> factor >= 1 on all its devices, chronic")
    position_slowdown: dict[int, float] = Field(
        default={}, description="index of a device in its node -> factor >= 1 (those in the warm air of others)"
    )
    device_jitter: Jitter = Jitter()
    intra_link_jitter: Jitter = Field(default=Jitter(), description="of one device's link inside its node")
    inter_link_jitter: Jitter = Field(default=Jitter(), description="of one node's uplink")
    slow_fleet: SlowFleet = SlowFleet()
    slow_nodes: SlowNodes = SlowNodes()
    pauses: Pauses = Pauses()
    failures: Failures = Failures()
    checkpoints: Checkpoints = Checkpoints()
    spot: Spot | None = None
    node_price_usd_per_hour: Finite | None = Field(default=None, description="on demand; None: as the cluster document says")
    provenance: dict[str, str] = Field(default={}, description="field -> where its numbers come from")

    @model_validator(mode="after")
    def _factors(self) -> StragglerModel:
        broken = []
        for field in ("slowdown", "node_slowdown", "position_slowdown"):
            for index, factor in getattr(self, field).items():
                if index < 0:
                    broken.append(
                        InvalidInputValue(
                            "negative_index", f"{field} names index {index}", actual=index, allowed=">= 0", nearest=0,
                            loc=(field, index),
                        )
                    )  # fmt: skip
                if not 1 <= factor <= 100:
                    broken.append(
                        InvalidInputValue(
                            "slowdown_out_of_bounds", f"factor {factor:g} of {field} {index}", actual=factor, allowed="1 to 100",
                            nearest=1.0, loc=(field, index),
                        )
                    )  # fmt: skip
        InvalidInputValues.raise_any(broken)
        return self

    def check(self, cluster: ClusterSpec) -> None:
        """Raise :class:`InvalidInput` with every device, node or position that the resolved cluster does not have."""
        places = cluster.device_table()
        nodes = sum(group.count for group in cluster.nodes)
        widest = max(place.local for place in places) + 1
        found = []
        for field, count in (("slowdown", len(places)), ("node_slowdown", nodes), ("position_slowdown", widest)):
            for index in sorted(getattr(self, field)):
                if index >= count:
                    message = f"{field} names {index}, but cluster '{cluster.name}' has {count}"
                    found.append(
                        Violation(
                            code="no_such_index", message=message, loc=(field, index), actual=index, allowed=f"0 to {count - 1}",
                            nearest=count - 1,
                        )
                    )  # fmt: skip
        if found:
            raise InvalidInput(found, subject=self.kind)


class StepDistribution(Spec):
    """The step time over the simulated steps, seconds."""

    steps: int
    seed: int
    mean_s: float
    std_s: float
    min_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


class Goodput(Spec):
    """What is left of the time after checkpoints, failures and revocations. ``availability``: useful over wall-clock time.

    ``goodput``: ``availability`` times nominal over mean step time, the share of the nominal throughput that remains.
    """

    job_mtbf_s: float | None = Field(description="between events that lose work; None: there are none")
    checkpoint_interval_s: float | None = Field(description="useful work between two checkpoints; None: no checkpoints needed")
    interval_is_best: bool = True
    interval_steps: int | None = None
    availability: float
    goodput: float
    tokens_per_s: float
    young_interval_s: float | None = Field(default=None, description="sqrt(2 save_s MTBF), Young 1974")
    daly_interval_s: float | None = Field(default=None, description="Daly 2006, eq. 37")
    cost_usd_per_hour: float | None = None
    cost_usd_per_million_tokens: float | None = None


class WhatIf(Spec):
    """One change of the cluster and the step that the simulator finds for it."""

    change: str = Field(description="as it was asked")
    meaning: str = Field(description="what changed in the cluster")
    step_time_s: float
    ratio: float = Field(description="to the step without the change")
    waterfall: dict[str, float] = {}


class Robustness(Document):
    """How a plan's step and throughput hold up on devices that jitter, straggle and fail."""

    kind: ClassVar[str] = "robustness"
    plan_hash: str = ""
    nominal_step_s: float = Field(description="every device at its nominal speed")
    distribution: StepDistribution | None = None
    alone_s: dict[str, float] = Field(default={}, description="seconds that each source alone adds to the mean step")
    on_demand: Goodput | None = None
    spot: Goodput | None = None
    what_if: tuple[WhatIf, ...] = ()
    folded: str = Field(default="", description="which devices move in step and how many replicas were compared")
    assumptions: tuple[str, ...] = ()


class Timings(Document):
    """Per-rank timings of a run, step by step. ``seconds``: exclusive seconds, steps x ranks x ``phases``; ranks are numbered as
    the devices that the plan uses, smallest first."""

    kind: ClassVar[str] = "timings"
    phases: tuple[str, ...] = Field(min_length=1, description="names of specs.terms, or others that 'kinds' explains")
    kinds: dict[str, Literal["compute", "data", "comm", "wait"]] = Field(default={}, description="of phases with other names")
    seconds: tuple[tuple[tuple[Finite, ...], ...], ...]
    work: tuple[tuple[Finite, ...], ...] | None = Field(
        default=None, description="tokens or FLOP of each rank, steps x ranks, where the ranks' loads differ"
    )

    @model_validator(mode="after")
    def _even(self) -> Timings:
        broken = []
        widths = {len(rank) for step in self.seconds for rank in step}
        if widths - {len(self.phases)}:
            message = f"ranks have {sorted(widths)} times a step, for {len(self.phases)} phases"
            broken.append(InvalidInputValue("uneven_timings", message, allowed=len(self.phases), loc=("seconds",)))
        ranks = {len(step) for step in self.seconds}
        if len(ranks) > 1:
            message = f"steps have {sorted(ranks)} ranks"
            broken.append(InvalidInputValue("uneven_timings", message, allowed="the same ranks in every step", loc=("seconds",)))
        if self.work is not None and [len(step) for step in self.work] != [len(step) for step in self.seconds]:
            message = "work is not given for each step and rank"
            broken.append(InvalidInputValue("uneven_timings", message, loc=("work",)))
        unknown = sorted(set(self.kinds) - set(self.phases))
        if unknown:
            message = f"kinds name {', '.join(unknown)}, which is no phase"
            broken.append(InvalidInputValue("unknown_phase", message, allowed=list(self.phases), loc=("kinds",)))
        InvalidInputValues.raise_any(broken)
        return self


class PhaseSpread(Spec):
    """One phase over the ranks, each rank by its median over the steps."""

    phase: str
    min_s: float
    median_s: float
    max_s: float
    worst_ranks: tuple[int, ...]


class RankRate(Spec):
    """How much longer a rank takes than its peers, with an 80 % interval. 1 = as long as its peers."""

    rank: int
    phase: str
    factor: float
    low: float
    high: float


class Finding(Spec):
    """A deviation. ``kind``: slow_compute | slow_link | data_stall last; one_off came once and went."""

    kind: Literal["slow_compute", "slow_link", "data_stall", "one_off"]
    phase: str
    ranks: tuple[int, ...] = Field(description="the rank, or the members of the group whose link is slow; empty: all ranks")
    since_step: int = Field(description="estimated step of the change")
    found_step: int
    until_step: int | None = Field(default=None, description="when it was over; None: it lasts")
    factor: float = Field(description="on the phase's time; of a data stall: step time over step time without it")
    low: float = Field(description="of the 80 % interval of the factor")
    high: float

    @property
    def delay_steps(self) -> int:
        """Steps from the change to its detection."""
        return self.found_step - self.since_step

    def text(self) -> str:
        """The finding in a line."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {', '.join(map(str, self.ranks))}"
        who = who if self.ranks else "all ranks"
        until = "" if self.until_step is None else f" until step {self.until_step}"
        factor = f"{self.factor:.2f} ({self.low:.2f} to {self.high:.2f})"
        return (
            f"{self.kind.replace('_', ' ')}: {who}, phase {self.phase}, factor {factor}, "
            f"from step {self.since_step}{until}, found at step {self.found_step}"
        )


class Diagnosis(Document):
    """Who is slow, in which phase, by how much, and since when."""

    kind: ClassVar[str] = "diagnosis"
    steps: int
    findings: tuple[Finding, ...] = ()
    one_offs: tuple[Finding, ...] = ()
    rates: tuple[RankRate, ...] = Field(default=(), description="of every rank and compute phase, at the last step")
    phases: tuple[PhaseSpread, ...] = ()
    load_drift: float | None = Field(
        default=None, description="max over mean of the ranks' work, last quarter over first; no fault of a device"
    )

    def slowdown(self) -> dict[int, float]:
        """Compute factors of the ranks found slow and still so, for the ``slowdown`` of a straggler model."""
        found: dict[int, float] = {}
        for item in self.findings:
            if item.kind == "slow_compute" and item.until_step is None:
                found[item.ranks[0]] = max(found.get(item.ranks[0], 1.0), item.factor)
        return found
