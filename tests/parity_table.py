"""The parity table: ``python -m tests.parity_table`` runs every strategy of the parity tests and prints its largest errors.

Loss and gradients: relative to the single-process reference; parameters after one optimizer step: in learning rates, see
``tests.executor_parity.Tolerance``.
"""

from __future__ import annotations

from collections.abc import Iterator

from specs.plan import Plan
from tests.executor_parity import TOLERANCES, compare_with_reference
from tests.test_executor_axes import EIGHT_RANKS, FOUR_RANKS, TWO_RANKS, plan_of
from tests.test_executor_parity import FOUR_RANKS as OLDER_FOUR_RANKS
from tests.test_executor_parity import TWO_RANKS as OLDER_TWO_RANKS


def cases() -> Iterator[tuple[str, str, Plan]]:
    """Name, model and plan of every strategy."""
    for tables in (OLDER_TWO_RANKS, OLDER_FOUR_RANKS):
        for name, choices in tables.items():
            yield name, "llama", plan_of("llama", **choices)
    for table in (TWO_RANKS, FOUR_RANKS, EIGHT_RANKS):
        for name, (model, choices) in table.items():
            yield name, model, plan_of(model, **choices)


def main() -> None:
    """Print the table."""
    tolerance = TOLERANCES["float32"]
    print(f"{'strategy':32} {'model':8} {'ranks':>5} {'loss':>9} {'gradient':>9} {'parameter':>9}")
    for name, model, plan in cases():
        errors = compare_with_reference(model, plan)["errors"]
        print(f"{name:32} {model:8} {plan.world_size:5} {errors['loss']:9.1e} {errors['gradient']:9.1e} {errors['parameter']:9.1e}")
    print(f"{'tolerance':47} {tolerance.loss:9.1e} {tolerance.gradient:9.1e} {tolerance.parameter:9.1e}")


if __name__ == "__main__":
    main()
