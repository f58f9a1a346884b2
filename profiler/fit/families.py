"""Which devices behave alike: families by architecture, split where one architecture name covers unlike chips."""

from __future__ import annotations

import re

from specs.cluster import DeviceType

# Architectures whose data-centre chip differs from the graphics chips of the same name: dense bf16 FLOP/s per compute unit from
# which a device is the data-centre one (A100 2.9e12 against A40 1.8e12; B200 15e12 against RTX PRO 6000 2.5e12).
_DATA_CENTRE_FROM = {"ampere": 2.4e12, "blackwell": 6e12}
# Vendors' names that say the same chip generation.
_SAME = {"grace hopper": "hopper", "blackwell ultra": "blackwell"}
# Generations whose product kernels are known to work on the tiles of ``forms.TILES`` (NVIDIA tensor cores since Volta).
TILED = frozenset(("volta", "turing", "ampere", "ampere_graphics", "ada", "hopper", "blackwell", "blackwell_graphics"))

_TENSOR_DTYPES = ("bfloat16", "float16")


def family_of(device: DeviceType) -> str:
    """``hopper``, ``ampere``, ``ampere_graphics``, ``cdna`` ...; empty where the architecture is not given."""
    name = device.arch.strip().lower()
    name = _SAME.get(name, name)
    name = re.sub(r"[\s\-_]+", "_", re.sub(r"[\d.]+$", "", name)).strip("_")
    limit = _DATA_CENTRE_FROM.get(name)
    rate = next((device.peak_flop_per_s[dtype] for dtype in _TENSOR_DTYPES if dtype in device.peak_flop_per_s), None)
    if limit is None or rate is None or not device.sm_count:
        return name
    return name if rate / device.sm_count >= limit else f"{name}_graphics"


def watts_per_flop(device: DeviceType) -> float | None:
    """Power limit over the dense bf16 (else fp16) peak [J/FLOP]: how much of its peak the chip can keep up."""
    rate = next((device.peak_flop_per_s[dtype] for dtype in _TENSOR_DTYPES if dtype in device.peak_flop_per_s), None)
    return device.tdp_w / rate if device.tdp_w and rate else None
