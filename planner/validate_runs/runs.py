"""Rows of a table of published runs: what ran (:class:`PublishedRun`) apart from what was measured (:class:`Measured`).

Predictions are made from a :class:`PublishedRun`, which has no measured column at all; scores join the two by row.
Blank cells are ``None``: the source does not say.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specs.errors import InvalidInput, MeshwrightError, Violation, nearest_name
from specs.units import GIB

REQUIRED = ("id", "source", "gpu", "num_gpus", "seq_len", "layers", "hidden", "heads", "global_batch", "tp", "pp")
OUT_OF_MEMORY_NOTE = "measured 'oom'"
FITS_NOTE = "measured fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """The configuration of one run, in the table's own words. Counts are whole numbers, ``None`` where the cell is blank."""

    id: str
    source: str
    source_ref: str = ""
    notes: str = ""
    year: int | None = None
    model: str = ""
    family: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    gated_mlp: bool | None = None
    gpu: str = ""
    gpus_per_node: int | None = None
    num_gpus: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_gpu: float | None = None
    precision: str = ""
    global_batch: int | None = None
    micro_batch: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    zero_stage: str = ""
    shard_group: int | None = None
    sequence_parallel: bool | None = None
    recompute: str = ""
    offload: str = ""
    flash_attention: bool | None = None
    compile: bool | None = None
    schedule: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the source measured. ``out_of_memory``: True ran out, False is known to have run, None unknown."""

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_memory_bytes: float | None = None
    out_of_memory: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    run: PublishedRun
    measured: Measured


def read_runs(path: Path) -> list[Row]:
    """The rows of a CSV file; raises :class:`InvalidInput` with every violation at once."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns, records = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput.single("unreadable_table", f"cannot read {path}: {error}", subject=str(path)) from None
    violations = [
        Violation(
            code="missing_column", message=f"the table has no column '{name}'", loc=(name,), nearest=nearest_name(name, columns)
        )
        for name in REQUIRED
        if name not in columns
    ]
    if violations:
        raise InvalidInput(violations, subject=str(path))
    return rows_of(records, subject=str(path))


def rows_of(records: Iterable[Mapping[str, Any]], *, subject: str = "table of runs") -> list[Row]:
    """Rows from records of text cells; raises :class:`InvalidInput` with every cell that cannot be read."""
    rows, violations = [], []
    for number, record in enumerate(records, start=2):
        cells = _Cells(record, number)
        rows.append(Row(_run(cells), _measured(cells)))
        violations += cells.violations
    if violations:
        raise InvalidInput(violations, subject=subject)
    return rows


class _Cells:
    """Typed access to a record; remembers what it could not read."""

    def __init__(self, record: Mapping[str, Any], number: int) -> None:
        self.record, self.number = record, number
        self.violations: list[Violation] = []

    def text(self, name: str) -> str:
        """The cell without surrounding space."""
        return str(self.record.get(name) or "").strip()

    def number_of(self, name: str) -> float | None:
        """A positive number, or None when blank."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not value >= 0:
            message = f"'{text}' in row {self.number} is no number"
            self.violations.append(Violation(code="not_a_number", message=message, loc=(self.number, name), actual=text))
            return None
        return value

    def count(self, name: str) -> int | None:
        """A positive whole number, or None when blank."""
        value = self.number_of(name)
        if value is None:
            return None
        if value != int(value) or value < 1:
            message = f"'{self.text(name)}' in row {self.number} is no whole number above 0"
            self.violations.append(Violation(code="not_a_count", message=message, loc=(self.number, name), actual=self.text(name)))
            return None
        return int(value)

    def flag(self, name: str) -> bool | None:
        """0 or 1, or None when blank."""
        text = self.text(name).lower()
        known = {"": None, "0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "0.0": False, "1.0": True}
        if text not in known:
            message = f"'{text}' in row {self.number} is neither 0 nor 1"
            self.violations.append(Violation(code="not_a_flag", message=message, loc=(self.number, name), actual=text))
            return None
        return known[text]


_TEXT = ("id", "source", "source_ref", "notes", "model", "family", "gpu", "intra_link", "precision", "zero_stage", "recompute",
         "offload", "schedule")  # fmt: skip
_COUNTS = (
    "year", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "moe_experts", "moe_topk", "gpus_per_node",
    "num_gpus", "global_batch", "micro_batch", "tp", "pp", "vpp", "cp", "ep", "dp", "shard_group",
)  # fmt: skip
_NUMBERS = ("params_b", "inter_link_gbps_per_gpu")
_FLAGS = ("gated_mlp", "sequence_parallel", "flash_attention", "compile")


def _run(cells: _Cells) -> PublishedRun:
    values: dict[str, Any] = {name: cells.text(name) for name in _TEXT}
    values |= {name: cells.count(name) for name in _COUNTS}
    values |= {name: cells.number_of(name) for name in _NUMBERS}
    values |= {name: cells.flag(name) for name in _FLAGS}
    return PublishedRun(**values)


def _measured(cells: _Cells) -> Measured:
    memory_gib = cells.number_of("measured_peak_mem_gib")
    step, rate = cells.number_of("measured_step_s"), cells.number_of("measured_tokens_per_s_per_gpu")
    notes = cells.text("notes").lower()
    if OUT_OF_MEMORY_NOTE in notes:
        out_of_memory: bool | None = True
    else:
        ran = any((step, rate, memory_gib, cells.number_of("measured_tflops_per_gpu"))) or FITS_NOTE in notes
        out_of_memory = False if ran else None
    return Measured(
        step_s=step or None,
        tokens_per_s_per_gpu=rate or None,
        peak_memory_bytes=memory_gib * GIB if memory_gib else None,
        out_of_memory=out_of_memory,
    )


class SkippedRun(MeshwrightError):
    """A row that cannot be predicted. ``code`` is stable and counted; the message says it for this row."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
