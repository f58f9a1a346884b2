"""Typed reading of a Hugging Face config that collects every violation instead of stopping at the first. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specs.errors import InvalidInput, Violation, nearest_name, nearest_number

REQUIRED = object()
MAX_SIZE = 2**31


class ConfigReader:
    """Reads keys of one config. A method returns ``None`` where it recorded a violation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.violations: list[Violation] = []
        self._used = {"model_type", "architectures"}
        self._key_of: dict[str, str] = {}

    @property
    def architecture(self) -> str:
        """The config's ``model_type``, or its first architecture class."""
        return str(self.config.get("model_type") or next(iter(self.config.get("architectures") or ["decoder"])))

    def key_of(self, field: str) -> str:
        """The config's own key behind one of our field names."""
        return self._key_of.get(field, field)

    def unused(self) -> dict[str, Any]:
        """Keys that nothing read, kept for the record."""
        return {key: value for key, value in self.config.items() if key not in self._used}

    def mark_used(self, *keys: str) -> None:
        """Keys that the caller reads from ``config`` itself."""
        self._used.update(keys)

    def violation(self, code: str, message: str, *, key: str, actual: Any = None, allowed: Any = None, nearest: Any = None) -> None:
        """Record a broken rule at ``key``."""
        self.violations.append(Violation(code=code, message=message, loc=(key,), actual=actual, allowed=allowed, nearest=nearest))

    def raise_if_invalid(self, subject: str) -> None:
        """Raise :class:`InvalidInput` with everything recorded so far."""
        if self.violations:
            raise InvalidInput(self.violations, subject=subject)

    def integer(self, field: str, *keys: str, default: Any = REQUIRED, maximum: int = MAX_SIZE) -> int | None:
        """A whole number from 1 to ``maximum`` under the first of ``keys`` that is there."""
        key, value = self._find(field, keys, default)
        if value is REQUIRED or value is None:
            if not (value is None and default is None):
                self._missing(key, "a whole number", value)
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            self.violation("wrong_type", f"needs a whole number, not {value!r}", key=key, actual=_plain(value))
            return None
        if not 1 <= value <= maximum:
            limit = 1 if value < 1 else maximum
            self.violation(
                "out_of_range", f"{value} is out of range", key=key, actual=value, allowed=f"1 to {maximum}", nearest=limit
            )
            return None
        return value

    def optional_integer(self, field: str, *keys: str, default: int | None) -> int | None:
        """Like :meth:`integer`, where ``null`` means none rather than the default."""
        key, value = self._find(field, keys, default)
        if value is None or (key in self.config and self.config[key] is None):
            return None
        return self.integer(field, key, default=default)

    def number(self, field: str, *keys: str, default: float) -> float | None:
        """A positive number."""
        key, value = self._find(field, keys, default)
        return self._positive(key, value)

    def rope_number(self, field: str, key: str, nested: str, *, default: float) -> float | None:
        """A positive RoPE number: top-level ``key``, or ``rope_parameters.nested`` as newer configs write it."""
        parameters = self.config.get("rope_parameters")
        if isinstance(parameters, Mapping) and nested in parameters:
            return self._positive(f"rope_parameters.{nested}", parameters[nested])
        return self.number(field, key, default=default)

    def boolean(self, field: str, key: str, *, default: bool) -> bool | None:
        """True or false."""
        _, value = self._find(field, (key,), default)
        if not isinstance(value, bool):
            self.violation(
                "wrong_type", f"needs true or false, not {value!r}", key=key, actual=_plain(value), allowed=[True, False]
            )
            return None
        return value

    def choice(self, field: str, key: str, options: Mapping[str, Any], *, default: str) -> Any:
        """What ``options`` says for the text under ``key``."""
        _, value = self._find(field, (key,), default)
        if isinstance(value, str) and value in options:
            return options[value]
        nearest = nearest_name(value, options) if isinstance(value, str) else None
        self.violation(
            "unsupported_value", f"{value!r} is not supported", key=key, actual=_plain(value), allowed=sorted(options),
            nearest=nearest,
        )  # fmt: skip
        return None

    def head_dim(self, hidden: int | None, heads: int | None, *, own_key: bool = True) -> int | None:
        """``head_dim`` where the config gives it, else hidden / heads, which must be whole."""
        if own_key and self.config.get("head_dim") is not None:
            return self.integer("head_dim", "head_dim")
        if own_key:
            self._used.add("head_dim")
        if not hidden or not heads:
            return None
        if hidden % heads:
            key = self.key_of("hidden")
            self._key_of["head_dim"] = key
            divisors = [n for n in range(1, min(hidden, 4096) + 1) if hidden % n == 0]
            self.violation(
                "hidden_divisible_by_heads", f"hidden size {hidden} is no multiple of {heads} heads", key=self.key_of("heads"),
                actual=heads, allowed=divisors, nearest=nearest_number(heads, divisors),
            )  # fmt: skip
            return None
        self._key_of.setdefault("head_dim", self.key_of("heads"))
        return hidden // heads

    def refuse_true(self, key: str, why: str) -> None:
        """Record a violation when a switch that we can't honour is on."""
        self._used.add(key)
        if self.config.get(key):
            self.violation("unsupported_value", why, key=key, actual=_plain(self.config[key]), allowed=[False])

    def _find(self, field: str, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        present = [key for key in keys if key in self.config]
        self._used.update(present)
        key = present[0] if present else keys[0]
        self._key_of[field] = key
        value = self.config.get(key, default)
        # null stands for "use the default" in published configs
        return key, default if value is None and default is not REQUIRED else value

    def _missing(self, key: str, what: str, value: Any) -> None:
        word = "is missing" if value is REQUIRED else "is null"
        nearest = nearest_name(key, [other for other in self.config if other not in self._used])
        self.violation("missing_key", f"'{key}' {word}; it needs {what}", key=key, nearest=nearest)

    def _positive(self, key: str, value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.violation("wrong_type", f"needs a number, not {value!r}", key=key, actual=_plain(value))
            return None
        if not 0 < value < float("inf"):
            self.violation("out_of_range", f"{value} is out of range", key=key, actual=value, allowed="more than 0")
            return None
        return float(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
