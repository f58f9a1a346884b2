"""The optimizer on the local shards, with float32 master weights where the precision asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.data_parallel import local_tensor
from executor.params import ParamPlace, unique_params
from specs.training import Optimizer, Precision


class LocalOptimizer:
    """Steps on plain local tensors, so no tensor subclass is dispatched. State is created at the first step."""

    def __init__(self, places: Sequence[ParamPlace], settings: Optimizer, precision: Precision) -> None:
        self._places = [place for place in unique_params(places) if place.parameter.requires_grad]
        self._settings = settings
        self._master = precision.master_dtype is not None and precision.master_dtype != precision.param_dtype
        self._weights: list[Tensor] = []
        self._updated: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Gradients are kept."""
        optimizer = self._optimizer or self._create()
        for place, weight in zip(self._places, self._updated, strict=True):
            grad = place.parameter.grad
            if grad is not None and weight.numel():
                weight.grad = local_tensor(grad).to(weight.dtype)
        optimizer.step()
        for weight in self._updated:
            weight.grad = None
        if self._master:
            for weight, master in zip(self._weights, self._updated, strict=True):
                weight.copy_(master)

    def zero_grad(self) -> None:
        """Drop every gradient."""
        for place in self._places:
            place.parameter.grad = None

    def _create(self) -> torch.optim.Optimizer:
        """Not before the first step: FSDP may move its shards when the first forward pads them."""
        self._weights = [local_tensor(place.parameter).detach() for place in self._places]
        self._updated = [weight.float() for weight in self._weights] if self._master else self._weights
        self._optimizer = build_optimizer([weight for weight in self._updated if weight.numel()], self._settings)
        return self._optimizer


def build_optimizer(weights: Sequence[Tensor], settings: Optimizer) -> torch.optim.Optimizer:
    """torch's optimizer for the settings; moments start at zero."""
    tensors = list(weights) or [torch.zeros(0)]  # a rank may hold only empty shards
    rate, decay, fused = settings.learning_rate, settings.weight_decay, settings.fused
    if settings.name == "adamw":
        return torch.optim.AdamW(tensors, lr=rate, weight_decay=decay, fused=fused)
    if settings.name == "adam":
        return torch.optim.Adam(tensors, lr=rate, weight_decay=decay, fused=fused)
    momentum = 0.9 if settings.name == "momentum" else 0.0
    return torch.optim.SGD(tensors, lr=rate, momentum=momentum, weight_decay=decay, fused=fused)
