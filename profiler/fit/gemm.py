"""Fits of matrix products: tile or smooth form, with the error on (n, k) pairs that the fit never saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from profiler.fit.families import TILED, family_of
from profiler.fit.forms import SMOOTH, SPACES, TILE, Chip, Products, product_time_s, smooth_time_s, tile_grid, tile_time_s
from profiler.fit.records import Error, Fit
from profiler.fit.samples import choose, error_of, folds, held_out
from profiler.fit.solver import Prior, Solution, solve
from profiler.fit.tables import ProductTable, chip_of, device_type

Array = NDArray[np.float64]

FEWEST_POINTS = 10
MANY_POINTS = 200  # from here the data chooses the form and needs no prior
_MANY_PAIRS = 40
_SAMPLE, _SMALL_SAMPLE, _FOLD_SAMPLE = 1500, 500, 600
# Starts of the tile form: asynchronous kernels (Hopper, data-centre Blackwell) and synchronous ones (Ampere, Ada).
_TILE_STARTS = (np.array(TILE.start), np.array([0.9, 25.0, 4e-6, 1e-6, 0.1, 0.9, 2.5, 2e-6, 2.0]))
_SMOOTH_STARTS = (np.array(SMOOTH.start), np.array([0.75, 5.0, 5.0, 30.0, 3e-6, 0.1, 0.8, 3.0]))
STARTS = {"tile": _TILE_STARTS, "smooth": _SMOOTH_STARTS}
# A graph's kernel floor, in place of the eager launch that an eager table's floor contains.
GRAPH_FLOOR_S = 2.3e-6


@dataclass(frozen=True, slots=True)
class ProductFit:
    """A fit with what it was made from. ``parameters`` holds both forms, fitted on the same rows: what priors are made of."""

    table: ProductTable
    chip: Chip
    fit: Fit
    unseen: NDArray[np.bool_]
    parameters: dict[str, dict[str, float]]

    def predict(self, shape: Products) -> Array:
        """Seconds."""
        return predict(self.fit, shape, self.chip)


def predict(fit: Fit, shape: Products, chip: Chip) -> Array:
    """Seconds of products under a fit."""
    return product_time_s(fit.form, SPACES[fit.form].values(fit.parameters), shape, chip)


def large_enough(shape: Products) -> NDArray[np.bool_]:
    """Products as training has them: m >= 256, n and k >= 512."""
    return (shape.m >= 256) & (shape.n >= 512) & (shape.k >= 512)


def fit_products(table: ProductTable, priors: dict[str, Prior], seed: int = 0) -> ProductFit | None:
    """The fit of one table, or ``None`` with fewer than ten points; ``priors`` by form help where data is scarce.

    From 200 points on the data chooses the form; below, the tile form is used where the tiles of the generation are known.
    """
    if len(table) < FEWEST_POINTS:
        return None
    device, rng = device_type(table.device), np.random.default_rng(seed)
    chip = chip_of(device, table.dtype)
    pairs = table.shape.n * 1e7 + table.shape.k
    many = len(table) >= MANY_POINTS
    used = {} if many else priors
    split = many and len(np.unique(pairs)) >= _MANY_PAIRS
    unseen = held_out(pairs, rng) if split else np.ones(len(table), dtype=bool)
    rows = training_rows(table, ~unseen if split else unseen, rng)
    solutions = {form: _solve(table, rows, chip, form, used.get(form)) for form in STARTS}
    known = "tile" if family_of(device) in TILED else "smooth"
    form = min(solutions, key=lambda name: solutions[name].loss) if many else known
    if split:
        method = "a quarter of the (n, k) pairs unseen"
        predicted = product_time_s(form, solutions[form].values, table.shape.take(unseen), chip)
    else:
        method = "folds over (n, k) pairs"
        predicted = _folded(table, chip, form, pairs, used.get(form), rng)
    measured, typical = table.time_s[unseen], large_enough(table.shape.take(unseen))
    parameters = {name: _without_launch(table, SPACES[name].named(found.values)) for name, found in solutions.items()}
    fit = Fit(
        form=form, parameters=parameters[form], source=table.source, points=len(rows),
        error=error_of(predicted[typical], measured[typical], method), all_shapes=error_of(predicted, measured, method),
    )  # fmt: skip
    return ProductFit(table, chip, fit, unseen, parameters)


def _folded(table: ProductTable, chip: Chip, form: str, pairs: Array, prior: Prior | None, rng: np.random.Generator) -> Array:
    """Seconds of every row, predicted by a fit on the other folds."""
    predicted = np.empty(len(table))
    for fold in folds(pairs, rng):
        seen = choose(np.flatnonzero(~fold), _FOLD_SAMPLE, rng)
        predicted[fold] = product_time_s(form, _solve(table, seen, chip, form, prior).values, table.shape.take(fold), chip)
    return predicted


def _without_launch(table: ProductTable, parameters: dict[str, float]) -> dict[str, float]:
    """An eager table's floor contains the launch, which is priced apart; what stays is a graph kernel's."""
    return {**parameters, "floor_s": min(parameters["floor_s"], GRAPH_FLOOR_S)} if table.eager else parameters


def training_rows(table: ProductTable, seen: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Up to 1500 large products, the larger the likelier (they are what a step consists of), and up to 500 others."""
    typical = large_enough(table.shape)
    large, small = np.flatnonzero(seen & typical), np.flatnonzero(seen & ~typical)
    weights = np.clip(table.shape.flop[large] / 1e10, 0.1, 1e3) ** 0.25
    return np.concatenate([choose(large, _SAMPLE, rng, weights), choose(small, _SMALL_SAMPLE, rng)])


def _solve(table: ProductTable, rows: NDArray[np.int64], chip: Chip, form: str, prior: Prior | None) -> Solution:
    shape, measured = table.shape.take(rows), np.log(table.time_s[rows])
    starts = [prior.centre] if prior is not None else list(STARTS[form])
    if form == "tile":
        grid = tile_grid(shape, chip)
        return solve(lambda values: np.log(tile_time_s(values, grid, chip)) - measured, TILE, starts, prior)
    return solve(lambda values: np.log(smooth_time_s(values, shape, chip)) - measured, SMOOTH, starts, prior)


def priors_from(fits: list[ProductFit]) -> dict[str, Prior]:
    """Centre and spread of the parameters of each form over several devices."""
    if len(fits) < 2:
        return {}
    found = {}
    for form in STARTS:
        space = SPACES[form]
        values = np.array([space.values(fit.parameters[form]) for fit in fits])
        found[form] = Prior(np.median(values, axis=0), np.maximum(values.std(axis=0), np.array(space.step)))
    return found


def backward_factor(forward: ProductFit, backward: ProductTable) -> float:
    """Median of measured over predicted time of the two backward products (dX: m x k x n, dW: n x m x k)."""
    shape = backward.shape
    first = Products(shape.m, shape.k, shape.n, shape.batch, shape.moved)
    second = Products(shape.n, shape.k, shape.m, shape.batch, shape.moved)
    return float(f"{np.median(backward.time_s / (forward.predict(first) + forward.predict(second))):.3g}")


def elsewhere(fit: ProductFit, other: ProductTable) -> tuple[Error | None, float]:
    """Error and median signed error of a fit on another laboratory's table of the same device, large products only."""
    typical = large_enough(other.shape)
    chip = chip_of(device_type(other.device), other.dtype)
    predicted, measured = predict(fit.fit, other.shape.take(typical), chip), other.time_s[typical]
    error = error_of(predicted, measured, f"{other.laboratory} measured the same device")
    return error, float(f"{np.median(predicted / measured - 1):.3g}") if len(measured) else 0.0
