"""``python -m profiler.fit --data DIR``: fit the efficiency models on public measurements and print how good they are.

DIR holds one folder per source (aiconfigurator, neusight, vidur, llmservingsim, aceso_superscaler, mist, cudnn_frontend, deepbench,
llmcompass), each with that project's tables; absent ones are skipped. Only parameters and errors are written, never the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from profiler.fit.run import Result, fit_everything, write
from specs.errors import InvalidInput

_PIPED_WIDTH = 200


def main(arguments: list[str] | None = None) -> int:
    """Run the fit; exit code 0, or 2 when the data folder is not usable."""
    parser = argparse.ArgumentParser(prog="python -m profiler.fit", description="Fit efficiency models on public measurements.")
    parser.add_argument("--data", type=Path, required=True, help="folder with one folder of tables per source")
    parser.add_argument("--out", type=Path, default=None, help="where to write (default: the package's traces/efficiency)")
    parser.add_argument("--seed", type=int, default=0, help="chooses held-out pairs and samples")
    options = parser.parse_args(arguments)
    out = options.out or Path(str(resources.files("traces").joinpath("efficiency")))
    progress, console = Console(stderr=True), Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    start = time.monotonic()
    try:
        result = fit_everything(options.data, options.seed, lambda text: progress.print(f"[dim]{text}"))
    except InvalidInput as error:
        progress.print(f"[red]{error}")
        return 2
    written = write(result, out)
    for table in tables_of(result):
        console.print(table)
    summary = ", ".join(f"{name} {_cell(value)}" for name, value in result.errors["summary"].items())
    console.print(f"{len(written)} files in {out}, {time.monotonic() - start:.0f} s. {summary}")
    return 0


def tables_of(result: Result) -> list[Table]:
    """What the command prints: products, other laboratories, attention, grouped products, memory-bound ops."""
    columns = ("device", "dtype", "form", "laboratory", "points", "held_out_points", "median_ape", "mape", "all_median_ape")
    gemm = _table("Matrix products: errors on unseen shapes", (*columns, "left out as used", "specs only", "family unknown"))
    for row in result.errors["gemm"]:
        apart = row.get("left_out", {})
        extra = [apart.get(name) for name in ("as_used", "specs_only", "family_unknown")]
        gemm.add_row(*(_cell(row[name]) for name in columns), *(_cell(value) for value in extra))
    found = [gemm]
    for title, key in (
        ("Sums of a layer's products", "layers"),
        ("The same device in another laboratory", "other_laboratories"),
        ("Attention", "attention"),
        ("Mixture-of-experts layers", "grouped_gemm"),
        ("Memory-bound ops", "memory_bound"),
    ):
        rows = result.errors[key]
        if rows:
            names = list({name: None for row in rows for name in row})
            table = _table(title, tuple(names))
            for row in rows:
                table.add_row(*(_cell(row.get(name)) for name in names))
            found.append(table)
    return found


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.replace("_", " "))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}%" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
