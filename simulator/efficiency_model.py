"""The efficiency model of one device and dtype: which fit serves each op class, resolved once and kept as closures."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from math import hypot, inf, log, sqrt

from profiler.fit.families import family_of, watts_per_flop
from profiler.fit.forms import Chip
from profiler.fit.records import Efficiencies, Fit, Priors
from profiler.fit.transfer import SIXTEEN_BIT, same_rate, scaled, sustained_efficiency, transferred
from profiler.opset import OpClass
from simulator.efficiency_forms import AttentionTime, Conditions, ProductTime, attention_time, product_time, query_blocks
from specs.base import Provenance
from specs.cluster import DeviceType

# What a stated default or a borrowed figure without any check of its own may be off.
UNCHECKED_ERROR = 0.3
# No price is called worse than this: half of an interval around it must not reach zero.
LARGEST_ERROR = 0.9
# Micro-benchmarks time a product by itself on a cool chip; in a step its clock follows the load of the last tens of
# milliseconds. So heat is taken at no less than that of a large product of a step (1e12 FLOP: 2 decades above 1e10). Layers timed
# one after another (Vidur) run 6 % (A100) and 10 % (H100) slower than the same products by themselves; this explains half.
STEP_HEAT_DECADES = 2.0
# A whole step draws more than one product repeated on it: memory, links and all chips of a node share the power and the cooling, so
# the clock settles below that of the benchmark, the more the less power a chip has for its peak. Time of products in a step over
# that of the same products by themselves: (STEP_LOAD_WATTS / watts per FLOP) ** STEP_LOAD_EXPONENT, from 1 to STEP_LOAD_MOST.
# Fitted on the fit sources of docs/accuracy.md; layers timed one after another (Vidur) show the same direction and half the size.
STEP_LOAD_WATTS = 1.9e-12  # J/FLOP from which a chip holds its clock (a V100 has 2.4e-12)
STEP_LOAD_EXPONENT = 0.235
STEP_LOAD_MOST = 1.37
# A chip whose power limit holds products below their usual share holds attention there too.
ATTENTION_OF_PRODUCTS = 1.05
# Matrix products narrower than 16 bits.
NARROW = ("float8", "float4")
# Head sizes further apart than this factor are no neighbours: another backend that knows the size is asked first.
_NEIGHBOUR = sqrt(2.0)

_ON_MATRIX_UNITS = (*SIXTEEN_BIT, "tf32", "float8", "float4")

Attention = Callable[[float, float, float, float, float], float]
"""Seconds from FLOP, bytes moved, key length, query length and batch x heads."""


@lru_cache(maxsize=1)
def priors() -> Priors:
    """The packaged priors."""
    return Priors.model_validate(json.loads(resources.files("traces").joinpath("efficiency/prior.json").read_text()))


@lru_cache(maxsize=64)
def fitted(name: str) -> Efficiencies | None:
    """The packaged fits of a device by its catalogue name, or ``None``."""
    if not name.replace("_", "").isalnum():
        return None
    path = resources.files("traces").joinpath(f"efficiency/{name}.json")
    if name in ("defaults", "prior", "errors") or not path.is_file():
        return None
    return Efficiencies.model_validate(json.loads(path.read_text()))


class Model:
    """Closures and figures of one (device, dtype). ``streams``: (op class, backward) -> bytes per second reached and floor [s]."""

    def __init__(self, device: DeviceType, dtype: str) -> None:
        """``dtype`` is one of the device's own."""
        self.device, self.dtype = device, dtype
        self.own = fitted(device.name)
        self.family = priors().families.get(family_of(device))
        self.chip = Chip(device.peak_flop_per_s[dtype], device.memory_bandwidth_bytes_per_s, device.sm_count or 1)
        self.product_fit = self._product_fit()
        self.in_step = Conditions(STEP_HEAT_DECADES, step_load(device) if dtype in _ON_MATRIX_UNITS else 1.0)
        self.product: ProductTime = product_time(self.product_fit, self.chip, self.in_step)
        self.backward_factor = next((self.own.backward[name] for name in same_rate(dtype) if name in self.own.backward), 1.0) \
            if self.own else 1.0  # fmt: skip
        self.grouped_fit = self._first(lambda item: item.grouped_gemm)
        self.grouped_product = self._grouped_product()
        self.stream_fits = {
            (name.value, backward): self._stream_fit(name.value, backward) for name in OpClass for backward in (False, True)
        }
        self.streams = {key: self._stream(fit) for key, fit in self.stream_fits.items()}
        self._attention: dict[tuple[bool, float], Attention] = {}

    def _levels(self) -> list[Efficiencies]:
        return [item for item in (self.own, self.family, priors().general) if item is not None]

    def _first(self, pick: Callable[[Efficiencies], Fit | None]) -> Fit | None:
        return next((found for item in self._levels() if (found := pick(item)) is not None), None)

    def _product_fit(self) -> Fit:
        """The device's own fit at this rate, else its family's, else the general one, carried over to this device."""
        if self.own is not None:
            for name in same_rate(self.dtype):
                if name in self.own.gemm:
                    return self.own.gemm[name]
            if self.dtype == "float4" and "float8" in self.own.gemm:  # no measurement of 4-bit products: their peak, reached alike
                return self.own.gemm["float8"].replace(provenance="assumed", error=None)
        wanted = _rate_class(self.dtype)
        for scope, item in (("family", self.family), ("general", priors().general)):
            if item is not None and wanted in item.gemm:
                return transferred(item.gemm[wanted], self.device, self.dtype, self.chip, priors().watts_exponent.get(scope, 0.0))
        raise LookupError(f"prior.json has no general fit for products in {wanted}")

    def _grouped_product(self) -> ProductTime:
        """The dense form, scaled as mixture layers ran against dense products."""
        if self.grouped_fit is None:
            return self.product
        found = self.grouped_fit.parameters
        grouped = self.product_fit.replace(parameters=scaled(self.product_fit, found["compute"], found["bandwidth"]))
        return product_time(grouped, self.chip, Conditions(load=self.in_step.load))

    def _stream_fit(self, name: str, backward: bool) -> Fit:
        """Bandwidth share of a class and pass; a pass that no level knows takes the other one's."""
        for phase in ("backward", "forward") if backward else ("forward", "backward"):
            found = self._first(lambda item, phase=phase: item.memory_bound.get(name, {}).get(phase))  # type: ignore[misc]
            if found is not None:
                return found
        return self._stream_fit(OpClass.OTHER.value, backward)

    def _stream(self, fit: Fit) -> tuple[float, float]:
        floor = next((item.kernel_floor_s for item in self._levels() if item.kernel_floor_s is not None), fit.parameters["floor_s"])
        return fit.parameters["efficiency"] * self.chip.bytes_per_s, max(floor, fit.parameters["floor_s"])

    def attention(self, backward: bool, head_dim: float) -> Attention:
        """Time of fused attention at a head size."""
        key = (backward, head_dim)
        found = self._attention.get(key)
        if found is None:
            fit = self.attention_fit(backward, head_dim)
            found = self._attention[key] = _on_blocks(attention_time(fit, self._attention_chip()))
        return found

    def _attention_chip(self) -> Chip:
        """Attention in workloads of narrower products runs in 16 bits."""
        if self.dtype not in NARROW:
            return self.chip
        rates = [self.device.peak_flop_per_s[name] for name in SIXTEEN_BIT if name in self.device.peak_flop_per_s]
        return Chip(min([self.chip.flop_per_s, *rates]), self.chip.bytes_per_s, self.chip.units)

    def attention_fit(self, backward: bool, head_dim: float) -> Fit:
        """The fit of the backend in use at the nearest head size; a figure of other devices keeps to what products sustain here."""
        phase = "backward" if backward else "forward"
        for item in self._levels():
            first = item.attention_backend
            order = [first, *(name for name in item.attention if name != first)] if first else []
            known = [(name, sizes) for name in order if (sizes := item.attention.get(name, {}).get(phase))]
            if not known:
                continue
            sizes = next((sizes for _, sizes in known if _nearest(sizes, head_dim)[1] <= log(_NEIGHBOUR)), known[0][1])
            fit = sizes[_nearest(sizes, head_dim)[0]]
            return fit if item is self.own else self._within_products(fit)
        raise LookupError("prior.json has no general fit for attention")

    def _within_products(self, fit: Fit) -> Fit:
        limit = ATTENTION_OF_PRODUCTS * sustained_efficiency(self.product_fit.form, self.product_fit.parameters, self.chip)
        return fit.replace(parameters={**fit.parameters, "efficiency": min(fit.parameters["efficiency"], limit)})

    def judged(self, op_class: str, backward: bool, head_dim: float) -> tuple[Provenance, float]:
        """Where the price of an op class comes from, and its mean error on unseen data."""
        if op_class == OpClass.GEMM:
            fit: Fit | None = self.product_fit
        elif op_class == OpClass.GROUPED_GEMM:
            fit = self.grouped_fit
        elif op_class == OpClass.ATTENTION:
            fit = self.attention_fit(backward, head_dim)
        else:
            fit = self.stream_fits[(op_class, backward)]
        source = Provenance.FITTED if fit is not None and fit.provenance == "fitted" else Provenance.ASSUMED
        if fit is None or fit.error is None:
            return source, UNCHECKED_ERROR
        # a fit knows one laboratory's devices and libraries; the user's are others
        return source, min(hypot(fit.error.mape, priors().laboratory_spread), LARGEST_ERROR)


