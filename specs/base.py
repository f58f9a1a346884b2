"""What all documents share: strict, frozen, versioned, hashable by content, readable as JSON, YAML or TOML."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from specs.errors import InvalidInput, Violation, nearest_name
from specs.units import human_index, scale


class Provenance(StrEnum):
    """Where a number comes from, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    PUBLISHED = "published"
    DATASHEET = "datasheet"
    FITTED = "fitted"
    EXTRAPOLATED = "extrapolated"
    ASSUMED = "assumed"


class _TwoUnits:
    """Stands for a value that was given in two units, so that its field fails and all other fields are still checked."""

    def __init__(self, name: str, given: list[str]) -> None:
        self.name, self.given = name, given


class Spec(BaseModel):
    """A frozen, strict value. Unknown keys are errors that name the nearest known key; human units convert at load."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    @model_validator(mode="before")
    @classmethod
    def _human_units_to_si(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        index = _human_index_of(cls)
        if not index:
            return data
        converted: dict[str, Any] = {}
        for key, value in data.items():
            if key in cls.model_fields or key not in index:
                converted.setdefault(key, value)
                continue
            name, factor = index[key]
            given = [other for other in data if other == name or index.get(other, ("",))[0] == name]
            converted[name] = scale(value, factor) if len(given) == 1 else _TwoUnits(name, given)
        return converted

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self).model_validate({**dict(self), **changes})


@lru_cache(maxsize=256)
def _human_index_of(model: type[BaseModel]) -> dict[str, tuple[str, float]]:
    """Human keys of a model's fields, made once per class."""
    return human_index(model.model_fields)


class Document(Spec):
    """A file of its own kind with a schema version and a content hash."""

    kind: ClassVar[str] = "document"
    schema_version: int = 1

    def to_json(self, *, indent: int | None = None) -> str:
        """JSON text with SI keys; fields at their default are left out."""
        return json.dumps(self.to_dict(), indent=indent, separators=None if indent else (",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping; fields at their default are left out, ``schema_version`` never is."""
        return {"schema_version": self.schema_version, **self.model_dump(mode="json", exclude_defaults=True)}

    def content_hash(self) -> str:
        """SHA-256 of the canonical JSON, the identity of this content."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json(indent=1) + "\n")
        partial.replace(target)

    @classmethod
    def parse(cls, data: Any, *, subject: str | None = None) -> Self:
        """Validate a mapping; raise :class:`InvalidInput` with every violation. A ``$schema`` key (for editors) is let be."""
        if isinstance(data, dict) and "$schema" in data:
            data = {key: value for key, value in data.items() if key != "$schema"}
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidInput(violations_of(error, cls), subject=subject or cls.kind) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a JSON, YAML or TOML file (by its suffix)."""
        return cls.parse(read_mapping(path), subject=f"{cls.kind} {path}")


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2 habits on PyYAML: ``1e-3`` is a number, only true/false are booleans, no octal ``010``, no base-60 ``1:30``,
    no dates; a key that stands twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping of ``node``; raises on a repeated key, which PyYAML would take silently."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_REPLACED_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "timestamp"))
_YamlLoader.yaml_implicit_resolvers = {
    key: [pair for pair in pairs if pair[0] not in _REPLACED_TAGS] for key, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F]+)$"), list("-+0123456789")
)
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(key for key, _ in pairs)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"key '{twice[0]}' stands twice")
    return dict(pairs)


def read_mapping(path: str | Path) -> Any:
    """Read a JSON, YAML or TOML file into plain data; raise :class:`InvalidInput` when it cannot be read."""
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput.single("unreadable_file", f"cannot read {source}: {error.strerror}", subject=str(source)) from None
    except UnicodeDecodeError:
        raise InvalidInput.single("not_text", f"{source} is not a text file", subject=str(source)) from None
    return parse_mapping(text, source.suffix, subject=str(source))


