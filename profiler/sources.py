"""Where models come from: a Hugging Face config, a stored graph, a preset, or code on this machine.

Torch is imported only where something is captured or built, not to load a stored graph.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.hf import adapt
from profiler.pricing import price_graph
from specs.base import read_mapping
from specs.errors import InvalidInput, nearest_name
from specs.graph import ModelGraph

if TYPE_CHECKING:
    from torch import nn

FILE_SUFFIXES = (".json", ".yaml", ".yml", ".toml")
PRESETS = "models"


def load_model(text: str) -> ModelGraph:
    """The graph that ``text`` names: a file (config or graph), a directory with ``config.json``, a preset name, or
    ``package.module:factory``.

    A factory is a callable without arguments that returns ``(module, example_args)``, ``(module, example_args, dynamic)`` (see
    :func:`profiler.capture.capture_module`), or a decoder: a module with ``unit_modules()`` that takes ``(tokens, labels)``.
    It runs in this process, so only the command line passes one on.

    Raises :class:`InvalidInput` with the nearest preset where nothing of that name exists.
    """
    path = Path(text).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.is_file() or path.suffix in FILE_SUFFIXES:
        return model_from_document(read_mapping(path), name=_name_of(path), subject=str(path))
    if text in preset_names():
        return model_from_document(read_preset(text), name=text, subject=f"preset {text}")
    if ":" in text:
        return _from_factory(text)
    presets = preset_names()
    raise InvalidInput.single(
        "unknown_model",
        f"'{text}' is no file, no preset and no package.module:factory",
        subject="model",
        actual=text,
        allowed=presets,
        nearest=nearest_name(text, presets),
    )


def model_from_document(document: Any, *, name: str, subject: str = "model") -> ModelGraph:
    """The graph of a parsed document: a stored graph, or a Hugging Face config to capture.

    A graph that comes without costs gets them from the op table.
    """
    if not isinstance(document, Mapping):
        raise InvalidInput.single("not_a_mapping", "a model document is a mapping of keys to values", subject=subject)
    if "segments" in document or "blocks" in document:
        graph = ModelGraph.parse(dict(document), subject=subject)
        return graph if _has_costs(graph) else price_graph(graph)
    if "model_type" in document or "architectures" in document:
        from profiler.capture import capture_config

        return capture_config(document, str(document.get("name") or document.get("_name_or_path") or name))
    raise InvalidInput.single(
        "unknown_model_document",
        "this is neither a Hugging Face config nor a model graph",
        subject=subject,
        allowed=["a config.json with 'model_type'", "a model graph with 'blocks' and 'segments'"],
    )


def preset_names() -> list[str]:
    """Names of the built-in model configs."""
    folder = resources.files("traces").joinpath(PRESETS)
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def read_preset(name: str) -> dict[str, Any]:
    """The Hugging Face config of a preset."""
    data: dict[str, Any] = json.loads(resources.files("traces").joinpath(PRESETS, f"{name}.json").read_text())
    return data


def model_from_graph(graph: ModelGraph, *, allow_factory: bool = False) -> nn.Module:
    """The module behind a graph, on ``meta``: rebuilt from its config, or from its factory where ``allow_factory`` says that
    the graph is trusted to name code (never for one that came over the network).

    Raises :class:`InvalidInput` for a graph that names neither: it can be planned and simulated, not executed.
    """
    import torch

    config, factory = graph.attributes.get("hf_config"), graph.attributes.get("factory")
    if isinstance(config, Mapping):
        from profiler.models import build_model

        with torch.device("meta"):
            return build_model(adapt(config, subject=f"model {graph.name}"))
    if isinstance(factory, str) and allow_factory:
        return _call_factory(factory)[0].to("meta")
    if isinstance(factory, str):
        message = f"this graph names code to run ('{factory}'), which is allowed from the command line only"
        raise InvalidInput.single("code_not_allowed", message, subject=f"model {graph.name}", loc=("attributes", "factory"))
    raise InvalidInput.single(
        "not_executable",
        "this graph holds ops only, neither 'hf_config' nor 'factory' in its attributes, so there is no module to run; "
        "it can be planned and simulated",
        subject=f"model {graph.name}",
        loc=("attributes",),
    )


# --- code on this machine -------------------------------------------------------------------------------------------


def _from_factory(text: str) -> ModelGraph:
    from profiler.capture import capture_module, decoder_attributes, example_tokens
    from profiler.hf import DecoderConfig

    module, example_args, dynamic = _call_factory(text)
    attributes: dict[str, Any] = {"factory": text}
    settings = getattr(module, "config", None)
    if isinstance(settings, DecoderConfig):
        attributes.update(decoder_attributes(settings))
    name = text.rpartition(":")[2]
    device = next((parameter.device for parameter in module.parameters()), "cpu")
    args = example_tokens(device) if example_args is None else _on_device(example_args, device)
    return capture_module(module, args, dynamic, name, attributes=attributes).replace(source="factory")


def _call_factory(text: str) -> tuple[nn.Module, Any, Any]:
    """Module, example arguments (``None`` for a decoder), and dynamic dims (``None`` for the default)."""
    from torch import nn

    made = _made(_resolve(text), text)
    if isinstance(made, nn.Module) and callable(getattr(made, "unit_modules", None)):
        return made, None, None
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        return made[0], made[1], made[2] if len(made) == 3 else None
    what = f"a {type(made).__name__}"
    if isinstance(made, nn.Module):
        what = f"a {type(made).__name__} without unit_modules()"
    raise _bad_factory(
        text, "wrong_factory_result",
        f"the factory returned {what}; it must return (module, example_args), (module, example_args, dynamic), or a decoder "
        "module with unit_modules() that takes (tokens, labels)",
    )  # fmt: skip


def _made(factory: Any, text: str) -> Any:
    """What the factory returns, built on ``meta``; code that computes with values while building runs on the CPU."""
    import torch

    try:
        with torch.device("meta"):
            return factory()
    except Exception:  # meta has no values; whether that was the reason shows when it runs again
        try:
            return factory()
        except Exception as error:  # whatever the user's code raises is the user's to read
            raise _bad_factory(text, "factory_failed", f"the factory raised {type(error).__name__}: {error}") from error


def _resolve(text: str) -> Any:
    module_name, _, attribute = text.partition(":")
    with _working_directory_on_path():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # importing runs the user's module
            raise _bad_factory(text, "import_failed", f"can't import '{module_name}': {error}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            raise _bad_factory(text, "unknown_factory", f"'{module_name}' has no '{attribute}'", nearest=nearest_name(part, names))
        target = getattr(target, part)
    if not callable(target):
        raise _bad_factory(text, "not_callable", f"'{attribute}' of '{module_name}' is no callable")
    return target


def _bad_factory(text: str, code: str, message: str, **fields: Any) -> InvalidInput:
    return InvalidInput.single(code, message, subject=f"model {text}", **fields)


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """The user's own modules in the current directory can be imported, as with ``python -m``."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _on_device(example_args: Any, device: Any) -> Any:
    """Example tensors where the module is; everything else as it is."""
    from torch import Tensor

    if isinstance(example_args, Mapping):
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in example_args.items()}
    values = example_args if isinstance(example_args, (tuple, list)) else (example_args,)
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in values)


def _has_costs(graph: ModelGraph) -> bool:
    return any(op.forward_bytes.terms or op.forward_flop.terms for block in graph.blocks for op in block.ops)


def _name_of(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem
