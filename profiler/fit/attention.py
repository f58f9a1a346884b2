"""Fits of fused attention, by backend, pass and head size. Backends are kept apart: they differ by up to 2x on one chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.fit.forms import ATTENTION, ATTENTION_ROWS, Attentions, Chip, attention_time_s
from profiler.fit.records import Error, Fit
from profiler.fit.samples import choose, error_of, folds, held_out
from profiler.fit.solver import Prior, solve
from profiler.fit.tables import AICONFIGURATOR, chip_of, device_type, read_table

Array = NDArray[np.float64]

# Kernels of the serving stacks by what they are. flash: FlashAttention 2 (Ampere, Ada, consumer Blackwell) and 3 (Hopper).
_BACKENDS = {
    "flash_attention": "flash", "vllm_flash_attn": "flash", "vllm_flash_attn_fa2": "flash", "vllm_flash_attn_fa3": "flash",
    "fa3": "flash", "trtllm_mha": "flashinfer", "vllm_flashinfer": "flashinfer", "flashinfer": "flashinfer",
    "vllm_flashinfer_trtllmprefill": "flashinfer", "torch_flow": "trtllm", "triton": "triton",
}  # fmt: skip
# What training runs, best first: kernels measured in training, kernels that training uses too, inference kernels.
PREFERENCE = ("cudnn", "flash", "flashinfer", "trtllm", "triton")
_CUDNN = {"NVIDIA H200": "h200_sxm", "NVIDIA GB200": "gb200", "NVIDIA GB300": "gb300"}
_HEAD_DIMS = (64, 128, 256)

_SMALLEST_FLOP = 1e9
_SAMPLE = 700
_FEWEST = 4
_STEADY = 0.08
_MANY = 100


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Times of one build of a backend, one pass, one head size on one device. ``groups``: what is held out together."""

    device: str
    backend: str
    build: str
    phase: str
    head_dim: int
    source: str
    shape: Attentions
    time_s: Array
    groups: Array


def attention_tables(data: Path) -> list[AttentionTable]:
    """All attention measurements under ``data``; absent sources are skipped."""
    return [*_prefill(data), *_cudnn(data)]


def attentions(
    batch: Array, heads: Array, kv_heads: Array, length: Array, *, head_dim: int, causal: NDArray[np.bool_], backward: bool
) -> Attentions:
    """Self-attention in bf16. FLOP: 2 products forward, 5 backward, half of each under a causal mask; bytes as the opset's."""
    flop = (10.0 if backward else 4.0) * batch * heads * length**2 * head_dim * np.where(causal, 0.5, 1.0)
    moved = 2.0 * batch * length * head_dim * (2 * heads + 2 * kv_heads) * (2 if backward else 1)
    return Attentions(flop, moved, length, np.ceil(length / ATTENTION_ROWS) * batch * heads)


def _prefill(data: Path) -> Iterator[AttentionTable]:
    path = data / "aiconfigurator" / "attention_prefill_bf16.csv.gz"
    if not path.exists():
        return
    everything = read_table(path)
    everything = everything.assign(backend=everything["kernel"].map(_BACKENDS)).dropna(subset=["backend"])
    rng = np.random.default_rng(0)
    keys = ["gpu", "backend", "fw", "kernel", "head_dim"]
    for (gpu, backend, build, kernel, head_dim), frame in everything.groupby(keys, sort=True):
        flop = 2.0 * frame["batch"] * frame["heads"] * frame["seqlen"].astype(float) ** 2 * head_dim
        frame = frame[flop > _SMALLEST_FLOP]
        rows = frame.iloc[choose(np.arange(len(frame)), _SAMPLE, rng)]
        columns = [rows[name].to_numpy(dtype=float) for name in ("batch", "heads", "kv_heads", "seqlen")]
        source = f"aiconfigurator 095f58a (NVIDIA, Apache-2.0), causal prefill, {build} {kernel}"
        shape = attentions(*columns, head_dim=int(head_dim), causal=np.ones(len(rows), dtype=bool), backward=False)
        yield AttentionTable(
            AICONFIGURATOR[str(gpu)], str(backend), f"{build} {kernel}", "forward", int(head_dim), source, shape,
            rows["latency_us"].to_numpy(dtype=float) * 1e-6, columns[1] * 1000 + columns[2],
        )  # fmt: skip