def parse_mapping(text: str, suffix: str, *, subject: str) -> Any:
    """Plain data of JSON (``.json``), TOML (``.toml``) or YAML text; raise :class:`InvalidInput` when it does not parse."""
    try:
        if suffix == ".json":
            return json.loads(text, object_pairs_hook=_unique_keys)
        if suffix == ".toml":
            return tomllib.loads(text)
        return yaml.load(text, Loader=_YamlLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidInput.single("unparsable_file", f"{subject} does not parse: {error}", subject=subject) from None


def violations_of(error: ValidationError, model: type[BaseModel]) -> list[Violation]:
    """Turn pydantic's errors into violations, with the nearest known key for an unknown one.

    When an item of a tuple fails, pydantic also calls the tuple too short; that follow-up is left out.
    """
    return violations_of_items(error.errors(include_url=False), model)


def violations_of_items(items: Sequence[Any], model: type[BaseModel]) -> list[Violation]:
    """:func:`violations_of` for error items that left their ``ValidationError`` (a web framework's request errors)."""
    locs = [tuple(item["loc"]) for item in items]
    return [
        violation
        for item, loc in zip(items, locs, strict=True)
        if not (item["type"] == "too_short" and any(len(other) > len(loc) and other[: len(loc)] == loc for other in locs))
        for violation in _violations(item, loc, model)
    ]


def _violations(item: Any, loc: tuple[str | int, ...], model: type[BaseModel]) -> list[Violation]:
    own = (item.get("ctx") or {}).get("error")
    if isinstance(own, InvalidInputValues):
        return [value.violation(loc) for value in own.values]
    return [_violation(item, loc, model)]


def _violation(item: Any, loc: tuple[str | int, ...], model: type[BaseModel]) -> Violation:
    if item["type"] == "extra_forbidden":
        known = sorted(_known_keys(model, loc[:-1]))
        key = str(loc[-1])
        return Violation(
            code="unknown_key", message=f"unknown key '{key}'", loc=loc, actual=key, allowed=known, nearest=nearest_name(key, known)
        )
    context = item.get("ctx") or {}
    own = context.get("error")
    if isinstance(own, InvalidInputValue):
        return own.violation(loc)
    actual = item.get("input")
    if isinstance(actual, _TwoUnits):
        message = f"'{actual.name}' is given in two units ({', '.join(actual.given)}); keep one"
        return Violation(code="two_units", message=message, loc=loc, actual=actual.given)
    if not isinstance(actual, (str, int, float, bool, type(None))):
        actual = None
    message = item["msg"].removeprefix("Value error, ")
    return Violation(code=item["type"], message=message, loc=loc, actual=actual, allowed=context.get("expected"))


class InvalidInputValue(ValueError):
    """A rule broken inside a validator, with its own code, allowed values and nearest valid one.

    ``loc`` is the key path below the object that is validated.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        actual: Any = None,
        allowed: Any = None,
        nearest: Any = None,
        loc: tuple[str | int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.actual, self.allowed, self.nearest = code, message, actual, allowed, nearest
        self.loc = loc

    def violation(self, loc: tuple[str | int, ...]) -> Violation:
        """The same as a :class:`Violation`; ``loc`` leads to the validated object."""
        return Violation(
            code=self.code,
            message=self.message,
            loc=(*loc, *self.loc),
            actual=self.actual,
            allowed=self.allowed,
            nearest=self.nearest,
        )


class InvalidInputValues(ValueError):
    """Several broken rules of one validator, all reported."""

    def __init__(self, values: Sequence[InvalidInputValue]) -> None:
        super().__init__("; ".join(value.message for value in values))
        self.values = tuple(values)

    @classmethod
    def raise_any(cls, values: Sequence[InvalidInputValue]) -> None:
        """Raise when there are any."""
        if values:
            raise cls(values)


def _known_keys(model: type[BaseModel], loc: tuple[str | int, ...]) -> set[str]:
    """Keys that the model at ``loc`` below ``model`` accepts, human ones included."""
    current: Any = model
    for part in loc:
        if isinstance(part, int) or current is None:
            continue
        field = getattr(current, "model_fields", {}).get(part)
        current = _inner_model(field.annotation) if field is not None else current
    fields = getattr(current, "model_fields", {})
    return set(fields) | set(human_index(fields))


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _inner_model(argument)
        if found is not None:
            return found
    return None
