"""What is assumed of devices that nobody measured, and how wrong that is: each measured device predicted from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from profiler.fit.families import family_of, watts_per_flop
from profiler.fit.gemm import ProductFit, large_enough, predict
from profiler.fit.records import Efficiencies, Error, Fit, Priors
from profiler.fit.samples import choose, error_of
from profiler.fit.tables import device_type
from profiler.fit.transfer import SIXTEEN_BIT, median_fit, published_flop_per_s, transferred

Item = TypeVar("Item")

# Efficiency of an unmeasured sibling scales with (watts per FLOP)^this. Chosen on the leave-one-out errors among 0, 1/4 and 1/2;
# across unlike families power per FLOP says nothing (0 is best there).
WATTS_EXPONENT = {"family": 0.25, "general": 0.0}
# The form of an unmeasured device: tiles of another chip mislead (a new generation by 20 to 28 %), the smooth form does not.
PRIOR_FORM = "smooth"
_CHECKED_POINTS = 3000


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors of predicting one device's large products without its own data. ``None`` = no such prediction possible."""

    device: str
    dtype: str
    as_used: Error | None
    specs_only: Error | None
    published: Error | None
    family_unknown: Error | None


def product_prior(fits: Sequence[ProductFit]) -> Fit:
    """Median of the smooth forms of several devices."""
    tagged = [fit.fit.replace(watts_per_flop=watts_per_flop(device_type(fit.table.device))) for fit in fits]
    parameters = [fit.parameters[PRIOR_FORM] for fit in fits]
    return median_fit(tagged, PRIOR_FORM, parameters, [fit.table.device for fit in fits])


def leave_one_out(fits: Sequence[ProductFit], seed: int = 0) -> list[LeftOut]:
    """Every device of ``fits`` (one dtype class) from the others."""
    return [_left_out(fit, [other for other in fits if other.table.device != fit.table.device], seed) for fit in fits]


def _left_out(fit: ProductFit, others: Sequence[ProductFit], seed: int) -> LeftOut:
    device, table = device_type(fit.table.device), fit.table
    rows = choose(np.flatnonzero(large_enough(table.shape)), _CHECKED_POINTS, np.random.default_rng(seed))
    shape, measured = table.shape.take(rows), table.time_s[rows]
    family = [other for other in others if family_of(device_type(other.table.device)) == family_of(device)]
    strangers = [other for other in others if _architecture(other.table.device) != _architecture(table.device)]

    def error(group: Sequence[ProductFit], scope: str, method: str, *, published: bool) -> Error | None:
        if not group:
            return None
        moved = transferred(product_prior(group), device, table.dtype, fit.chip, WATTS_EXPONENT[scope], published=published)
        return error_of(predict(moved, shape, fit.chip), measured, method)

    group, scope = (family, "family") if family else (others, "general")
    known = published_flop_per_s(device, table.dtype) is not None
    return LeftOut(
        table.device, table.dtype,
        as_used=error(group, scope, "left out; as an unmeasured device of the catalogue", published=True),
        specs_only=error(group, scope, "left out; specs alone", published=False),
        published=error(group, scope, "left out; one published matmul rate", published=True) if known else None,
        family_unknown=error(strangers, "general", "left out with its whole architecture; specs alone", published=False),
    )  # fmt: skip


def _architecture(device: str) -> str:
    return family_of(device_type(device)).split("_")[0]


def summary(errors: Iterable[Error | None], method: str) -> Error | None:
    """Median over devices of their median and mean errors."""
    found = [error for error in errors if error is not None]
    if not found:
        return None
    medians, means = [error.median_ape for error in found], [error.mape for error in found]
    return Error(
        method=f"{method}; median of {len(found)} devices", points=sum(error.points for error in found),
        median_ape=float(f"{np.median(medians):.4g}"), mape=float(f"{np.median(means):.4g}"),
    )  # fmt: skip


def build_priors(
    products: Sequence[ProductFit],
    devices: Mapping[str, Efficiencies],
    left_out: Sequence[LeftOut],
    assumed: Mapping[str, Mapping[str, Fit]],
    laboratory_spread: float,
) -> Priors:
    """Priors per family and over all; ``assumed`` memory-bound figures stand where nothing was measured."""
    families = sorted({item.family for item in devices.values() if item.family})
    general = _of_group("general", list(devices.values()), products, [item.family_unknown for item in left_out])
    memory_bound = {name: {**dict(assumed[name]), **general.memory_bound.get(name, {})} for name in assumed}
    found = {}
    for family in families:
        members = [item for item in devices.values() if item.family == family]
        names = {item.name for item in members}
        mine = [fit for fit in products if fit.table.device in names]
        errors = [item.as_used for item in left_out if item.device in names]
        found[family] = _of_group(family, members, mine, errors)
    return Priors(
        general=general.replace(memory_bound=memory_bound), families=found, watts_exponent=WATTS_EXPONENT,
        laboratory_spread=laboratory_spread,
    )  # fmt: skip


