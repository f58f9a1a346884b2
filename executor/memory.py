"""Memory of a worker: what it holds above its baseline.

On CPU the kernel keeps the peak resident size (``VmHWM``) and lets us reset it (write 5 to ``clear_refs``, Linux
``Documentation/filesystems/proc.rst``). Resident size follows tensors only with the allocator settings of
``profiler.worker_env``. On CUDA the caching allocator keeps the numbers.
"""

from __future__ import annotations

import gc
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class MemoryMeter:
    """Baseline and peak in bytes. Create it when the process is warm and before the model exists."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self.baseline_bytes = self.current_bytes()

    def current_bytes(self) -> float:
        """What the process holds now."""
        if self._device.type == "cuda":
            return float(torch.cuda.memory_allocated(self._device))
        return status_bytes("VmRSS")

    def reset_peak(self) -> None:
        """Begin a new peak at what is held now. No effect where the kernel does not allow it."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:
            return

    def peak_bytes(self) -> float:
        """Most that was held above the baseline since :meth:`reset_peak`."""
        on_gpu = self._device.type == "cuda"
        peak = float(torch.cuda.max_memory_allocated(self._device)) if on_gpu else status_bytes("VmHWM")
        return max(0.0, peak - self.baseline_bytes)


def status_bytes(field: str) -> float:
    """A size field of ``/proc/self/status`` in bytes; 0 where there is none."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return float(line.split()[1]) * 1024
    except OSError:
        return 0.0
    return 0.0
