"""Units: files carry human units in their keys, the code carries SI. The one table that converts between them.

A field of a document is named in SI (``memory_bytes``, ``bandwidth_bytes_per_s``, ``latency_s``, ``peak_flop_per_s``).
A file may give the same quantity under a human key with the same stem (``memory_gib``, ``bandwidth_gbyte_s``,
``latency_us``, ``peak_tflops``). ``to_si`` converts once, at load; giving both is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

KIB, MIB, GIB, TIB = 1024.0, 1024.0**2, 1024.0**3, 1024.0**4
KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12

# SI suffix -> {human suffix: factor that turns the human number into SI}
HUMAN_SUFFIXES: dict[str, dict[str, float]] = {
    "bytes": {"gib": GIB, "mib": MIB, "kib": KIB, "gb": GB, "mb": MB, "tib": TIB, "tb": TB},
    "bytes_per_s": {"gbyte_s": GB, "mbyte_s": MB, "gbit_s": GB / 8, "tbyte_s": TB},
    "s": {"us": 1e-6, "ms": 1e-3, "hours": 3600.0, "minutes": 60.0},
    "flop_per_s": {"tflops": 1e12, "gflops": 1e9},
    "hz": {"ghz": 1e9, "mhz": 1e6},
}


def human_names(si_name: str) -> dict[str, float]:
    """Human key names (and their factor) that may stand for the SI field ``si_name``.

    A rate such as ``tokens_per_s`` is no duration: only the rates of the table have human names.
    """
    for suffix in sorted(HUMAN_SUFFIXES, key=len, reverse=True):
        if suffix == "s" and si_name.endswith("_per_s"):
            continue
        if si_name == suffix or si_name.endswith("_" + suffix):
            stem = si_name[: len(si_name) - len(suffix)]
            return {stem + human: factor for human, factor in HUMAN_SUFFIXES[suffix].items()}
    return {}


def human_index(si_names: Iterable[str]) -> dict[str, tuple[str, float]]:
    """Human key -> (SI field, factor) for a set of SI fields."""
    return {human: (name, factor) for name in si_names for human, factor in human_names(name).items()}


def scale(value: object, factor: float) -> object:
    """Multiply a number, or every number of a list or mapping, by ``factor``; other values pass (pydantic judges them).

    The product is the decimal one, rounded once: ``10 us`` and ``1e-5 s`` are the same number and hash alike.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return float(Decimal(repr(value)) * Decimal(repr(factor)))
    if isinstance(value, dict):
        return {key: scale(item, factor) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scale(item, factor) for item in value]
    return value


def format_bytes(num_bytes: float) -> str:
    """Device memory for people, in GiB or MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """A duration for people."""
    if abs(seconds) >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.1f} us"
