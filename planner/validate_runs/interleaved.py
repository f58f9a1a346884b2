"""Action rows of the interleaved 1F1B schedule (Narayanan et al., arXiv 2104.04473 §2.2)."""

from __future__ import annotations

from functools import lru_cache

from specs.schedule import Action, Rows


@lru_cache(maxsize=64)
def interleaved_rows(num_ranks: int, num_micro_batches: int, chunks: int) -> Rows:
    """One row per rank. Stage ``c * num_ranks + rank`` is chunk ``c`` of a rank. ``num_micro_batches`` must be a multiple of
    ``num_ranks``: micro-batches run through a chunk in groups of that many."""
    return tuple(_row(rank, num_ranks, num_micro_batches, chunks) for rank in range(num_ranks))


def _row(rank: int, num_ranks: int, num_micro_batches: int, chunks: int) -> tuple[Action, ...]:
    total = num_micro_batches * chunks
    warmup = total if num_micro_batches == num_ranks else min(total, 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks)

    def action(kind: str, step: int) -> Action:
        group, place = divmod(step, num_ranks * chunks)
        chunk, micro_batch = divmod(place, num_ranks)
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return Action(chunk * num_ranks + rank, kind, group * num_ranks + micro_batch)

    row = [action("F", step) for step in range(warmup)]
    for step in range(total - warmup):
        row += [action("F", warmup + step), action("B", step)]
    return (*row, *(action("B", step) for step in range(total - warmup, total)))
