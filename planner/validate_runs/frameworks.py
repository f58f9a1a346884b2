"""The training framework behind a row, read from ``traces/frameworks.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from planner.validate_runs.runs import PublishedRun
from simulator.software import Software
from specs.training import PRECISIONS, Precision

# Table words for narrow matrix products; what is not a product of a linear layer stays in bfloat16.
NARROW = {"fp8": "float8", "mxfp8": "float8", "float8": "float8", "nvfp4": "float4"}
MIB = 1024.0 * 1024.0
# PyTorch 2.9 (October 2025) made rms_norm one kernel (aten._fused_rms_norm).
COMPOSED_NORMS_UNTIL = 2025


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """A framework's defaults beside its :class:`Software`. ``precisions``: table word -> changes to the mixed precision;
    ``software_by_precision``: table word -> changes to the software.

    ``loss_kernel``: as in a workload. ``selective``: its selective recompute is of ``operators``, ``modules`` or a share of the
    ``layers``. ``state_dtype``: of optimizer states. ``whole_experts``: tensor parallel does not split experts, expert parallel
    reaches over it. ``memory_reading``: what it prints as peak memory: ``allocated``, ``reserved`` by the allocator, or of the
    whole ``device`` (nvidia-smi).
    """

    name: str
    title: str
    words: tuple[str, ...]
    years: tuple[int, int]
    software: Software
    provenance: str
    default_zero: int = 0
    default_sequence_parallel: bool = False
    vocab_multiple_per_tp: int = 0
    whole_experts: bool = False
    bucket_bytes: float = 25 * MIB
    selective: str = "layers"
    loss_kernel: str = "full"
    state_dtype: str = "float32"
    memory_reading: str = "reserved"
    prefetch_units: int = 1
    precisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    software_by_precision: dict[str, dict[str, Any]] = field(default_factory=dict)

    def vocab_multiple(self, tp: int) -> int:
        """The vocabulary is padded to a multiple of this."""
        return max(1, self.vocab_multiple_per_tp * tp)


@lru_cache(maxsize=1)
def frameworks() -> tuple[Framework, ...]:
    """All known frameworks, the more specific first where words overlap."""
    data = json.loads(resources.files("traces").joinpath("frameworks.json").read_text())
    return tuple(_framework(item) for item in data["frameworks"])


def _framework(item: dict[str, Any]) -> Framework:
    values = {**item, "words": tuple(item["words"]), "years": tuple(item["years"])}
    return Framework(**{**values, "software": Software(name=item["name"], **item["software"])})


def named(name: str) -> Framework:
    """The framework of that name."""
    return next(item for item in frameworks() if item.name == name)


def framework_of(run: PublishedRun) -> Framework:
    """By the words of source, reference and notes and the year; where none matches, by the parallel sizes.

    The longest matching word wins, so ``megatron-deepspeed`` beats ``deepspeed``.
    """
    text = f"{run.source} {run.source_ref} {run.notes}".lower()
    year = run.year or 2024
    matches = [
        (len(word), -index, item)
        for index, item in enumerate(frameworks())
        if item.years[0] <= year <= item.years[1]
        for word in item.words
        if word in text
    ]
    found = max(matches, key=lambda match: match[:2])[2] if matches else named(_by_sizes(run, year))
    return _with_run(found, run)


def _by_sizes(run: PublishedRun, year: int) -> str:
    zero = run.zero_stage.lower()
    if "fsdp" in zero or "hsdp" in zero:
        return "fsdp1" if year < 2024 else "fsdp2"
    if (run.tp or 1) > 1 or (run.pp or 1) > 1 or zero == "zero1":
        return "megatron_2021" if year < 2022 else "megatron_2022" if year < 2024 else "megatron_core"
    if zero in ("zero2", "zero3"):
        return "deepspeed"
    return "ddp"


def _with_run(framework: Framework, run: PublishedRun) -> Framework:
    """What the row says of its own software: compiled or not, its precision, tensor-parallel overlap."""
    changes = dict(framework.software_by_precision.get(run.precision.lower(), {}))
    if (run.year or 0) > COMPOSED_NORMS_UNTIL:
        changes["composed_norms"] = False
    if run.compile:
        changes |= {"fusion": "compiler", "caches_positions": True}
    if "async tp" in run.notes.lower():
        changes["tp_overlap"] = "ring"
    return replace(framework, software=replace(framework.software, **changes)) if changes else framework


def precision_of(run: PublishedRun, framework: Framework) -> Precision:
    """Dtypes of a step."""
    word = run.precision.lower() or "bf16"
    base = {"fp32": PRECISIONS["fp32"], "tf32": PRECISIONS["fp32"].replace(compute_dtype="tf32")}.get(word)
    if base is not None:
        return base
    key = "fp16" if word == "fp16" else "bf16"
    changes = dict(framework.precisions.get(key, {}))
    start = PRECISIONS["fp16_mixed"] if key == "fp16" else PRECISIONS["bf16_mixed"]
    if word in NARROW:
        changes["matmul_dtype"] = NARROW[word]
    return start.replace(**changes)
