"""Parts of context parallelism that need no second process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.attention_kernels import attend, attend_backward
from executor.context_parallel import ContextParallelUnit, context_parallel_attention
from executor.layout import Layout
from executor.ring_attention import CpContext
from executor.timers import Timers
from tests.executor_models import graph_of
from tests.plans import make_plan

SEQ_LEN = 16


def ring_of_two(rank: int) -> CpContext:
    layout = Layout(make_plan(graph_of("llama"), seq_len=SEQ_LEN, cp=2, micro_batch=1))
    positions = layout.positions(layout.place(rank))
    return CpContext(None, rank, 2, SEQ_LEN // 2, positions, True, Timers())  # type: ignore[arg-type]


class _Numbers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = x.shape[1]
        return torch.arange(size), torch.arange(size, dtype=torch.float32), torch.arange(0, size), torch.arange(size - 1)


def test_positions_of_a_unit_are_those_of_the_whole_sequence() -> None:
    own = [4, 5, 6, 7, 8, 9, 10, 11]
    plain, floating, from_zero, other = ContextParallelUnit(_Numbers(), ring_of_two(1))(torch.zeros(1, SEQ_LEN // 2))
    assert plain.tolist() == own
    assert floating.tolist() == own
    assert floating.dtype == torch.float32
    assert from_zero.tolist() == list(range(8))
    assert other.tolist() == list(range(7))


@pytest.mark.parametrize(("options", "message"), [
    ({"attn_mask": torch.ones(8, 8)}, "no mask"), ({"dropout_p": 0.1}, "no dropout"),
    ({"is_causal": False}, "ring attention is causal"),
])  # fmt: skip
def test_attention_that_a_ring_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 2, 8, 4)
    with pytest.raises(RuntimeError, match=message):
        context_parallel_attention(q, q, q, cp=ring_of_two(0), **options)


def test_attention_over_parts_of_the_keys_adds_up() -> None:
    """Outputs, and gradients from the sum's log-sum-exp."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 8, 16) for heads in (4, 2, 2, 4))
    whole, lse = attend(q, k, v, causal=False, scale=None)
    parts = [attend(q, k[:, :, half], v[:, :, half], causal=False, scale=None) for half in (slice(0, 4), slice(4, 8))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    assert torch.allclose(total, lse, atol=1e-6)
    summed = sum(out * (part - total).exp().unsqueeze(-1) for out, part in parts)
    assert torch.allclose(summed, whole, atol=1e-6)
    expected = attend_backward(grad, q, k, v, whole, lse, causal=False, scale=None)
    halves = [
        attend_backward(grad, q, k[:, :, half].contiguous(), v[:, :, half].contiguous(), whole, lse, causal=False, scale=None)
        for half in (slice(0, 4), slice(4, 8))
    ]
    assert torch.allclose(halves[0][0] + halves[1][0], expected[0], atol=1e-6)
    for index in (1, 2):
        assert torch.allclose(torch.cat([part[index] for part in halves], dim=2), expected[index], atol=1e-6)