def step_load(device: DeviceType) -> float:
    """Time of products in a step over that of the same products alone; 1 where the power limit is not known."""
    watts = watts_per_flop(device)
    return 1.0 if watts is None else min(max((STEP_LOAD_WATTS / watts) ** STEP_LOAD_EXPONENT, 1.0), STEP_LOAD_MOST)


def model_of(device: DeviceType, dtype: str) -> Model:
    """The model of ``device`` at the rate of ``dtype``, which must be one of the device's own."""
    return Model(device, dtype)


def _rate_class(dtype: str) -> str:
    """The dtype under which priors keep a rate: 16-bit and TF32 matrix units behave alike."""
    if dtype in SIXTEEN_BIT or dtype == "tf32":
        return "bfloat16"
    return "float8" if dtype in NARROW else "float32"


def _nearest(sizes: dict[int, Fit], head_dim: float) -> tuple[int, float]:
    """The measured head size next to ``head_dim`` and how far it is (log ratio)."""
    best, distance = 0, inf
    for size in sizes:
        apart = abs(log(size / head_dim))
        if apart < distance:
            best, distance = size, apart
    return best, distance


def _on_blocks(time: AttentionTime) -> Attention:
    def seconds(flop: float, moved: float, kv_len: float, q_len: float, heads: float) -> float:
        return time(flop, moved, kv_len, query_blocks(q_len, heads))

    return seconds
