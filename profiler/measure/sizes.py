"""At which sizes the things that are not ops are measured: messages, copies, optimizer steps, gradient additions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler.shapes import sequence_lengths
from specs.graph import DTYPE_BYTES, Block, ModelGraph
from specs.plan import CollectiveOptions
from specs.training import TrainingSpec

SMALLEST_MESSAGE_BYTES = 1024
LARGEST_MESSAGE_BYTES = 256 * 1024 * 1024
NUM_MESSAGES = 12
COPY_BYTES = (4096, 65536, 1 << 20, 1 << 24, 1 << 26)
SMALLEST_STEP_PARAMS = 1 << 16
LARGEST_STEP_PARAMS = 1 << 26
NUM_STEPS = 4
MOST_TENSORS = 64
BYTES_PER_STEP_PARAM = 16  # parameter, gradient and two states in float32


def log_spaced(first: float, last: float, count: int, multiple: int) -> tuple[int, ...]:
    """``count`` sizes from ``first`` to at least ``last``, evenly spaced in log, rounded up to a multiple."""
    if last <= first:
        return (_up(first, multiple),)
    sizes = np.exp(np.linspace(np.log(first), np.log(last), count))
    return tuple(sorted({_up(size, multiple) for size in sizes}))


def _up(size: float, multiple: int) -> int:
    return int(-(-round(size) // multiple) * multiple)


def collective_sizes(graph: ModelGraph, workload: TrainingSpec, micro_batch: int, limit_bytes: float) -> tuple[int, ...]:
    """Bytes of full tensors, from 1 KiB to the largest that any plan of this model sends in one call: a unit's parameters, a
    gradient bucket, or an activation between blocks."""
    precision = workload.precision
    unit = max(block.num_params() for block in graph.blocks) * DTYPE_BYTES[precision.param_dtype]
    bucket = min(CollectiveOptions().bucket_bytes, graph.num_params() * DTYPE_BYTES[precision.grad_dtype])
    seq = sequence_lengths(workload)[-1]
    activation = max(_largest_activation(block, micro_batch, seq) for block in graph.blocks) * DTYPE_BYTES[precision.compute_dtype]
    largest = min(max(unit, bucket, activation), LARGEST_MESSAGE_BYTES, limit_bytes / 4)
    return log_spaced(SMALLEST_MESSAGE_BYTES, largest, NUM_MESSAGES, 256)


def _largest_activation(block: Block, batch: int, seq: int) -> float:
    tensors = block.tensors()
    names = [*(tensor.name for tensor in block.inputs), *block.outputs]
    return max((_elements(tensors[name].shape, batch, seq) for name in names), default=1.0)


def _elements(shape: Sequence[object], batch: int, seq: int) -> float:
    total = 1.0
    for size in shape:
        total *= float(size(batch, seq)) if callable(size) else float(str(size))
    return total


def group_sizes(num_devices: int) -> tuple[int, ...]:
    """Group sizes to measure: all up to 4, beyond that the divisors of the device count."""
    return tuple(size for size in range(2, num_devices + 1) if num_devices <= 4 or num_devices % size == 0)


def copy_sizes() -> tuple[int, ...]:
    """Bytes of copies."""
    return COPY_BYTES


def optimizer_sizes(graph: ModelGraph, limit_bytes: float) -> tuple[int, ...]:
    """Parameter counts of optimizer steps, up to the whole model where it fits."""
    largest = min(graph.num_params(trainable_only=True), LARGEST_STEP_PARAMS, limit_bytes / BYTES_PER_STEP_PARAM)
    return log_spaced(SMALLEST_STEP_PARAMS, max(largest, SMALLEST_STEP_PARAMS), NUM_STEPS, MOST_TENSORS)


def tensors_per_step(graph: ModelGraph) -> int:
    """Parameter tensors of the model, as an optimizer sees them (at most 64: beyond, the time per tensor is alike)."""
    total = sum(segment.count * sum(param.trainable for param in graph.block(segment.block).params) for segment in graph.segments)
    return max(1, min(MOST_TENSORS, total))


def gradient_sizes(graph: ModelGraph, limit_bytes: float) -> tuple[int, ...]:
    """Elements of gradients that are added: from the smallest parameter to the largest."""
    sizes = [param.num_elements for block in graph.blocks for param in block.params if param.trainable and not param.buffer]
    if not sizes:
        return ()
    return log_spaced(min(sizes), min(max(sizes), limit_bytes / 16), 6, 1)
