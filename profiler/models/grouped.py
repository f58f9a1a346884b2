"""Grouped matrix product: rows sorted by group, each group times its own matrix.

torch 2.13 computes it in any float type but knows the result's shape under fake tensors for bfloat16 only; the rule below
states it for the others, so that capture and dry runs work in float32 as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``rows`` (N, in) times ``weight`` (groups, in, out); ``ends`` (groups,) int32: one past each group's last row. (N, out)."""
    return torch._grouped_mm(rows, weight, offs=ends)


def _result_shape(left: Tensor, right: Tensor, ends: Tensor | None) -> tuple[Any, ...]:
    """Two matrices: one product per group. A stack and a matrix: the matrix's grouped dim stays. Two stacks: plain batches."""
    if left.dim() == 2 and right.dim() == 2:
        if ends is None:
            raise RuntimeError("_grouped_mm of two matrices needs the ends of the groups")
        return (ends.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 3 and right.dim() == 3:
        return (left.shape[0], left.shape[1], right.shape[2])
    return (left.shape[0] if left.dim() == 2 else left.shape[1], right.shape[-1])


def _fake_grouped_mm(
    mode: Any,
    func: Any,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    if left.shape[-1] != right.shape[-2]:
        raise RuntimeError(f"_grouped_mm of {tuple(left.shape)} and {tuple(right.shape)}: the inner dims differ")
    with mode:
        return torch.empty(_result_shape(left, right, offs), dtype=out_dtype or left.dtype, device=left.device)


if torch.ops.aten._grouped_mm.default not in op_implementations_dict:
    register_op_impl(torch.ops.aten._grouped_mm.default)(_fake_grouped_mm)
