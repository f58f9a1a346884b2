"""The units of one stage as one module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class StageModule(nn.Module):
    """A chain of units, keyed by unit number. ``labels`` go to the last unit of the model, which returns the mean loss."""

    def __init__(self, units: Mapping[int, nn.Module], *, has_loss: bool) -> None:
        super().__init__()
        self.units = nn.ModuleDict({str(number): unit for number, unit in units.items()})
        self.has_loss = has_loss

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token ids (B, S) or hidden states (B, S, H) to hidden states, or to the loss where the stage ends the model."""
        *body, last = self.units.values()
        hidden = inputs
        for unit in body:
            hidden = unit(hidden)
        return last(hidden, labels) if self.has_loss else last(hidden)
