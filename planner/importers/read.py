"""The one door: :func:`read_config` reads a framework's config text as a strategy."""

from __future__ import annotations

from collections.abc import Callable

from planner.importers import accelerate, deepspeed, megatron, nanotron, neox, torchtitan
from specs.errors import InvalidInput, nearest_name
from specs.interchange import FRAMEWORKS, Imported

MAX_TEXT_CHARS = 1_000_000
_READERS: dict[str, Callable[[str], Imported]] = {
    "megatron": megatron.read, "deepspeed": deepspeed.read, "accelerate": accelerate.read, "torchtitan": torchtitan.read,
    "nanotron": nanotron.read, "neox": neox.read,
}  # fmt: skip


def read_config(text: str, framework: str) -> Imported:
    """What a config of ``framework`` asks for. The text is data: nothing of it is opened, imported or run.

    Raises :class:`InvalidInput` when the text does not parse or holds values that no framework takes, all of them at once.
    """
    if framework not in _READERS:
        raise InvalidInput.single(
            "unknown_framework", f"there is no importer from '{framework}'", actual=framework, allowed=list(FRAMEWORKS),
            nearest=nearest_name(framework, FRAMEWORKS), subject="import",
        )  # fmt: skip
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidInput.single(
            "config_too_long", f"the config has {len(text):,} characters", actual=len(text), allowed=f"<= {MAX_TEXT_CHARS:,}",
            subject="import",
        )  # fmt: skip
    return _READERS[framework](text)
