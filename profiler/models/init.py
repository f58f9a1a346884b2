"""Deterministic initial values: a parameter depends on its name and the seed only, never on how or where it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

INIT_STD = 0.02


def init_tensor(fqn: str, shape: Sequence[int], seed: int, *, std: float = INIT_STD) -> Tensor:
    """The full float32 CPU tensor that parameter ``fqn`` starts from; the caller keeps its shard.

    Norm weights are ones, biases zeros, everything else normal with deviation ``std`` from a generator seeded by
    SHA-256 of the seed and the name. A tied parameter is drawn by its owner's name.
    """
    *modules, leaf = fqn.split(".")
    if leaf == "bias":
        return torch.zeros(tuple(shape))
    if leaf == "norm_weight" or (leaf == "weight" and modules and "norm" in modules[-1].lower()):
        return torch.ones(tuple(shape))
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_parameters(module: nn.Module, seed: int, *, prefix: str = "") -> None:
    """Fill every parameter of an unsharded ``module`` in place; ``prefix`` (``layers.3.``) completes the names of a part."""
    for name, parameter in module.named_parameters():
        parameter.copy_(init_tensor(prefix + name, parameter.shape, seed))


def reset_buffers(module: nn.Module) -> None:
    """Recompute the non-persistent buffers of a module and everything in it, after ``to_empty``."""
    own = getattr(module, "reset_buffers", None)
    if callable(own):
        own()
        return
    for child in module.children():
        reset_buffers(child)
