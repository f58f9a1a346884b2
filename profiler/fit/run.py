"""From tables to files: fits, priors, errors, and what ``python -m profiler.fit`` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from profiler.fit.attention import PREFERENCE, error_on
from profiler.fit.devices import Fits, Report, assemble, fit_tables
from profiler.fit.families import family_of
from profiler.fit.forms import products
from profiler.fit.gemm import ProductFit, elsewhere
from profiler.fit.prior import LeftOut, build_priors, leave_one_out, summary
from profiler.fit.records import Efficiencies, Error, Fit, Priors
from profiler.fit.tables import device_type
from profiler.fit.transfer import SIXTEEN_BIT
from specs.errors import InvalidInput

TARGETS = {"gemm_median_ape": 0.06, "attention_median_ape": 0.08, "left_out_gemm_median_ape": 0.12}
_LAYER_TOKENS = (1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
_LAYER_HIDDEN = (2048.0, 2560.0, 3072.0, 4096.0)


@dataclass(frozen=True, slots=True)
class Result:
    """What goes into ``traces/efficiency``."""

    devices: dict[str, Efficiencies]
    priors: Priors
    errors: dict[str, Any]


def assumed_memory_bound() -> dict[str, dict[str, Fit]]:
    """The stated figures of ``defaults.json`` for memory-bound classes, as fits."""
    text = resources.files("traces").joinpath("efficiency/defaults.json").read_text()
    found = {}
    for name, values in json.loads(text)["memory_bound"].items():
        found[name] = {
            phase: Fit(
                form="stream", parameters={"efficiency": values[phase], "floor_s": values["floor_s"]}, provenance="assumed",
                source="stated default",
            )
            for phase in ("forward", "backward")
        }  # fmt: skip
    return found


def fit_everything(data: Path, seed: int = 0, report: Report = lambda text: None) -> Result:
    """Fits, priors and errors from the tables under ``data``; raises :class:`InvalidInput` when there are none."""
    if not data.is_dir():
        raise InvalidInput.single("no_data_folder", f"{data} is not a folder", subject="fit")
    fits = fit_tables(data, seed, report)
    if not fits.products and not fits.attention and not fits.memory_bound:
        raise InvalidInput.single(
            "no_tables",
            f"no measurement table found under {data}; expected folders such as aiconfigurator/ and neusight/",
            subject="fit",
        )
    software = {name: metadata.version(name) for name in ("meshwright", "numpy", "pandas")} | {"seed": str(seed)}
    devices = assemble(fits, software)
    report("leave one device out")
    sixteen_bit = [fit for fit in fits.products if fit.table.dtype in SIXTEEN_BIT]
    left_out = leave_one_out(sixteen_bit, seed) if len(sixteen_bit) > 1 else []
    others = [_elsewhere_row(fit, table) for fit, table in fits.checks]
    spread = [row["median_ape"] for row in others if row["median_ape"] is not None]
    priors = build_priors(
        fits.products, devices, left_out, assumed_memory_bound(), float(f"{np.median(spread):.3g}") if spread else 0.0
    )
    return Result(devices, priors, _errors(fits, devices, left_out, others))


def write(result: Result, out: Path) -> list[Path]:
    """One file per device, ``prior.json`` and ``errors.json``; files of devices no longer fitted are left alone."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    documents: dict[str, Any] = {f"{name}.json": _plain(item) for name, item in result.devices.items()}
    documents |= {"prior.json": _plain(result.priors), "errors.json": result.errors}
    for name, document in documents.items():
        path = out / name
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(path)
        written.append(path)
    return written


def _plain(item: Efficiencies | Priors) -> dict[str, Any]:
    plain: dict[str, Any] = item.model_dump(mode="json", exclude_defaults=True)
    return plain


def _error(error: Error | None, prefix: str = "") -> dict[str, Any]:
    if error is None:
        return {f"{prefix}median_ape": None, f"{prefix}mape": None}
    return {f"{prefix}median_ape": error.median_ape, f"{prefix}mape": error.mape}


def _elsewhere_row(fit: ProductFit, table: Any) -> dict[str, Any]:
    error, bias = elsewhere(fit, table)
    return {
        "device": table.device, "fitted_on": fit.table.laboratory, "checked_on": table.laboratory,
        "points": error.points if error else 0, **_error(error), "bias": bias,
    }  # fmt: skip


