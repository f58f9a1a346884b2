"""Placing a block on the tensor-parallel axis: the one way to do it, for profiler, simulator, planner and executor.

Given a block and a degree ``tp``, every tensor gets a placement on the tp axis, ``R`` (replicated) or ``S(d)`` (split along
dim ``d``); global shapes become local ones; collectives follow from placement changes. Nothing here knows transformers:

* A product with a weight takes a replicated input to an output split along its last dim (column-parallel, weight ``S(0)``),
  and an input split along its last dim to a partial sum (row-parallel, weight ``S(1)``) that is reduced at once.
* Column-parallel is tried first and withdrawn where a later op can't take the split (a router's top-k): a fixed-point search.
* With sequence parallel the residual stream is split along the sequence between the products.

The result is Megatron's pattern on a decoder layer (arXiv 1909.08053 §3, sequence parallel arXiv 2205.05198 §4.2.2), which a
test asserts. Collectives of the backward pass mirror those of forward (all-gather <-> reduce-scatter, all-reduce <-> identity).
"""

from __future__ import annotations

from functools import lru_cache

from profiler.placed import PlacedBlock
from profiler.placement_experts import TokenSplitPlacer
from profiler.placement_walk import Placer
from specs.graph import Block


@lru_cache(maxsize=4096)
def _place_cached(key: str, tp: int, sequence_parallel: bool, whole_experts: bool) -> PlacedBlock:
    placer = TokenSplitPlacer if whole_experts else Placer
    return placer(_BLOCKS[key], tp, sequence_parallel).run()


_BLOCKS: dict[str, Block] = {}


def place_block(block: Block, tp: int = 1, sequence_parallel: bool = False, *, whole_experts: bool = False) -> PlacedBlock:
    """Place ``block`` on ``tp`` ranks. ``whole_experts``: experts are not split over them; needs sequence parallel. Results are
    cached by the block's content."""
    key = _block_key(block)
    _BLOCKS.setdefault(key, block)
    return _place_cached(key, tp, sequence_parallel and tp > 1, whole_experts and sequence_parallel and tp > 1)


_KEYS: dict[int, tuple[Block, str]] = {}


def _block_key(block: Block) -> str:
    known = _KEYS.get(id(block))
    if known is None or known[0] is not block:
        known = (block, block.model_dump_json())
        _KEYS[id(block)] = known
    return known[1]
