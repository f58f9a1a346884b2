"""Tensor parallelism by parameter placements: any module whose products are ``nn.Linear`` (or stacked expert weights).

``weight S(0)`` makes a linear column-parallel, ``S(1)`` row-parallel; an embedding table ``S(0)`` and the head before a cross
entropy are split over the vocabulary. Products that share an input tensor gather it (or reduce its gradient) once.

Linears and ``nn.Embedding`` become modules of this file with the same parameter names. What a unit computes with a bare
parameter (``F.embedding(ids, self.weight)``, a grouped product) and its cross entropy are caught while that unit's forward runs,
by the parameter's identity.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor.params import MetaParameters, ParamPlace, local_shape, shard_bounds
from executor.tp_functions import TpContext, copy, gather, reduce, scatter, vocab_parallel_cross_entropy
from specs.errors import InvalidInput, Violation

_ENTERED = "_is_inside_parallel_region"


class SharedInput:
    """Enters the parallel region once per input tensor: q, k and v (gate and up) that read the same tensor share the result."""

    def __init__(self, tp: TpContext) -> None:
        self.tp = tp
        self._source: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """``x`` as column-parallel products read it."""
        if getattr(x, _ENTERED, False):
            return x
        if self._source is not None and self._source() is x and self._entered is not None:
            return self._entered
        entered = gather(x, self.tp) if self.tp.sequence_parallel else copy(x, self.tp)
        setattr(entered, _ENTERED, True)
        self._source, self._entered = weakref.ref(x), entered
        return entered

    def enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook of a module that takes its sizes from its input and so must see the whole sequence."""
        return (self.enter(args[0]), *args[1:])

    def leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Forward hook of a module whose output is a partial sum as a whole."""
        return self.leave(output)

    def leave(self, x: Tensor) -> Tensor:
        """A partial sum, made whole (or split along the sequence)."""
        self.forget()
        return scatter(x, self.tp) if self.tp.sequence_parallel else reduce(x, self.tp)

    def forget(self) -> None:
        """Let go of the last input."""
        self._source = self._entered = None


class ColumnParallelLinear(nn.Module):
    """Some of the outputs: ``(B, S, in) -> (B, S, out / tp)``."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, shared: SharedInput) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Enter (shared with the other products that read ``x``) and multiply."""
        return F.linear(self.shared.enter(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A part of the sum over the inputs: ``(B, S, in / tp) -> (B, S, out)``. The bias is added to the complete sum.
    ``stays_partial``: a module around it makes the sum complete."""

    stays_partial = False

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, shared: SharedInput) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and reduce."""
        if self.stays_partial:
            return F.linear(x, self.weight)
        whole = self.shared.leave(F.linear(x, self.weight))
        return whole if self.bias is None else whole + self.bias


def vocab_parallel_embedding(ids: Tensor, weight: Tensor, first: int, shared: SharedInput) -> Tensor:
    """Rows of a table that is split over the vocabulary and starts here at ``first``: ``(B, S) -> (B, S, H)``."""
    index = ids - first
    outside = (index < 0) | (index >= weight.shape[0])
    rows = F.embedding(index.masked_fill(outside, 0), weight)
    return shared.leave(rows.masked_fill(outside.unsqueeze(-1), 0.0))


class VocabParallelEmbedding(nn.Module):
    """``nn.Embedding`` split over the vocabulary."""

    def __init__(self, weight: nn.Parameter, first: int, shared: SharedInput) -> None:
        super().__init__()
        self.weight, self.first, self.shared = weight, first, shared

    def forward(self, ids: Tensor) -> Tensor:
        """Look up what is here and add the other ranks' rows."""
        return vocab_parallel_embedding(ids, self.weight, self.first, self.shared)


class SequenceSlicedEmbedding(nn.Module):
    """A whole table (learned positions) under sequence parallel: only this rank's part of the sequence is looked up."""

    def __init__(self, weight: nn.Parameter, tp: TpContext) -> None:
        super().__init__()
        self.weight, self.tp = weight, tp

    def forward(self, ids: Tensor) -> Tensor:
        """``(..., S) -> (..., S / tp, H)``."""
        part = ids.shape[-1] // self.tp.size
        return F.embedding(ids.narrow(-1, self.tp.rank * part, part), self.weight)


class ParallelUnit(nn.Module):
    """A unit whose forward computes with split parameters directly, or holds the loss."""

    def __init__(self, unit: nn.Module, places: Sequence[ParamPlace], vocab: int | None, shared: SharedInput) -> None:
        super().__init__()
        self.unit = unit
        self._places = [(place.module, place.name, place.tp_dim, place.full_shape) for place in places]
        self._vocab, self._shared = vocab, shared

    def forward(self, *args: Tensor) -> Tensor:
        """The unit's forward, with those calls replaced."""
        split = {id(module._parameters[name]): (dim, shape) for module, name, dim, shape in self._places}
        try:
            with _ParallelCalls(split, self._vocab, self._shared):
                return self.unit(*args)
        finally:
            self._shared.forget()


class _ParallelCalls(TorchFunctionMode):
    """Replaces embedding, grouped product and cross entropy on split parameters while a unit runs."""

    def __init__(self, split: dict[int, tuple[int | None, tuple[int, ...]]], vocab: int | None, shared: SharedInput) -> None:
        super().__init__()
        self._split, self._vocab, self._shared = split, vocab, shared

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy and self._vocab is not None:
            return self._cross_entropy(*args, **(kwargs or {}))
        if len(args) > 1 and id(args[1]) in self._split:
            dim, shape = self._split[id(args[1])]
            if func is F.embedding and dim == 0:
                first, _ = shard_bounds(shape[0], self._shared.tp.rank, self._shared.tp.size)
                return vocab_parallel_embedding(args[0], args[1], first, self._shared)
            if func is torch._grouped_mm and self._shared.tp.sequence_parallel:
                return func(*args, **(kwargs or {}))  # the mixture around it enters and leaves
            if func is torch._grouped_mm and dim == 2:
                return func(self._shared.enter(args[0]), *args[1:], **(kwargs or {}))
            if func is torch._grouped_mm and dim == 1:
                return self._shared.leave(func(*args, **(kwargs or {})))
            raise RuntimeError(
                f"tensor parallel has no rule for {getattr(func, '__name__', func)} on a parameter split along {dim}"
            )
        return func(*args, **(kwargs or {}))

    def _cross_entropy(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        changed = {key for key, value in options.items() if _CROSS_ENTROPY_DEFAULTS.get(key) != value}
        if changed:
            raise RuntimeError(f"the vocabulary-parallel cross entropy takes no {', '.join(sorted(changed))}")
        tp = self._shared.tp
        first, stop = shard_bounds(self._vocab or 0, tp.rank, tp.size)
        if logits.shape[-1] != stop - first:
            raise RuntimeError(f"logits of {logits.shape[-1]} columns, but this rank holds {stop - first} of {self._vocab} entries")
        return vocab_parallel_cross_entropy(logits, labels, first, tp)


_CROSS_ENTROPY_DEFAULTS = {
    "weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip


def apply_tensor_parallel(
    units: dict[int, nn.Module], places: list[ParamPlace], tp: TpContext, meta: MetaParameters, *, functional_units: set[int],
    token_wise: Set[str] = frozenset(),
) -> None:  # fmt: skip
    """Shrink the split parameters of ``units`` (on ``meta``) and make their modules parallel. ``places`` is kept up to date.

    ``functional_units``: units under selective recompute. ``token_wise``: names of whole weights whose product runs on each rank's
    part of the sequence. Raises :class:`InvalidInput` with every placement that has no rule.
    """
    shared = SharedInput(tp)
    functional = SharedInput(dataclasses.replace(tp, functional=True))
    violations: list[Violation] = []
    for number, unit in units.items():
        own = [place for place in places if place.unit == number]
        converter = _UnitConverter(unit, own, functional if number in functional_units else shared, meta, token_wise)
        units[number] = converter.run()
        violations += converter.violations
    if violations:
        raise InvalidInput(violations, subject="tensor-parallel placements")


class _UnitConverter:
    """Converts one unit; keeps going after a violation so that all are reported."""

    def __init__(
        self, unit: nn.Module, places: list[ParamPlace], shared: SharedInput, meta: MetaParameters, token_wise: Set[str]
    ) -> None:
        self.unit, self.places, self.shared, self.meta, self.token_wise = unit, places, shared, meta, token_wise
        self.violations: list[Violation] = []

    def run(self) -> nn.Module:
        """The unit that stands for the old one."""
        tp = self.shared.tp
        for place in self.places:
            if place.tp_dim is not None:
                self._check_divisible(place)
                shape = local_shape(place.full_shape, place.tp_dim, tp.rank, tp.size)
                place.module._parameters[place.name] = self.meta.replace(place.parameter, shape)
        bare, vocab = [], None
        mixtures = self._mixtures()
        inside = {id(part) for mixture in mixtures for part in mixture.modules()}
        for module in {id(place.module): place.module for place in self.places}.values():
            own = {place.name: place for place in self.places if place.module is module}
            replacement = self._replacement(module, own, in_mixture=id(module) in inside)
            if replacement is not None:
                self._replace(module, replacement, own)
                weight = own["weight"]
                if isinstance(module, nn.Linear) and weight.tp_dim == 0 and self._is_tail():
                    vocab = weight.full_shape[0]
            else:
                bare += [place for place in own.values() if place.tp_dim is not None]
        self._enter_whole_modules()
        for mixture in mixtures:
            self._surround(mixture)
        return ParallelUnit(self.unit, bare, vocab, self.shared) if bare or vocab is not None else self.unit

    def _enter_whole_modules(self) -> None:
        """Under sequence parallel a submodule that owns column-parallel products (an attention, an MLP) is entered as a whole:
        it may read the length of the sequence off its input. Products that the unit owns itself are entered one by one."""
        if not self.shared.tp.sequence_parallel:
            return
        for parent in self.unit.modules():
            if parent is not self.unit and any(isinstance(child, ColumnParallelLinear) for child in parent.children()):
                parent.register_forward_pre_hook(self.shared.enter_module)

    def _mixtures(self) -> list[nn.Module]:
        """Under sequence parallel: the modules that route tokens to experts that are split over tp."""
        if not self.shared.tp.sequence_parallel:
            return []
        stacked = {id(place.module) for place in self.places if place.tp_dim is not None and len(place.full_shape) == 3}
        return [part for part in self.unit.modules() if any(id(child) in stacked for child in part.children())]

    def _surround(self, mixture: nn.Module) -> None:
        """Every rank routes the whole sequence and computes a part of each expert, so that the output, and with it the gradient of
        everything inside, is a partial sum. It is completed once, at the end."""
        if mixture is self.unit:
            self._violation(self.places[0], "sequence parallel needs the experts in a module of their own within the unit")
            return
        for part in mixture.modules():
            if isinstance(part, RowParallelLinear):
                part.stays_partial = True
            biased = isinstance(part, (nn.Linear, RowParallelLinear)) and part.bias is not None
            if biased:  # every rank would add it
                self._violation(
                    self.places[0], "sequence parallel of a mixture of experts has no rule for a bias after its experts"
                )
        mixture.register_forward_pre_hook(self.shared.enter_module)
        mixture.register_forward_hook(self.shared.leave_module)

    def _is_tail(self) -> bool:
        """The unit that computes the loss has no row-parallel product after its head."""
        return not any(place.tp_dim == 1 for place in self.places)

    def _replacement(self, module: nn.Module, own: dict[str, ParamPlace], *, in_mixture: bool) -> nn.Module | None:
        tp = self.shared.tp
        weight = own.get("weight")
        if isinstance(module, nn.Linear) and weight is not None and weight.tp_dim == 0:
            return ColumnParallelLinear(module.weight, module.bias, self.shared)
        if isinstance(module, nn.Linear) and weight is not None and weight.tp_dim == 1:
            return RowParallelLinear(module.weight, module.bias, self.shared)
        whole_is_fine = in_mixture or own[next(iter(own))].fqn in self.token_wise
        if isinstance(module, nn.Linear) and tp.sequence_parallel and not whole_is_fine:
            self._violation(own["weight"], "sequence parallel needs every product split; this linear is replicated")
        if isinstance(module, nn.Embedding) and weight is not None and weight.tp_dim == 0:
            first, _ = shard_bounds(weight.full_shape[0], tp.rank, tp.size)
            return VocabParallelEmbedding(module.weight, first, self.shared)
        if isinstance(module, nn.Embedding) and tp.sequence_parallel:
            return SequenceSlicedEmbedding(module.weight, tp)
        if isinstance(module, nn.Embedding) and weight is not None and weight.tp_dim is not None:
            self._violation(weight, "an embedding can only be split over the vocabulary, S(0)")
        return None

    def _replace(self, old: nn.Module, new: nn.Module, own: dict[str, ParamPlace]) -> None:
        new.train(old.training)
        for parent in list(self.unit.modules()):
            for name, child in list(parent._modules.items()):
                if child is old:
                    parent._modules[name] = new
        if old is self.unit:
            self.unit = new
        for place in own.values():
            place.module = new

    def _check_divisible(self, place: ParamPlace) -> None:
        size, tp = place.full_shape[place.tp_dim or 0], self.shared.tp.size
        is_vocabulary = place.tp_dim == 0 and self._is_tail()
        if size % tp and not is_vocabulary:
            self._violation(place, f"dim {place.tp_dim} of size {size} is no multiple of tp {tp}")
        elif is_vocabulary and shard_bounds(size, tp - 1, tp)[0] >= size:
            self._violation(place, f"vocabulary of {size} leaves a rank of tp {tp} without an entry")

    def _violation(self, place: ParamPlace, message: str) -> None:
        self.violations.append(
            Violation(
                code="tp_placement", message=f"{place.fqn}: {message}", loc=("pipelines", 0, "stages", "placements", place.fqn)
            )
        )
