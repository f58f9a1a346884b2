"""Strategy: the short form of a plan that people write and read.

``pp=2 dp=4 tp=8 micro_batch=1 zero=1 sequence_parallel=true recompute=full schedule=1f1b split=41,41``
``pp=2 dp=4 tp=8 schedule=interleaved chunks=2 split=20,21,21,20``
``pp=4 dp=8 cp=2 tp=4 ep=16 micro_batch=1 zero=1 sequence_parallel=true``

Keys come in any order, separated by spaces or semicolons. ``recompute`` is ``none``, ``full`` or
``selective:attention+norm`` (op classes of ``profiler.opset``); ``schedule`` one of ``specs.schedule.SCHEDULES``; ``split`` names
the units of each stage, ``loss`` the loss kernel. What is not given has the default of :class:`Strategy`; ``dp`` then follows from
the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from planner.rules import recompute_classes
from planner.sites import Degrees
from specs.errors import InvalidInput, Violation, nearest_name
from specs.plan import RecomputeMode
from specs.schedule import SCHEDULES
from specs.training import LOSS_KERNELS

ALIASES: dict[str, str] = {
    "mbs": "micro_batch", "micro_batch_size": "micro_batch", "zero_stage": "zero", "sp": "sequence_parallel",
    "ac": "recompute", "activation_checkpointing": "recompute", "recomputation": "recompute", "tensor_parallel": "tp",
    "pipeline_parallel": "pp", "data_parallel": "dp", "layer_split": "split", "vpp": "chunks", "virtual_stages": "chunks",
    "loss_kernel": "loss", "context_parallel": "cp", "expert_parallel": "ep",
}  # fmt: skip
SUBJECT = "strategy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One strategy for all devices. ``dp`` None: all devices that pp x tp leave. ``split`` None: balanced by time and memory.

    ``micro_batch`` counts sequences per dp rank and pass. ``shard_group`` None: states shard over all of dp. ``chunks``: stages per
    pipeline rank, None: as many as the schedule has (1 where it leaves that open). ``loss`` None: the workload's loss kernel.
    ``ep`` takes its ranks from dp x cp, with ``whole_experts`` from dp x cp x tp (:class:`specs.plan.Mesh`).
    ``sequence_parallel`` has no effect at tp 1, ``schedule``, ``chunks`` and ``split`` none at pp 1.
    """

    pp: int = 1
    dp: int | None = None
    cp: int = 1
    tp: int = 1
    ep: int = 1
    whole_experts: bool = False
    micro_batch: int = 1
    zero: int = 0
    shard_group: int | None = None
    sequence_parallel: bool = False
    recompute: RecomputeMode = RecomputeMode.NONE
    op_classes: tuple[str, ...] = ()
    schedule: str = "1f1b"
    chunks: int | None = None
    split: tuple[int, ...] | None = None
    loss: str | None = None

    @property
    def stages_per_rank(self) -> int:
        """Stages that a pipeline rank holds."""
        if self.pp == 1:
            return 1
        return self.chunks or SCHEDULES[self.schedule].stages_per_rank or 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def degrees(self) -> Degrees:
        """How a stage's devices are split."""
        return Degrees(self.tp, self.cp, self.ep, self.whole_experts, self.shard_group)

    def dp_of(self, num_devices: int) -> int:
        """``dp``, or what the other degrees leave of the devices."""
        return self.dp if self.dp is not None else num_devices // (self.pp * self.cp * self.tp)

    def text(self) -> str:
        """The normalised short form; :func:`parse_strategy` reads it back."""
        parts = [f"pp={self.pp}"]
        if self.dp is not None:
            parts.append(f"dp={self.dp}")
        parts += [f"cp={self.cp}"] if self.cp > 1 else []
        parts.append(f"tp={self.tp}")
        if self.ep > 1:
            parts += [f"ep={self.ep}", *(["whole_experts=true"] if self.whole_experts else [])]
        parts += [f"micro_batch={self.micro_batch}", f"zero={self.zero}"]
        if self.shard_group is not None:
            parts.append(f"shard_group={self.shard_group}")
        if self.tp > 1:
            parts.append(f"sequence_parallel={str(self.sequence_parallel).lower()}")
        parts.append(f"recompute={recompute_text(self.recompute, self.op_classes)}")
        if self.pp > 1:
            parts.append(f"schedule={self.schedule}")
            if self.chunks is not None:
                parts.append(f"chunks={self.chunks}")
            if self.split is not None:
                parts.append("split=" + ",".join(str(count) for count in self.split))
        if self.loss is not None:
            parts.append(f"loss={self.loss}")
        return " ".join(parts)


def recompute_text(mode: RecomputeMode, op_classes: Iterable[str]) -> str:
    """``none``, ``full`` or ``selective:attention+norm``."""
    return f"{mode.value}:{'+'.join(op_classes)}" if mode == RecomputeMode.SELECTIVE else mode.value


def parse_strategy(text: str) -> Strategy:
    """Read a strategy; raises :class:`InvalidInput` with every violation of the text."""
    return Strategy(**parse_fields(text))


