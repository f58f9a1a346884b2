"""JSON forms of documents."""

from __future__ import annotations

from typing import Any

from specs.base import Document


def full(document: Document) -> dict[str, Any]:
    """JSON form with every key, defaults too: what programs read, where ``to_dict`` leaves defaults out."""
    return document.model_dump(mode="json")
