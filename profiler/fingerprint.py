"""What machine this is: enough to know whether a stored profile was measured on the same one. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from profiler.worker_env import allowed_cores

# What decides speed; two machines that agree on these share profiles. Clocks and loads are kept for people only.
IDENTITY = ("cpu_model", "machine", "cores", "memory_gib", "gpus", "torch", "python", "threads_per_worker")


def machine_fingerprint(*, threads_per_worker: int = 1) -> dict[str, Any]:
    """CPU, cores this process may use, memory, GPUs, versions, and clocks where the kernel tells them."""
    return {
        "cpu_model": _cpu_model(),
        "machine": platform.machine(),
        "cores": len(allowed_cores()),
        "memory_gib": round(host_memory_bytes() / 1024**3),
        "gpus": gpu_names(),
        "torch": _version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "threads_per_worker": threads_per_worker,
        "clock_mhz": _clock_mhz(),
        "caches": _caches(),
        "kernel": platform.release(),
    }


def fingerprint_id(fingerprint: Mapping[str, Any]) -> str:
    """A short hash of what decides speed; missing fields count as unknown."""
    kept = {name: fingerprint.get(name) for name in IDENTITY}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def host_memory_bytes() -> float:
    """Memory of this machine, or the control group's limit where that is lower."""
    total = float(psutil.virtual_memory().total)
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = _read(path)
        if text.isdigit():
            total = min(total, float(text))
    return total


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that the driver lists, in its order; empty without one."""
    names = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [line.split(":", 1)[1].strip() for line in _read(info).splitlines() if line.startswith("Model:")]
    return names


def load_average() -> float | None:
    """Load of the last minute, a hint at other work on the machine."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _clock_mhz() -> float | None:
    """The highest clock of core 0 where the kernel knows it, else its present one."""
    highest = _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    if highest.isdigit():
        return float(highest) / 1e3
    frequency = psutil.cpu_freq()
    return float(frequency.current) if frequency else None


def _caches() -> dict[str, str]:
    found = {}
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(entry / name) for name in ("level", "type", "size"))
        if kind != "Instruction" and level:
            found[f"l{level}"] = size
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
