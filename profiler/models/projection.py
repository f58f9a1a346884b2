"""A linear layer, with a low-rank adapter beside it where the model is tuned by adapters (LoRA, arXiv 2106.09685 §4.1)."""

from __future__ import annotations

from torch import Tensor, nn

# Adapters' output is scaled by alpha / rank; alpha of twice the rank, as common recipes have it.
ADAPTER_SCALE = 2.0


def make_projection(in_width: int, out_width: int, *, bias: bool, adapter_rank: int = 0) -> nn.Module:
    """``(..., in_width) -> (..., out_width)``."""
    if adapter_rank:
        return AdaptedLinear(in_width, out_width, bias=bias, rank=adapter_rank)
    return nn.Linear(in_width, out_width, bias=bias)


class AdaptedLinear(nn.Module):
    """``base(x) + scale * widen(narrow(x))``; who builds the model freezes the base."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(in_width, out_width, bias=bias)
        self.narrow = nn.Linear(in_width, rank, bias=False)
        self.widen = nn.Linear(rank, out_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both paths added."""
        return self.base(x) + self.widen(self.narrow(x) * ADAPTER_SCALE)


def freeze_base(model: nn.Module) -> None:
    """Only the adapters stay trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("narrow.weight", "widen.weight")))
