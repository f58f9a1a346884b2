"""Keys of a foreign config, each accounted for: understood, known to be irrelevant, or not understood."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from specs.errors import InvalidInput, Violation
from specs.interchange import Framework, Imported, ReadKey

MAX_KEYS = 20_000
FIELD_ORDER = (
    "pp", "dp", "tp", "cp", "ep", "micro_batch", "zero", "shard_group", "sequence_parallel", "recompute", "schedule", "chunks",
    "split", "loss",
)  # fmt: skip
# Fields that need no word where they say what a strategy means anyway.
_SILENT_AT_ONE = ("cp", "ep", "chunks")
WORDS = {
    "tp": "tensor parallel", "pp": "pipeline ranks", "dp": "data parallel", "cp": "context parallel", "ep": "expert parallel",
    "micro_batch": "sequences per dp rank and pass", "zero": "ZeRO stage", "sequence_parallel": "norms sharded along the sequence",
    "shard_group": "dp ranks that share one set of shards", "recompute": "recompute", "schedule": "pipeline schedule",
    "chunks": "stages per pipeline rank", "split": "units of each stage", "loss": "loss kernel",
}  # fmt: skip


def flatten(data: Any) -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values."""
    if not isinstance(data, Mapping):
        raise InvalidInput.single("not_a_mapping", f"the file holds {type(data).__name__}, not keys and values", subject="config")
    flat: dict[str, Any] = {}
    for key, value in _walk(data, ""):
        flat[key] = value
        if len(flat) > MAX_KEYS:
            raise InvalidInput.single("too_many_keys", f"the file has more than {MAX_KEYS} keys", subject="config")
    return flat


def _walk(data: Mapping[Any, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < 12:
            yield from _walk(value, name + ".", depth + 1)
        else:
            yield name, value


class Reading:
    """The account of one config. ``keys``: flat names to values."""

    def __init__(self, framework: str, keys: Mapping[str, Any], *, section: str = "") -> None:
        self.framework, self.keys = framework, dict(keys)
        self.fields: dict[str, Any] = {}
        self.workload: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.num_devices: int | None = None
        self.assumed: list[str] = []
        self.violations: list[Violation] = []
        self._understood: list[ReadKey] = []
        self._ignored: list[ReadKey] = []
        self._failed: list[ReadKey] = []
        self._section = section

    # --- taking keys ---------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the config gives that key, and not as ``null`` or ``auto``."""
        return self.keys.get(name) not in (None, "auto")

    def value(self, name: str, meaning: str = "") -> Any:
        """The value of a key, with ``meaning`` put on the account; None when it is not there or ``auto``."""
        if name not in self.keys:
            return None
        value = self.keys.pop(name)
        if value == "auto":
            self.assumed.append(f"{name} is 'auto': taken from what else is given")
            return None
        if value is not None and meaning:
            self._understood.append(ReadKey(key=name, value=value, meaning=meaning))
        return value

    def first(self, names: Iterable[str], meaning: str = "") -> Any:
        """The value of the first of several names of one key."""
        found = None
        for name in names:
            value = self.value(name, meaning)
            found = value if found is None else found
        return found

    def number(self, name: str, field: str = "", *, least: int = 1) -> int | None:
        """A whole number, put into a strategy field when one is named."""
        value = self.value(name)
        if value is None:
            return None
        number = _whole(value)
        if number is None or number < least:
            self.wrong(name, value, f"{name} '{value}' is no whole number from {least} on", allowed=f">= {least}")
            return None
        meaning = WORDS.get(field, field.replace("_", " "))
        if field:
            self._understood.append(ReadKey(key=name, value=value, meaning=f"{field}={number}: {meaning}"))
            if field in WORDS:
                self.fields[field] = number
        return number

    def flag(self, name: str, meaning: str = "") -> bool:
        """A switch; missing means off."""
        value = self.value(name, meaning)
        return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))

    def say(self, name: str, value: Any, meaning: str) -> None:
        """Put a key on the account of what was understood."""
        self._understood.append(ReadKey(key=name, value=value, meaning=meaning))

    def cannot(self, name: str, value: Any, why: str) -> None:
        """Put a key on the account of what was not understood."""
        self._failed.append(ReadKey(key=name, value=value, meaning=why))

    def wrong(self, name: str, value: Any, message: str, **fields: Any) -> None:
        """A value that no framework would take."""
        self.violations.append(Violation(code="bad_value", message=message, loc=(name,), actual=value, **fields))

    def ignore(self, prefixes: Iterable[str], why: str = "changes neither time nor memory of a step") -> None:
        """Take keys that start with one of ``prefixes`` off the account."""
        starts = tuple(prefixes)
        for name in [name for name in self.keys if name.startswith(starts)]:
            self._ignored.append(ReadKey(key=name, value=_short(self.keys.pop(name)), meaning=why))

    # --- the strategy --------------------------------------------------------------------------------------------

    def batches(self, *, total: int | None, micro_batch: int | None, accumulation: int | None) -> None:
        """Global batch and dp from the three numbers of which any two give the rest."""
        if total is not None:
            self.workload["global_batch"] = total
        if micro_batch is not None:
            self.fields["micro_batch"] = micro_batch
        if total is None or micro_batch is None or accumulation is None or "dp" in self.fields:
            return
        dp, left = divmod(total, micro_batch * accumulation)
        if left or dp < 1:
            self.wrong(
                "batch", [total, micro_batch, accumulation],
                f"global batch {total} is not micro-batch {micro_batch} x accumulation {accumulation} x a number of replicas",
                allowed=f"multiples of {micro_batch * accumulation}",
            )  # fmt: skip
            return
        self.fields["dp"] = dp
        self.say("batch", [total, micro_batch, accumulation], f"dp={dp}: global batch / (micro-batch x accumulation)")

    def split_layers(self, name: str, layers: list[int]) -> None:
        """Layers of each stage, to which embedding and head are added as units."""
        units = list(layers)
        units[0] += 1
        units[-1] += 1
        self.fields["split"] = ",".join(map(str, units))
        self.say(name, layers, "split: layers of each stage, embedding and head added at the ends")

    def imported(self) -> Imported:
        """The account, closed: keys that nobody asked for were not understood. Raises with every wrong value."""
        if self.violations:
            raise InvalidInput(self.violations, subject=f"{self.framework} config")
        for name, value in self.keys.items():
            self.cannot(name, _short(value), "unknown here: it may change time or memory")
        if "micro_batch" not in self.fields:
            self.assumed.append("micro_batch=1: the file does not say it")
            self.fields["micro_batch"] = 1
        if self.fields.get("pp", 1) == 1:
            for name in ("schedule", "chunks", "split"):
                self.fields.pop(name, None)
        parts = [f"{name}={_text(self.fields[name])}" for name in FIELD_ORDER if self._shown(name)]
        return Imported(
            framework=cast(Framework, self.framework), strategy=" ".join(parts), workload=self.workload, model=self.model,
            num_devices=self.num_devices, understood=tuple(self._understood), ignored=tuple(self._ignored),
            not_understood=tuple(self._failed), assumed=tuple(dict.fromkeys(self.assumed)),
        )  # fmt: skip

    def _shown(self, name: str) -> bool:
        value = self.fields.get(name)
        return value is not None and not (name in _SILENT_AT_ONE and value == 1)


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number == int(number) else None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value if not isinstance(value, str) else value[:200]
    return reprlib.repr(value)  # bounded: lists may hold one another many times over