def _cudnn(data: Path) -> Iterator[AttentionTable]:
    path = data / "cudnn_frontend" / "sdpa_fwd_bwd.csv"
    if not path.exists():
        return
    frame = read_table(path)
    same = (frame["head_dim_qk"] == frame["head_dim_vo"]) & (frame["q_seqlen"] == frame["kv_seqlen"])
    same &= frame["sliding_window_size"].isna()
    frame = frame[
        same & (frame["data_type"] == "bfloat16") & ~frame["deterministic_bwd"].astype(bool) & frame["gpu_name"].isin(_CUDNN)
    ]
    for (gpu, phase, head_dim), rows in frame.groupby(["gpu_name", "profile_pass", "head_dim_qk"], sort=True):
        columns = [rows[name].to_numpy(dtype=float) for name in ("batch_size", "num_q_heads", "num_kv_heads", "q_seqlen")]
        causal = (rows["attn_mask"] == "top_left").to_numpy(dtype=bool)
        shape = attentions(*columns, head_dim=int(head_dim), causal=causal, backward=phase == "bwd")
        versions = ", ".join(sorted({str(version) for version in rows["cudnn_version"]}))
        source = f"cuDNN frontend 3929da2 (NVIDIA, MIT), training attention, cudnn-frontend {versions}"
        name = {"fwd": "forward", "bwd": "backward"}[str(phase)]
        time_s = rows["time_ms"].to_numpy(dtype=float) * 1e-3
        yield AttentionTable(_CUDNN[str(gpu)], "cudnn", versions, name, int(head_dim), source, shape, time_s, columns[3])


def attention_chip(device: str) -> Chip:
    """The chip at the rate of its 16-bit matrix units."""
    described = device_type(device)
    return chip_of(described, "bfloat16" if "bfloat16" in described.peak_flop_per_s else "float16")


def fit_attention(table: AttentionTable, prior: Prior | None, seed: int = 0) -> Fit | None:
    """The fit of one table with its error on unseen head counts (many points) or lengths (few, helped by ``prior``)."""
    if len(table.time_s) < _FEWEST or table.head_dim not in _HEAD_DIMS:
        return None
    chip, rng = attention_chip(table.device), np.random.default_rng(seed)
    many = len(table.time_s) >= _MANY
    starts = [prior.centre] if prior is not None and not many else [np.array(ATTENTION.start)]

    def solved(seen: NDArray[np.bool_]) -> Array:
        shape, measured = table.shape.take(seen), np.log(table.time_s[seen])
        help_from = None if many else prior
        return solve(lambda x: np.log(attention_time_s(x, shape, chip)) - measured, ATTENTION, starts, help_from).values

    if many:
        unseen = held_out(table.groups, rng)
        values = solved(~unseen)
        points = int((~unseen).sum())
        error = _error(values, table, unseen, chip, "a quarter of the (heads, kv heads) pairs unseen")
    else:
        values, points = solved(np.ones(len(table.time_s), dtype=bool)), len(table.time_s)
        predicted = np.empty(points)
        for fold in folds(table.groups, rng):
            predicted[fold] = attention_time_s(solved(~fold), table.shape.take(fold), chip)
        error = error_of(predicted, table.time_s, "five folds over sequence lengths")
    return Fit(form="attention", parameters=ATTENTION.named(values), source=table.source, points=points, error=error)


def _error(values: Array, table: AttentionTable, unseen: NDArray[np.bool_], chip: Chip, method: str) -> Error | None:
    return error_of(attention_time_s(values, table.shape.take(unseen), chip), table.time_s[unseen], method)


def attention_prior(fits: list[Fit]) -> Prior | None:
    """Centre and spread over the fits of other devices."""
    if len(fits) < 2:
        return None
    values = np.array([ATTENTION.values(fit.parameters) for fit in fits])
    return Prior(np.median(values, axis=0), np.maximum(values.std(axis=0), np.array(ATTENTION.step)))


def error_on(fit: Fit, table: AttentionTable, method: str) -> Error | None:
    """Error of some fit on a whole table."""
    return _error(
        ATTENTION.values(fit.parameters), table, np.ones(len(table.time_s), dtype=bool), attention_chip(table.device), method
    )


def representative(builds: list[tuple[AttentionTable, Fit]]) -> tuple[Fit, float]:
    """Of several builds of one backend the fit that describes all of them best, and its mean median error over them.

    A build that the form does not describe (times scatter within it) is taken only where there is no other.
    """

    def disagreement(fit: Fit) -> float:
        errors = [error_on(fit, table, "") for table, _ in builds]
        return float(np.mean([error.median_ape for error in errors if error is not None]))

    steady = [fit for _, fit in builds if fit.error is not None and fit.error.median_ape <= _STEADY]
    best = min(steady or [fit for _, fit in builds], key=disagreement)
    return best, float(f"{disagreement(best):.4g}")
