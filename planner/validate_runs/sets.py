"""Which sources constants of the simulator may be tuned on (fit), and which are never looked at for that (check)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.validate_runs.runs import PublishedRun, Row
from specs.errors import InvalidInput, Violation, nearest_name

# Beginnings of the names of the fit sources. All others are the check.
FIT_SOURCES = (
    "MosaicML llm-foundry", "BigScience experiments (A100)", "Megatron-LM README (2021)", "PyTorch torchtitan",
    "NVIDIA DeepLearningExamples BERT", "NVIDIA NeMo performance tables",
)  # fmt: skip
SETS = ("fit", "check", "all")


def source_of(run: PublishedRun) -> str:
    """The source's name; one that ran on two systems counts as two sources."""
    if run.source == "BigScience experiments":
        return f"{run.source} ({'A100' if 'a100' in run.gpu.lower() else 'V100'})"
    if run.source == "Megatron-LM README":
        return f"{run.source} ({run.year})"
    return run.source


def set_of(run: PublishedRun) -> str:
    """``fit`` or ``check``."""
    return "fit" if source_of(run).startswith(FIT_SOURCES) else "check"


def chosen_rows(rows: Sequence[Row], *, sources: Sequence[str] = (), which: str = "all") -> list[Row]:
    """The rows of a set and of the sources whose names begin with one of ``sources`` (none = all), in their order.

    Raises :class:`InvalidInput` for an unknown set and for a source that no row of the table has.
    """
    known = list(dict.fromkeys(source_of(row.run) for row in rows))
    broken = []
    if which not in SETS:
        message = f"'{which}' is no set of rows"
        broken.append(Violation(code="unknown_set", message=message, actual=which, allowed=SETS, nearest=nearest_name(which, SETS)))
    for name in sources:
        if not any(source.lower().startswith(name.lower()) for source in known):
            message = f"no source of the table begins with '{name}'"
            nearest = nearest_name(name, known)
            broken.append(Violation(code="unknown_source", message=message, actual=name, allowed=known, nearest=nearest))
    if broken:
        raise InvalidInput(broken, subject="choice of rows")
    wanted = tuple(name.lower() for name in sources)
    return [
        row for row in rows if which in ("all", set_of(row.run)) and (not wanted or source_of(row.run).lower().startswith(wanted))
    ]
