"""The data of a step: the same global batch for every plan, of which each rank takes its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.layout import Layout, Place
from specs.graph import ModelGraph
from specs.training import TrainingSpec

_STEP_STRIDE = 1_000_003  # a prime, so that seeds of neighbouring jobs and steps do not meet


@dataclass(frozen=True)
class LocalBatch:
    """Rows of one dp rank: ``tokens`` and ``labels`` (num_micro_batches x micro_batch, S / cp), micro-batch after micro-batch."""

    tokens: Tensor
    labels: Tensor


class DataSource:
    """Tokens of every step, drawn from a generator or read from a ``.npy`` file of token ids (wrapping at its end)."""

    def __init__(self, workload: TrainingSpec, vocab: int) -> None:
        self._batch, self._seq = workload.global_batch, workload.max_seq_len
        self._seed, self._vocab = workload.seed, vocab
        self._file = None if workload.data_source == "synthetic" else np.load(workload.data_source, mmap_mode="r")

    def global_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """``tokens`` and next-token ``labels``, both (global batch, S)."""
        if self._file is None:
            generator = torch.Generator().manual_seed(self._seed * _STEP_STRIDE + step)
            rows = torch.randint(self._vocab, (self._batch, self._seq + 1), generator=generator)
        else:
            rows = self._read(step)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def local_batch(self, step: int, place: Place, layout: Layout, device: torch.device) -> LocalBatch:
        """The rows of one dp rank, and of those the parts of the sequence that its cp rank holds."""
        tokens, labels = self.global_batch(step)
        passes = layout.pipeline.num_micro_batches
        first = passes * sum(layout.micro_batches[: place.dp])
        own = slice(first, first + passes * layout.micro_batch(place))
        index = layout.positions(place)
        return LocalBatch(tokens[own, index].to(device), labels[own, index].to(device))

    def _read(self, step: int) -> Tensor:
        if self._file is None:
            raise RuntimeError("no token file")
        starts = (np.arange(self._batch) + step * self._batch) * self._seq
        index = (starts[:, None] + np.arange(self._seq + 1)) % len(self._file)
        return torch.from_numpy(np.asarray(self._file[index], dtype=np.int64)) % self._vocab


def vocabulary_size(graph: ModelGraph) -> int:
    """Entries of the vocabulary: rows of the first two-dimensional parameter of the first unit."""
    first = graph.block(graph.segments[0].block)
    for param in first.params:
        if not param.buffer and len(param.shape) == 2:
            return param.shape[0]
    raise ValueError(f"model '{graph.name}' has no embedding table in its first unit")