def _errors(
    fits: Fits, devices: Mapping[str, Efficiencies], left_out: list[LeftOut], others: list[dict[str, Any]]
) -> dict[str, Any]:
    by_device = {item.device: item for item in left_out}
    gemm = [_product_row(fit, by_device) for fit in fits.products]
    tensor = [row for row in gemm if row["dtype"] in SIXTEEN_BIT]
    attention = _attention_rows(fits, devices)
    main = [row["median_ape"] for row in attention if row["best_measured"] and row["pass"] == "forward" and row["head_dim"] == 128]
    as_used = summary([item.as_used for item in left_out], "left out, as used")
    specs_only = summary([item.specs_only for item in left_out], "left out, specs alone")
    return {
        "note": "Errors of the fits on data that they did not see: APE = |predicted / measured - 1|, fractions. "
        "Products: m >= 256, n and k >= 512 unless 'all_'. Layers are sums over pairs of which most were fitted.",
        "targets": TARGETS,
        "summary": {
            "gemm_devices": len(tensor),
            "gemm_within_target": sum((row["median_ape"] or 1) <= TARGETS["gemm_median_ape"] for row in tensor),
            "gemm_median_of_medians": _median([row["median_ape"] for row in tensor]),
            "attention_within_target": sum((value or 1) <= TARGETS["attention_median_ape"] for value in main),
            "attention_devices": len(main),
            "attention_median_of_medians": _median(main),
            "left_out_as_used": as_used.median_ape if as_used else None,
            "left_out_specs_only": specs_only.median_ape if specs_only else None,
        },
        "gemm": gemm,
        "layers": [row for fit in fits.products if (row := _layer_row(fit)) is not None],
        "other_laboratories": others,
        "attention": attention,
        "grouped_gemm": [{"device": name, "points": fit.points, **_error(fit.error)} for name, fit in sorted(fits.grouped.items())],
        "memory_bound": [
            {"device": device, "op_class": name, "pass": phase, "points": fit.points, **_error(fit.error)}
            for (device, name, phase), fit in sorted(fits.memory_bound.items())
        ],
    }


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{np.median(known):.4g}") if known else None


def _product_row(fit: ProductFit, left_out: Mapping[str, LeftOut]) -> dict[str, Any]:
    row = {
        "device": fit.table.device, "dtype": fit.table.dtype, "form": fit.fit.form, "laboratory": fit.table.laboratory,
        "points": fit.fit.points, "held_out_points": fit.fit.error.points if fit.fit.error else 0,
        **_error(fit.fit.error), **_error(fit.fit.all_shapes, "all_"),
    }  # fmt: skip
    item = left_out.get(fit.table.device) if fit.table.dtype in SIXTEEN_BIT else None
    if item is not None:
        row["left_out"] = {
            name: error.median_ape if error is not None else None
            for name, error in (
                ("as_used", item.as_used), ("specs_only", item.specs_only), ("published_rate", item.published),
                ("family_unknown", item.family_unknown),
            )
        }  # fmt: skip
    return row


def _layer_row(fit: ProductFit) -> dict[str, Any] | None:
    """Sums of a dense GPT layer's products (four square ones, up and down of 4x) where the table has all of them."""
    if fit.table.dtype != "bfloat16" or fit.table.eager:
        return None
    shape = fit.table.shape
    times = dict(zip(zip(shape.m, shape.n, shape.k, strict=True), fit.table.time_s, strict=True))
    errors = []
    for tokens in _LAYER_TOKENS:
        for hidden in _LAYER_HIDDEN:
            parts = [(tokens, hidden, hidden)] * 4 + [(tokens, 4 * hidden, hidden), (tokens, hidden, 4 * hidden)]
            if all(part in times for part in parts):
                m, n, k = (np.array(column) for column in zip(*parts, strict=True))
                errors.append(fit.predict(products(m, n, k)).sum() / sum(times[part] for part in parts) - 1)
    if not errors:
        return None
    ape = np.abs(errors)
    return {"device": fit.table.device, "layers": len(ape), "mape": float(f"{ape.mean():.3g}"), "worst": float(f"{ape.max():.3g}")}


def _attention_rows(fits: Fits, devices: Mapping[str, Efficiencies]) -> list[dict[str, Any]]:
    rows = []
    for key, fit in sorted(fits.attention.items()):
        device, backend, phase, head_dim = key
        used = devices[device].attention_backend == backend
        measured = [name for name in PREFERENCE if any(other[:2] == (device, name) for other in fits.attention)]
        row: dict[str, Any] = {
            "device": device, "backend": backend, "pass": phase, "head_dim": head_dim, "used": used,
            "best_measured": backend == measured[0], "points": fit.points,
            **_error(fit.error), "all_builds_median_ape": fits.builds.get(key),
        }  # fmt: skip
        if backend == measured[0] and phase == "forward":
            row["left_out_median_ape"] = _attention_left_out(fits, devices, key)
        rows.append(row)
    return rows


def _attention_left_out(fits: Fits, devices: Mapping[str, Efficiencies], key: tuple[str, str, str, int]) -> float | None:
    """Error of the median of the other devices' used fits (its family's if measured) on this device's table."""
    device, _, phase, head_dim = key
    used = {
        name: item.attention[item.attention_backend][phase][head_dim]
        for name, item in devices.items()
        if name != device and head_dim in item.attention.get(item.attention_backend, {}).get(phase, {})
    }
    family = {name: fit for name, fit in used.items() if family_of(device_type(name)) == family_of(device_type(device))}
    group = list((family or used).values())
    if not group:
        return None
    median = {name: float(np.median([fit.parameters[name] for fit in group])) for name in group[0].parameters}
    error = error_on(group[0].replace(parameters=median), fits.attention_tables[key], "left out")
    return error.median_ape if error else None
