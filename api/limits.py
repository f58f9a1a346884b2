"""Sizes that a posted document may have, checked before anything walks it."""

from __future__ import annotations

from typing import Any

from api.settings import Settings
from specs.errors import InvalidInput, Violation

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


def check_size(kind: str, data: dict[str, Any], settings: Settings) -> None:
    """Raise :class:`InvalidInput` for a document that is too deep, or a model with too many ops or units."""
    if _too_deep(data, settings.max_depth):
        raise InvalidInput.single(
            "too_deep",
            f"the document is nested more than {settings.max_depth} deep",
            allowed=f"<= {settings.max_depth}",
            subject=kind,
        )
    if kind == "model":
        found = _model_violations(data, settings)
        if found:
            raise InvalidInput(found, subject=kind)


def _too_deep(data: Any, limit: int) -> bool:
    level: list[Any] = [data]
    for _ in range(limit):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, (dict, list))
        ]  # fmt: skip
        if not level:
            return False
    return True


def _model_violations(data: dict[str, Any], settings: Settings) -> list[Violation]:
    ops = sum(len(block["ops"]) for block in _dicts(data.get("blocks")) if isinstance(block.get("ops"), list))
    units = sum(segment["count"] for segment in _dicts(data.get("segments")) if isinstance(segment.get("count"), int))
    layers = max((data[key] for key in _LAYER_KEYS if isinstance(data.get(key), int)), default=0)
    found = []
    if ops > settings.max_graph_ops:
        found.append(_over("too_many_ops", "ops", ops, settings.max_graph_ops, ("blocks",)))
    if max(units, layers) > settings.max_units:
        found.append(_over("too_many_units", "units", max(units, layers), settings.max_units, ("segments",) if units else ()))
    return found


def _over(code: str, what: str, actual: int, limit: int, loc: tuple[str | int, ...]) -> Violation:
    message = f"the model has {actual:,} {what}, this service takes {limit:,}"
    return Violation(code=code, message=message, loc=loc, actual=actual, allowed=f"<= {limit}", nearest=limit)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
