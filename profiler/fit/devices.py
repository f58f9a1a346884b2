"""All fits of each measured device, put together from the tables of every op class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from profiler.fit.attention import PREFERENCE, AttentionTable, attention_prior, attention_tables, fit_attention, representative
from profiler.fit.families import family_of, watts_per_flop
from profiler.fit.gemm import GRAPH_FLOOR_S, ProductFit, backward_factor, fit_products, priors_from
from profiler.fit.grouped import fit_grouped, mixture_tables
from profiler.fit.memory_bound import fit_stream, streams
from profiler.fit.records import Efficiencies, Fit
from profiler.fit.tables import ProductTable, device_type, product_tables
from profiler.fit.tables_layers import layer_product_tables
from profiler.fit.transfer import same_rate

Report = Callable[[str], None]
AttentionKey = tuple[str, str, str, int]  # device, backend, pass, head size

_TINY_FLOP = 1e6
_MANY_ATTENTION_POINTS = 100
_TYPICAL_LENGTH = 8192.0


@dataclass(slots=True)
class Fits:
    """Everything fitted on the public tables, before it is split into files."""

    products: list[ProductFit] = field(default_factory=list)
    checks: list[tuple[ProductFit, ProductTable]] = field(default_factory=list)
    backward: dict[tuple[str, str], float] = field(default_factory=dict)
    attention: dict[AttentionKey, Fit] = field(default_factory=dict)
    attention_tables: dict[AttentionKey, AttentionTable] = field(default_factory=dict)
    builds: dict[AttentionKey, float] = field(default_factory=dict)
    grouped: dict[str, Fit] = field(default_factory=dict)
    memory_bound: dict[tuple[str, str, str], Fit] = field(default_factory=dict)


def fit_tables(data: Path, seed: int, report: Report) -> Fits:
    """Fits of every table under ``data``."""
    fits = Fits()
    _fit_products(fits, [*product_tables(data), *layer_product_tables(data)], seed, report)
    report("attention")
    _fit_attention(fits, attention_tables(data), seed)
    dense = {fit.table.device: fit.fit for fit in fits.products if fit.table.dtype == "bfloat16"}
    for mixture in mixture_tables(data):
        report(f"mixture layers {mixture.device}")
        if mixture.device in dense and (grouped := fit_grouped(mixture, dense[mixture.device], seed)) is not None:
            fits.grouped[mixture.device] = grouped
    report("memory-bound ops")
    for (device, name, phase), stream in streams(data).items():
        fits.memory_bound[(device, name, phase)] = fit_stream(device, stream, GRAPH_FLOOR_S, seed)
    return fits


def _fit_products(fits: Fits, tables: Sequence[ProductTable], seed: int, report: Report) -> None:
    """One fit per device and rate: of the first laboratory in reading order; the others check it."""
    forward = [table for table in tables if not table.backward]
    first: dict[tuple[str, str], ProductTable] = {}
    for table in forward:
        first.setdefault((table.device, same_rate(table.dtype)[0]), table)
    # scarce tables need a prior from the rich ones, so those come first
    chosen = sorted(first.values(), key=lambda table: table.eager)
    for table in chosen:
        report(f"products {table.device} {table.dtype} ({len(table)} points, {table.laboratory})")
        rich = [fit for fit in fits.products if fit.table.dtype == "bfloat16" and not fit.table.eager]
        found = fit_products(table, priors_from(rich), seed)
        if found is not None:
            watts = watts_per_flop(device_type(table.device))
            named = found.fit.replace(watts_per_flop=watts)
            fits.products.append(ProductFit(found.table, found.chip, named, found.unseen, found.parameters))
    by_key = {(fit.table.device, same_rate(fit.table.dtype)[0]): fit for fit in fits.products}
    for table in tables:
        fit = by_key.get((table.device, same_rate(table.dtype)[0]))
        if fit is not None and table.backward:
            fits.backward[(table.device, table.dtype)] = backward_factor(fit, table)
        elif fit is not None and table.laboratory != fit.table.laboratory:
            fits.checks.append((fit, table))


def _fit_attention(fits: Fits, tables: Iterable[AttentionTable], seed: int) -> None:
    """Of each backend the representative build; scarce training tables lean on the rich inference ones."""
    builds: dict[AttentionKey, list[tuple[AttentionTable, Fit]]] = defaultdict(list)
    scarce = []
    for table in tables:
        key = (table.device, table.backend, table.phase, table.head_dim)
        if len(table.time_s) < _MANY_ATTENTION_POINTS:
            scarce.append((key, table))
        elif (fit := fit_attention(table, None, seed)) is not None:
            builds[key].append((table, fit))
    for key, found in sorted(builds.items()):
        fits.attention[key], fits.builds[key] = representative(found)
        fits.attention_tables[key] = next(table for table, fit in found if fit is fits.attention[key])
    prior = attention_prior([fit for key, fit in fits.attention.items() if key[1] in ("flash", "flashinfer")])
    for key, table in scarce:
        if (fit := fit_attention(table, prior, seed)) is not None:
            fits.attention[key], fits.attention_tables[key] = fit, table


def assemble(fits: Fits, software: dict[str, str]) -> dict[str, Efficiencies]:
    """One record per device."""
    names = {fit.table.device for fit in fits.products} | set(fits.grouped)
    names |= {table.device for table in fits.attention_tables.values()} | {device for device, _, _ in fits.memory_bound}
    devices = {name: _assembled(name, fits, software) for name in sorted(names)}
    ratio = backward_ratio(devices)
    for name, device in devices.items():
        attention = {**device.attention, **_borrowed_training(device, devices)}
        backend = next((item for item in PREFERENCE if item in attention), "")
        attention = {item: _with_backward(phases, ratio) for item, phases in attention.items()}
        devices[name] = device.replace(attention=attention, attention_backend=backend)
    return devices


def _assembled(name: str, fits: Fits, software: dict[str, str]) -> Efficiencies:
    attention: dict[str, dict[str, dict[int, Fit]]] = {}
    for (device, backend, phase, head_dim), fit in sorted(fits.attention.items()):
        if device == name:
            attention.setdefault(backend, {}).setdefault(phase, {})[head_dim] = fit
    memory_bound: dict[str, dict[str, Fit]] = {}
    for (device, op_class, phase), fit in sorted(fits.memory_bound.items()):
        if device == name:
            memory_bound.setdefault(op_class, {})[phase] = fit
    mine = [fit for fit in fits.products if fit.table.device == name]
    return Efficiencies(
        name=name, family=family_of(device_type(name)), gemm={fit.table.dtype: fit.fit for fit in mine},
        backward={dtype: factor for (device, dtype), factor in fits.backward.items() if device == name},
        grouped_gemm=fits.grouped.get(name), attention=attention, memory_bound=memory_bound,
        kernel_floor_s=_kernel_floor(mine), software=software,
    )  # fmt: skip


def _kernel_floor(fits: Sequence[ProductFit]) -> float | None:
    """Median time of products too small to cost anything but the kernel itself, from tables without launches."""
    for fit in fits:
        tiny = fit.table.shape.flop < _TINY_FLOP
        if not fit.table.eager and fit.table.dtype == "bfloat16" and tiny.any():
            return float(f"{np.median(fit.table.time_s[tiny]):.3g}")
    return None


def large_call_efficiency(fit: Fit) -> float:
    """Share of the peak that the form gives to a long sequence on a full chip."""
    return fit.parameters["efficiency"] / (1 + fit.parameters["half_length"] / _TYPICAL_LENGTH)


def backward_ratio(devices: dict[str, Efficiencies]) -> tuple[float, list[str]]:
    """Efficiency of attention's backward over its forward's where one library measured both, and on which devices."""
    ratios, names = [], []
    for name, device in devices.items():
        phases = device.attention.get("cudnn", {})
        for head_dim in sorted(set(phases.get("forward", {})) & set(phases.get("backward", {}))):
            ratios.append(large_call_efficiency(phases["backward"][head_dim]) / large_call_efficiency(phases["forward"][head_dim]))
            names.append(name)
    # without any: FlashAttention-2's published figures on A100 (arXiv 2307.08691, figures 4 and 5: about 0.8)
    return (float(np.median(ratios)), sorted(set(names))) if ratios else (0.8, [])


def _with_backward(phases: dict[str, dict[int, Fit]], ratio: tuple[float, list[str]]) -> dict[str, dict[int, Fit]]:
    """Backward of each head size that was measured forward only: the same form at the ratio's efficiency."""
    forward, backward = phases.get("forward", {}), phases.get("backward", {})
    share, names = ratio
    source = f"forward, at {share:.2f} of its efficiency as on {', '.join(names) or 'A100 (arXiv 2307.08691)'}"
    added = {}
    for head_dim, fit in forward.items():
        if head_dim not in backward:
            parameters = {**fit.parameters, "efficiency": float(f"{fit.parameters['efficiency'] * share:.5g}")}
            added[head_dim] = Fit(
                form=fit.form, parameters=parameters, provenance="assumed", source=source, points=0, error=fit.error
            )
    return {**phases, "backward": {**backward, **added}} if forward else phases


def _borrowed_training(device: Efficiencies, devices: dict[str, Efficiencies]) -> dict[str, dict[str, dict[int, Fit]]]:
    """Training attention of a sibling, for a device where only inference kernels were measured: scaled by those kernels."""
    if not device.family or "cudnn" in device.attention or not device.attention:
        return {}
    siblings = [item for item in devices.values() if item.family == device.family and "cudnn" in item.attention]
    found: dict[str, dict[int, Fit]] = {}
    for phase in ("forward", "backward"):
        for head_dim in sorted({dim for item in siblings for dim in item.attention["cudnn"].get(phase, {})}):
            scaled = [fit for item in siblings if (fit := _scaled(device, item, phase, head_dim)) is not None]
            if scaled:
                names = ", ".join(sorted(item.name for item in siblings))
                values = {key: float(f"{np.median([fit.parameters[key] for fit in scaled]):.5g}") for key in scaled[0].parameters}
                source = f"cuDNN on {names}, scaled by what inference kernels reach here and there"
                fit = Fit(form="attention", parameters=values, provenance="assumed", source=source, error=scaled[0].error)
                found.setdefault(phase, {})[head_dim] = fit
    return {"cudnn": found} if found else {}


def _scaled(device: Efficiencies, sibling: Efficiencies, phase: str, head_dim: int) -> Fit | None:
    training = sibling.attention["cudnn"].get(phase, {}).get(head_dim)
    for backend in ("flash", "flashinfer", "trtllm"):
        here = device.attention.get(backend, {}).get("forward", {}).get(head_dim)
        there = sibling.attention.get(backend, {}).get("forward", {}).get(head_dim)
        if training is not None and here is not None and there is not None:
            factor = large_call_efficiency(here) / large_call_efficiency(there)
            efficiency = min(training.parameters["efficiency"] * factor, 0.95)
            return training.replace(parameters={**training.parameters, "efficiency": efficiency})
    return None