def _of_group(
    name: str, members: Sequence[Efficiencies], products: Sequence[ProductFit], errors: Sequence[Error | None]
) -> Efficiencies:
    by_class: dict[str, list[ProductFit]] = {}
    for fit in products:
        by_class.setdefault("bfloat16" if fit.table.dtype in SIXTEEN_BIT else fit.table.dtype, []).append(fit)
    gemm = {dtype: product_prior(fits) for dtype, fits in sorted(by_class.items())}
    if "bfloat16" in gemm:
        gemm["bfloat16"] = gemm["bfloat16"].replace(error=summary(errors, "left out"))
    floors = [item.kernel_floor_s for item in members if item.kernel_floor_s is not None]
    grouped = _medians([(item.name, item.grouped_gemm) for item in members if item.grouped_gemm is not None])
    return Efficiencies(
        name=name, family=name, members=tuple(sorted(item.name for item in members)), gemm=gemm, grouped_gemm=grouped,
        attention=_attention(members), attention_backend=_common_backend(members), memory_bound=_memory_bound(members),
        kernel_floor_s=float(np.median(floors)) if floors else None,
    )  # fmt: skip


def _medians(named: Sequence[tuple[str, Fit]], *, leave_out: Callable[[Fit, Fit], float] | None = None) -> Fit | None:
    """Median of each parameter over fits of one form; its error is how far each member is from the median of the others."""
    if not named:
        return None
    fits = [fit for _, fit in named]
    keys = list(fits[0].parameters)
    values = {key: float(f"{np.median([fit.parameters[key] for fit in fits]):.5g}") for key in keys}
    error = None
    if leave_out is not None and len(fits) >= 2:
        apart = []
        for index, fit in enumerate(fits):
            others = {key: float(np.median([o.parameters[key] for j, o in enumerate(fits) if j != index])) for key in keys}
            apart.append(leave_out(fit.replace(parameters=others), fit))
        error = Error(method=f"left out; {len(fits)} devices", points=len(fits), median_ape=float(f"{np.median(apart):.4g}"),
                      mape=float(f"{np.mean(apart):.4g}"))  # fmt: skip
    names = ", ".join(sorted(name for name, _ in named))
    return Fit(
        form=fits[0].form, parameters=values, provenance="assumed", source=f"median of the fits of {names}",
        points=sum(fit.points for fit in fits), error=error,
    )  # fmt: skip


def _by_efficiency(predicted: Fit, own: Fit) -> float:
    """Relative time error of large calls: the ratio of efficiencies."""
    return abs(own.parameters["efficiency"] / predicted.parameters["efficiency"] - 1)


def _memory_bound(members: Sequence[Efficiencies]) -> dict[str, dict[str, Fit]]:
    found: dict[str, dict[str, Fit]] = {}
    for name, phase in sorted(
        {(name, phase) for item in members for name, passes in item.memory_bound.items() for phase in passes}
    ):
        fits = [(item.name, item.memory_bound[name][phase]) for item in members if phase in item.memory_bound.get(name, {})]
        median = _medians(fits, leave_out=_by_efficiency)
        if median is not None:
            found.setdefault(name, {})[phase] = median
    return found


def _attention(members: Sequence[Efficiencies]) -> dict[str, dict[str, dict[int, Fit]]]:
    """By backend; ``any`` is what each member uses itself."""
    found: dict[str, dict[str, dict[int, Fit]]] = {}
    for backend in ("cudnn", "flash", "any"):
        gathered: dict[tuple[str, int], list[tuple[str, Fit]]] = {}
        for item in members:
            chosen = item.attention_backend if backend == "any" else backend
            for phase, sizes in item.attention.get(chosen, {}).items():
                for head_dim, fit in sizes.items():
                    gathered.setdefault((phase, head_dim), []).append((item.name, fit))
        for (phase, head_dim), fits in sorted(gathered.items()):
            median = _medians(fits, leave_out=_by_efficiency)
            if median is not None:
                found.setdefault(backend, {}).setdefault(phase, {})[head_dim] = median
    return found


def _common_backend(members: Sequence[Efficiencies]) -> str:
    return "any" if any(item.attention_backend for item in members) else ""
