"""OpSharding: how the ops of one block are placed on a device mesh, what each choice costs and its nearest other one."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from specs.base import Document, Spec


class OpChoice(Spec):
    """Ops that are placed together. States have one word a mesh axis: ``R`` whole, ``S(d)`` split along dim d, ``S(experts)``
    split by expert, ``P`` terms of a sum."""

    ops: tuple[str, ...]
    params: dict[str, str] = Field(default={}, description="state of each parameter")
    inputs: dict[str, str] = Field(default={}, description="state of each activation as it is read")
    outputs: dict[str, str] = {}
    seconds: float = Field(description="forward and backward of one pass, with its share of the sum of gradients")
    compute_s: float
    state_bytes: float = Field(default=0.0, description="weights, gradients and optimizer states of the parameters on one rank")
    gathered: bool = Field(default=False, description="parameters are split further and gathered for each pass (ZeRO 3)")
    alternative: str | None = Field(default=None, description="the cheapest placement of these ops alone that is another one")
    alternative_extra_s: float | None = Field(
        default=None, description="what it would add to the block, all other ops as they are, changes of state included"
    )


class Redistribution(Spec):
    """A tensor that changes its state between two choices. ``collectives``: e.g. ``forward all_gather over tp``."""

    tensor: str
    before: str
    after: str
    seconds: float
    collectives: tuple[str, ...] = ()
    sizes_bytes: tuple[float, ...] = Field(default=(), description="of each collective, in the order of collectives")


class OpSharding(Document):
    """The placement of one block. Seconds are of one pass (one micro-batch) forward and backward on one rank."""

    kind: ClassVar[str] = "op sharding"
    block: str
    mesh: dict[str, int] = Field(description="axis -> ranks, the last varies fastest")
    batch: int = Field(description="sequences in the micro-batch of the whole mesh")
    seq_len: int
    status: str = Field(description="optimal | feasible | infeasible | unknown")
    seconds: float | None = None
    best_bound_s: float | None = None
    compute_s: float | None = None
    memory_bytes: float | None = Field(default=None, description="states, and what the passes in flight keep for backward")
    memory_limit_bytes: float | None = None
    least_memory_bytes: float | None = Field(
        default=None, description="of an infeasible question: what the least hungry placement needs"
    )
    choices: tuple[OpChoice, ...] = ()
    redistributions: tuple[Redistribution, ...] = ()
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    unknown_ops: tuple[str, ...] = Field(default=(), description="ops without a rule: kept whole on every rank")
    num_variables: int = 0
    num_constraints: int = 0
    wall_s: float = 0.0

    def params(self) -> dict[str, str]:
        """State of every parameter of the block."""
        return {name: text for choice in self.choices for name, text in choice.params.items()}
