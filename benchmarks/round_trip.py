"""Exporter x importer: ``python -m benchmarks.round_trip`` prints the table of ``docs/exchange.md``.

A plan of each kind is written for each target and read back: *same* when the strategy that was read is the one that was written, in
all that the file holds; otherwise what the target refuses.
"""

from __future__ import annotations

from planner.exporters import export_plan
from planner.importers import read_config
from planner.strategy import parse_strategy
from specs.errors import InvalidInput
from specs.interchange import TARGETS
from specs.plan import Plan
from tests.test_exporters import CLUSTER, OUTSIDE, STRATEGIES, WORKLOAD, model, plan_of

FIELDS = ("pp", "dp", "tp", "zero", "micro_batch", "sequence_parallel", "recompute", "shard_group", "split", "num_stages")


def verdict(plan: Plan, target: str) -> str:
    """``same``, ``written`` where there is no reader, or the codes of what is refused."""
    try:
        files = export_plan(plan, target, graph=model(), workload=WORKLOAD, cluster=CLUSTER).files
    except InvalidInput as error:
        return "refuses " + ", ".join(dict.fromkeys(violation.code.replace("_", " ") for violation in error.violations))
    if target not in OUTSIDE:
        return "written"
    wanted = parse_strategy(plan.strategy)
    for name, text in files.items():
        if name.endswith(".sh"):
            continue
        found = parse_strategy(read_config(text, target).strategy)
        unlike = [field for field in FIELDS if field not in OUTSIDE[target] and getattr(found, field) != getattr(wanted, field)]
        if unlike:
            return f"differs in {', '.join(unlike)}"
    return "same"


def main() -> int:
    """Print the table."""
    print(f"| plan | strategy | {' | '.join(TARGETS)} |")
    print("| --- | --- |" + " --- |" * len(TARGETS))
    for name, strategy in STRATEGIES.items():
        plan = plan_of(strategy)
        print(f"| {name} | `{strategy}` | {' | '.join(verdict(plan, target) for target in TARGETS)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
