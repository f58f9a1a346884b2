"""Where a split dimension goes through a view: reshape, transpose, slice and the like. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from profiler.opset import base_name
from specs.expr import Expr
from specs.graph import Op

# Two primes far from model sizes stand for B and S, so that equal products mean equal expressions.
SAMPLE_BATCH, SAMPLE_SEQ = 10_007, 20_011


class ShardLost(Exception):
    """The view cannot keep the split: the split dim is cut, or not the outermost of its group, or not divisible."""


def output_dim(op: Op, in_shape: Sequence[Expr], out_shape: Sequence[Expr], dim: int, degree: int) -> int:
    """Dim of the result along which it is split, given the input split along ``dim`` over ``degree`` ranks."""
    name, rank = base_name(op.target), len(in_shape)
    integers = [value for value in op.args if isinstance(value, int) and not isinstance(value, bool)]
    if name in ("transpose", "swapaxes"):
        first, second = (value % rank for value in integers[:2])
        return {first: second, second: first}.get(dim, dim)
    if name in ("permute", "movedim"):
        order = [value % rank for value in op.args[1]]
        return order.index(dim)
    if name == "t":
        return rank - 1 - dim
    if name in ("slice", "narrow", "split", "split_with_sizes", "chunk"):
        return _kept_dim(op, name, in_shape, out_shape, dim)
    if name in ("select", "unbind"):
        cut = (integers[0] if integers else 0) % rank
        if cut == dim:
            raise ShardLost
        return dim - (cut < dim)
    if name in ("detach", "alias", "expand", "expand_as", "lift_fresh", "lift_fresh_copy"):
        return dim + len(out_shape) - rank
    return _regrouped_dim(_numbers(in_shape), _numbers(out_shape), dim, degree)


def _kept_dim(op: Op, name: str, in_shape: Sequence[Expr], out_shape: Sequence[Expr], dim: int) -> int:
    if in_shape[dim] != out_shape[dim]:
        raise ShardLost
    return dim


def _numbers(shape: Sequence[Expr]) -> list[int]:
    return [round(size(SAMPLE_BATCH, SAMPLE_SEQ)) for size in shape]


def _regrouped_dim(in_shape: Sequence[int], out_shape: Sequence[int], dim: int, degree: int) -> int:
    """view/reshape/flatten/unflatten/squeeze/unsqueeze: dims fall into groups of equal product; the split must be outermost."""
    in_dims = [index for index, size in enumerate(in_shape) if size != 1]
    out_dims = [index for index, size in enumerate(out_shape) if size != 1]
    if dim not in in_dims:
        raise ShardLost
    i = j = 0
    while i < len(in_dims) and j < len(out_dims):
        first_in, first_out = in_dims[i], out_dims[j]
        left, right = in_shape[first_in], out_shape[first_out]
        start_i = i
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * in_shape[in_dims[i]], i + 1
            else:
                right, j = right * out_shape[out_dims[j]], j + 1
        if dim in in_dims[start_i:i]:
            size = out_shape[first_out]
            symbolic = size % SAMPLE_BATCH == 0 or size % SAMPLE_SEQ == 0
            whole = in_shape[dim] == size  # the dim passes unchanged: the shard stays as uneven as it was
            if dim != first_in or not (symbolic or whole or size % degree == 0):
                raise ShardLost
            return first_out
    raise ShardLost
