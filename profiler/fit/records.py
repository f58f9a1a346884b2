"""The files of ``traces/efficiency``: fitted parameters with their source and the error that they showed on unseen data."""

from __future__ import annotations

from pydantic import Field

from specs.base import Spec


class Error(Spec):
    """Error on data that the fit did not see. APE = \\|predicted / measured - 1\\|, as a fraction."""

    method: str
    points: int
    median_ape: float
    mape: float


class Fit(Spec):
    """One fitted (or borrowed) form."""

    form: str = Field(description="tile | smooth | attention | stream | scale: see profiler.fit.forms")
    parameters: dict[str, float]
    provenance: str = Field(default="fitted", description="fitted | assumed")
    source: str = ""
    points: int = Field(default=0, description="measurements used")
    error: Error | None = None
    all_shapes: Error | None = Field(default=None, description="the same over all shapes, tiny ones included")
    watts_per_flop: float | None = Field(
        default=None, description="of the devices behind it: median power limit over peak [J/FLOP]"
    )


class Efficiencies(Spec):
    """All fits of one device, or of the devices of one family."""

    name: str
    family: str = ""
    members: tuple[str, ...] = Field(default=(), description="of a family: the devices behind it")
    gemm: dict[str, Fit] = Field(default={}, description="by dtype")
    backward: dict[str, float] = Field(default={}, description="by dtype: time of a backward product over the forward form's")
    grouped_gemm: Fit | None = None
    attention: dict[str, dict[str, dict[int, Fit]]] = Field(default={}, description="backend, pass, head dim")
    attention_backend: str = Field(default="", description="the one that is used")
    memory_bound: dict[str, dict[str, Fit]] = Field(default={}, description="op class, pass")
    kernel_floor_s: float | None = Field(default=None, description="shortest kernel in a graph, launch not counted")
    software: dict[str, str] = {}


class Priors(Spec):
    """What is assumed of devices that nobody measured."""

    general: Efficiencies
    families: dict[str, Efficiencies] = {}
    watts_exponent: dict[str, float] = Field(
        default={}, description="family | general: efficiency scales with (watts per FLOP) to this power"
    )
    laboratory_spread: float = Field(default=0.0, description="median error of one laboratory's fit on another laboratory's data")