def parse_fields(text: str) -> dict[str, Any]:
    """Only the fields that the text gives, by field name of :class:`Strategy`. Raises :class:`InvalidInput`."""
    reader = _Reader()
    for token in text.replace(";", " ").split():
        reader.token(token)
    if reader.violations:
        raise InvalidInput(reader.violations, subject=f"strategy '{text}'")
    return reader.values


class _Reader:
    """Collects fields and violations."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.violations: list[Violation] = []
        self._given: dict[str, str] = {}

    def token(self, token: str) -> None:
        key, equals, value = token.partition("=")
        if not equals or not key or not value:
            self._wrong("not_key_value", token, f"'{token}' is no key=value", actual=token)
            return
        name = ALIASES.get(key.lower(), key.lower())
        if name in self._given:
            self._wrong("key_given_twice", key, f"'{self._given[name]}' and '{key}' set the same thing", actual=token)
            return
        if name not in _PARSERS:
            known = [*_PARSERS, *ALIASES]
            nearest = nearest_name(key, known)
            self._wrong(
                "unknown_key", key, f"unknown key '{key}'", actual=key, allowed=sorted(_PARSERS),
                nearest=ALIASES.get(nearest or "", nearest),
            )  # fmt: skip
            return
        self._given[name] = key
        _PARSERS[name](self, name, value)

    def _wrong(self, code: str, key: str, message: str, **fields_: Any) -> None:
        self.violations.append(Violation(code=code, message=message, loc=(SUBJECT, key), **fields_))

    def positive(self, name: str, value: str) -> None:
        number = _integer(value)
        if number is None or number < 1:
            self._wrong(
                "not_a_positive_number",
                name,
                f"{name} '{value}' is no whole number above 0",
                actual=value,
                allowed=">= 1",
                nearest=1,
            )
        else:
            self.values[name] = number

    def zero(self, name: str, value: str) -> None:
        number = _integer(value)
        if number is None or not 0 <= number <= 3:
            self._wrong(
                "zero_stage", name, f"zero '{value}' is none of the stages 0 to 3", actual=value, allowed=[0, 1, 2, 3], nearest=1
            )
        else:
            self.values[name] = number

    def boolean(self, name: str, value: str) -> None:
        meaning = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
        if value.lower() not in meaning:
            self._wrong(
                "not_a_boolean", name, f"{name} '{value}' is neither true nor false", actual=value, allowed=["true", "false"]
            )
        else:
            self.values[name] = meaning[value.lower()]

    def recompute(self, name: str, value: str) -> None:
        word, _, classes = value.partition(":")
        modes = [mode.value for mode in RecomputeMode]
        if word.lower() not in modes:
            message = f"recompute '{value}' is not known"
            self._wrong("unknown_recompute", name, message, actual=value, allowed=modes, nearest=nearest_name(word, modes))
            return
        mode = RecomputeMode(word.lower())
        listed = tuple(dict.fromkeys(item for item in classes.replace(",", "+").split("+") if item))
        found = recompute_classes(mode, listed, (SUBJECT, name))
        self.violations += found
        if not found:
            self.values.update(recompute=mode, op_classes=listed)

    def schedule(self, name: str, value: str) -> None:
        if value.lower() not in SCHEDULES:
            nearest = nearest_name(value, SCHEDULES)
            self._wrong("unknown_schedule", name, f"schedule '{value}'", actual=value, allowed=sorted(SCHEDULES), nearest=nearest)
        else:
            self.values[name] = value.lower()

    def loss(self, name: str, value: str) -> None:
        if value.lower() not in LOSS_KERNELS:
            known, near = list(LOSS_KERNELS), nearest_name(value, LOSS_KERNELS)
            self._wrong("unknown_loss_kernel", name, f"loss kernel '{value}'", actual=value, allowed=known, nearest=near)
        else:
            self.values[name] = value.lower()

    def split(self, name: str, value: str) -> None:
        numbers = [_integer(item) for item in value.split(",")]
        if any(number is None for number in numbers):
            message = f"split '{value}' is no list of unit counts, one a stage"
            self._wrong("not_a_split", name, message, actual=value, allowed="whole numbers with commas, e.g. 11,10,10,11")
        else:
            self.values[name] = tuple(number for number in numbers if number is not None)


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


_PARSERS: dict[str, Callable[[_Reader, str, str], None]] = {
    "pp": _Reader.positive, "dp": _Reader.positive, "tp": _Reader.positive, "cp": _Reader.positive, "ep": _Reader.positive,
    "whole_experts": _Reader.boolean,
    "micro_batch": _Reader.positive, "zero": _Reader.zero, "shard_group": _Reader.positive,
    "sequence_parallel": _Reader.boolean, "recompute": _Reader.recompute, "schedule": _Reader.schedule,
    "chunks": _Reader.positive, "split": _Reader.split, "loss": _Reader.loss,
}  # fmt: skip
FIELDS = tuple(item.name for item in fields(Strategy))
