"""From measured devices to one that nobody measured: medians of parameters, scaled by what its specs and one published rate say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler.fit.families import watts_per_flop
from profiler.fit.forms import SPACES, Chip, product_time_s, products
from profiler.fit.records import Fit
from specs.cluster import DeviceType

# Sustained rate (median over products above 0.5 TFLOP) over the best shape's: median of nine GPUs of the aiconfigurator tables.
SUSTAINED_OF_BEST = 0.89
# Bounds of the power correction: efficiency never moves further than this from the measured devices'.
POWER_RANGE = (0.55, 1.15)
_HIGHEST_EFFICIENCY = 1.0
_REFERENCE_SIZE = 8192.0
SIXTEEN_BIT = ("bfloat16", "float16")


def same_rate(dtype: str) -> tuple[str, ...]:
    """dtypes that run on the same units at the same rate."""
    return SIXTEEN_BIT if dtype in SIXTEEN_BIT else (dtype,)


def published_flop_per_s(device: DeviceType, dtype: str) -> float | None:
    """Sustained matmul rate from a published measurement of the device itself, at most the peak."""
    for name in same_rate(dtype):
        rate = device.matmul_flop_per_s.get(name)
        if rate is not None:
            source = device.provenance.get("matmul_flop_per_s", "")
            sustained = rate if "sustained" in source else SUSTAINED_OF_BEST * rate
            return min(sustained, device.peak_flop_per_s.get(name, sustained))
    return None


def sustained_efficiency(form: str, parameters: dict[str, float], chip: Chip) -> float:
    """Share of the peak at a product of 8192 x 8192 x 8192."""
    shape = products(_REFERENCE_SIZE, _REFERENCE_SIZE, _REFERENCE_SIZE)
    return float(shape.flop[0] / product_time_s(form, SPACES[form].values(parameters), shape, chip)[0] / chip.flop_per_s)


def median_fit(fits: Sequence[Fit], form: str, parameters: Sequence[dict[str, float]], names: Sequence[str]) -> Fit:
    """Median of each parameter; the power limit per FLOP is the members' median too."""
    space = SPACES[form]
    values = np.median([space.values(item) for item in parameters], axis=0)
    watts = [fit.watts_per_flop for fit in fits if fit.watts_per_flop]
    return Fit(
        form=form, parameters=space.named(values), provenance="assumed", source=f"median of the fits of {', '.join(sorted(names))}",
        points=sum(fit.points for fit in fits), watts_per_flop=float(np.median(watts)) if watts else None,
    )  # fmt: skip


def transferred(fit: Fit, device: DeviceType, dtype: str, chip: Chip, exponent: float, *, published: bool = True) -> Fit:
    """A product fit of other devices for ``device``: one published rate where known, else corrected by its power per FLOP."""
    parameters = dict(fit.parameters)
    rate = published_flop_per_s(device, dtype) if published else None
    if rate is not None:
        factor = rate / chip.flop_per_s / sustained_efficiency(fit.form, parameters, chip)
    else:
        factor = power_factor(fit, device, exponent)
    parameters["compute_efficiency"] = min(parameters["compute_efficiency"] * factor, _HIGHEST_EFFICIENCY)
    return fit.replace(parameters=parameters)


def power_factor(fit: Fit, device: DeviceType, exponent: float) -> float:
    """How much more of its peak a chip keeps up than the measured ones, from watts per FLOP."""
    watts = watts_per_flop(device)
    if watts is None or fit.watts_per_flop is None:
        return 1.0
    return float(np.clip((watts / fit.watts_per_flop) ** exponent, *POWER_RANGE))


def scaled(dense: Fit, compute: float, bandwidth: float) -> dict[str, float]:
    """Parameters of a dense product's form with its compute and bandwidth efficiency scaled; memory never runs above its peak."""
    return {
        **dense.parameters,
        "compute_efficiency": dense.parameters["compute_efficiency"] * compute,
        "bandwidth_efficiency": min(dense.parameters["bandwidth_efficiency"] * bandwidth, 1.0),
    }
