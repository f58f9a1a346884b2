"""Running ``torch.export`` on a module with batch and sequence kept symbolic."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from specs.errors import InvalidInput, nearest_name

Axes = Mapping[str, Mapping[int, str]]


def export_module(model: nn.Module, example_args: Any, dynamic: Axes | None, name: str) -> tuple[ExportedProgram, dict[str, Any]]:
    """Export the training forward of ``model``.

    ``example_args``: a tuple of positional or a dict of keyword arguments of ``forward``. ``dynamic`` says which dims of which
    argument are the batch (``"B"``) and the sequence (``"S"``); ``None`` stands for :func:`default_axes`. Returns the program
    and, by argument name, ``{dim: axis}``.
    """
    arguments = _bind(model, example_args, name)
    axes = {key: dict(value) for key, value in (default_axes(arguments) if dynamic is None else dynamic).items()}
    _check_axes(arguments, axes, name)
    arguments = {key: _example(value, axes.get(key, {})) for key, value in arguments.items()}
    # every dim gets a symbol of its own; those of one axis are the same size to us (profiler.capture_sizes)
    shapes = {key: dict.fromkeys(axes[key], Dim.DYNAMIC) if key in axes else None for key in arguments}
    try:
        return _export(model, arguments, shapes), axes
    except Exception as error:  # export raises many types of its own; each is a property of the module given
        raise _not_exportable(error, name) from error


def default_axes(arguments: Mapping[str, Any]) -> Axes:
    """Dim 0 of every tensor is the batch; dim 1 of an integer matrix (tokens, labels) is the sequence."""
    axes: dict[str, dict[int, str]] = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            tokens = value.dim() == 2 and not value.dtype.is_floating_point
            axes[key] = {0: "B", 1: "S"} if tokens else {0: "B"}
    return axes


def _bind(model: nn.Module, example_args: Any, name: str) -> dict[str, Any]:
    """Example arguments by the names of ``forward``'s parameters, in their order."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(example_args, Mapping):
            bound = signature.bind(**example_args)
        else:
            values = example_args if isinstance(example_args, (tuple, list)) else (example_args,)
            bound = signature.bind(*values)
    except TypeError as error:
        raise InvalidInput.single(
            "wrong_example_args", f"the example arguments don't fit forward{signature}: {error}", subject=f"model {name}"
        ) from None
    arguments = dict(bound.arguments)
    variadic = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) and parameter.name in arguments
    ]
    nested = [key for key, value in arguments.items() if isinstance(value, (tuple, list, dict))]
    if variadic or nested:
        raise InvalidInput.single(
            "nested_example_args",
            f"arguments {sorted({*variadic, *nested})} hold several values; forward must name each tensor as a parameter",
            subject=f"model {name}",
        )
    return arguments


def _check_axes(arguments: Mapping[str, Any], axes: Axes, name: str) -> None:
    for key, dims in axes.items():
        value = arguments.get(key)
        if not isinstance(value, Tensor):
            tensors = [other for other, item in arguments.items() if isinstance(item, Tensor)]
            raise InvalidInput.single(
                "unknown_argument", f"'{key}' is no tensor argument of forward", subject=f"model {name}", loc=("dynamic", key),
                allowed=tensors, nearest=nearest_name(key, tensors),
            )  # fmt: skip
        for dim, axis in dims.items():
            if axis not in ("B", "S") or not 0 <= dim < value.dim():
                raise InvalidInput.single(
                    "unknown_axis", f"dim {dim} of '{key}' (shape {tuple(value.shape)}) can't be axis '{axis}'",
                    subject=f"model {name}", loc=("dynamic", key, dim), allowed=["B", "S"],
                )  # fmt: skip


def _example(value: Any, dims: Mapping[int, str]) -> Any:
    """A tensor of its own for each argument: export takes one object given twice for one input, and a size of 1 for a constant,
    so an example grows to 2 along its dynamic dims."""
    if not isinstance(value, Tensor):
        return value
    return value.new_zeros([2 if index in dims and size < 2 else size for index, size in enumerate(value.shape)])


def _export(model: nn.Module, arguments: Mapping[str, Any], shapes: Mapping[str, Any]) -> ExportedProgram:
    # the cache of fake tensors costs more than it saves where most sizes are symbols
    with warnings.catch_warnings(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        warnings.simplefilter("ignore")
        return torch.export.export(model, (), dict(arguments), dynamic_shapes=dict(shapes), strict=False)


def _not_exportable(error: Exception, name: str) -> InvalidInput:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:6])[:800] or type(error).__name__
    return InvalidInput.single(
        "not_exportable",
        f"torch.export can't trace this module with symbolic batch and sequence: {reason}. The forward pass must not branch on "
        "values or fix the size of a dim that 'dynamic' names",
        subject=f"model {name}",
    )
