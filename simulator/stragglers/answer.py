"""The whole answer about a plan's robustness: distribution of the step, goodput and cost, what-if."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cost_model import CostModel
from simulator.stragglers.goodput import Job, goodput, job_of
from simulator.stragglers.monte_carlo import MonteCarlo, distribution_of
from simulator.stragglers.what_if import Change, what_if
from specs.plan import Plan
from specs.straggler import Goodput, Robustness, StragglerModel

# Steps for the share of each source alone, which nobody reads to a percent.
ALONE_STEPS = 1_000


def robustness(
    model: CostModel,
    plan: Plan,
    stragglers: StragglerModel,
    *,
    changes: Sequence[Change] = (),
    steps: int = 10_000,
    seed: int = 0,
) -> Robustness:
    """How the plan does under ``stragglers`` and after each of ``changes``. ``model``: prices of the resolved cluster."""
    stragglers.check(model.cluster)
    monte_carlo = MonteCarlo(model, plan)
    spread = distribution_of(monte_carlo.step_times(stragglers, steps=steps, seed=seed), seed)
    job = job_of(plan, model.cluster, stragglers)
    stragglers, assumed = _with_cluster_failures(model, stragglers)

    def throughput(*, spot: bool) -> Goodput:
        return goodput(job, stragglers, nominal_step_s=monte_carlo.nominal_s, mean_step_s=spread.mean_s, spot=spot)

    return Robustness(
        plan_hash=plan.content_hash(), nominal_step_s=monte_carlo.nominal_s, distribution=spread,
        alone_s=monte_carlo.alone(stragglers, steps=min(steps, ALONE_STEPS), seed=seed),
        on_demand=throughput(spot=False), spot=None if stragglers.spot is None else throughput(spot=True),
        what_if=tuple(what_if(model, plan, list(changes))) if changes else (), folded=monte_carlo.folded,
        assumptions=(*assumed, *_assumptions(model, stragglers, job)),
    )  # fmt: skip


def _with_cluster_failures(model: CostModel, stragglers: StragglerModel) -> tuple[StragglerModel, list[str]]:
    """The model with the failure rate of the cluster document, where it names none itself."""
    mtbf_s, failures = model.cluster.mean_time_between_failures_s, stragglers.failures
    if mtbf_s is None or failures.device_mtbf_s is not None or failures.node_mtbf_s is not None:
        return stragglers, []
    note = f"mean time between failures of a device from the cluster document: {mtbf_s / 3600:.4g} h"
    return stragglers.replace(failures=failures.replace(device_mtbf_s=mtbf_s)), [note]


def _assumptions(model: CostModel, stragglers: StragglerModel, job: Job) -> list[str]:
    """What the numbers rest on beside the documents."""
    found = ["factors of a step are drawn independently of the step before; a device keeps its factor within a step"]
    if any(device.rank_skew for device in (model.profile.devices if model.profile is not None else ())):
        found.append("the mean wait for the slowest rank that the profile measured is left out of the nominal step: it is drawn")
    if stragglers.pauses.probability > 0:
        found.append("a pause counts as slower compute of its device over that step")
    if stragglers.failures.device_mtbf_s or stragglers.failures.node_mtbf_s or stragglers.spot:
        found.append("times between failures and revocations are exponential; checkpoints stop training while they are saved")
    if job.price_usd_per_hour is None:
        found.append("no price: neither the straggler model, nor the node, nor its device type names one")
    return found
