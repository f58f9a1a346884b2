"""From a module or a Hugging Face config to a :class:`ModelGraph`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from profiler.capture_export import Axes, export_module
from profiler.capture_store import stored_capture
from profiler.capture_trace import trace_of
from profiler.fold import fold
from profiler.hf import DecoderConfig, adapt
from profiler.layer_chain import all_layers, few_layers
from profiler.models import build_model
from profiler.pricing import price_graph
from specs.graph import ModelGraph

EXAMPLE_BATCH, EXAMPLE_SEQ = 3, 24


def capture_module(
    model: nn.Module,
    example_args: Any,
    dynamic: Axes | None = None,
    name: str = "model",
    *,
    attributes: Mapping[str, Any] | None = None,
) -> ModelGraph:
    """The op graph of one training forward of ``model``, which returns the mean loss, a scalar (or that first).

    ``example_args``: a tuple of positional or a dict of keyword tensors; only their shapes and dtypes count. ``dynamic``:
    ``{"tokens": {0: "B", 1: "S"}}``, which dims are batch and sequence; by default dim 0 of every tensor is the batch and
    dim 1 of integer matrices the sequence. Nothing is computed: the module may live on ``meta``. A module with
    ``unit_names()`` is cut into those units, any other one at its repeated containers.

    Raises :class:`InvalidInput` where ``torch.export`` can't trace the module, or a size is no polynomial in B and S.
    """
    program, axes = export_module(model, example_args, dynamic, name)
    trace = trace_of(program, model, axes, name)
    names = getattr(model, "unit_names", None)
    prefixes = list(names()) if callable(names) else None
    graph = fold(trace, name=name, source="module", unit_prefixes=prefixes, attributes=attributes)
    return price_graph(graph)


def capture_config(config: Mapping[str, Any], name: str) -> ModelGraph:
    """The op graph of the decoder that a Hugging Face config describes.

    Two layers of each kind are captured and put together as the config says. The config itself is kept in
    ``attributes["hf_config"]``, our reading of it beside it.
    """
    settings = adapt(config, subject=f"model {name}")
    graph = all_layers(captured_layers(settings), settings)
    return graph.replace(
        name=name, source="hf_config", attributes={**graph.attributes, "hf_config": dict(config), **decoder_attributes(settings)}
    )


def captured_layers(settings: DecoderConfig) -> ModelGraph:
    """The capture of a decoder with two layers of each kind, kept by its settings, on disk too."""
    return _captured(few_layers(settings).model_dump_json())


def decoder_attributes(settings: DecoderConfig) -> dict[str, Any]:
    """The numbers of a decoder that validators and reports ask for, by field name of :class:`DecoderConfig`."""
    return settings.model_dump(mode="json", exclude={"other"})


def example_tokens(device: torch.device | str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    """Example ``(tokens, labels)`` for a decoder."""
    shape = (EXAMPLE_BATCH, EXAMPLE_SEQ)
    return torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, dtype=torch.int64, device=device)


@lru_cache(maxsize=64)
def _captured(settings_json: str) -> ModelGraph:
    def capture() -> ModelGraph:
        with torch.device("meta"):
            model = build_model(DecoderConfig.model_validate_json(settings_json))
        return capture_module(model, example_tokens(), name="decoder")

    return stored_capture(settings_json, capture)
