"""Long steps from short ones: beyond the pipeline's fill every further period of micro-batches takes the same time.

A step of ``m`` micro-batches is simulated with two smaller numbers of them and each term is continued in a straight line; the
memory is that of the longer of the two, which holds as many micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.cost_model import CostModel
from simulator.predict import prediction_of, simulate, waterfall_of
from simulator.rank_memory import fill, plan_memory
from specs.plan import PipelineSchedule, Plan
from specs.prediction import Prediction
from specs.schedule import SCHEDULES

# Waits of unlike stages for one another come again after 1, 2, 3 or 4 micro-batches; groups of an interleaved schedule after one.
PERIOD = 12


@dataclass(frozen=True, slots=True)
class Window:
    """Numbers of micro-batches to simulate: exact when ``short`` is None."""

    short: int | None
    long: int


def window(num_micro_batches: int, pp: int, schedule: PipelineSchedule) -> Window:
    """The two lengths for a schedule of ``pp`` ranks, a whole number of periods below ``num_micro_batches``."""
    rule = SCHEDULES.get(schedule.name)
    if pp > 1 and rule is None:
        return Window(None, num_micro_batches)
    period, filled = (1, 3) if pp == 1 or rule is None else (PERIOD, max(pp, rule.least(pp)) + 2)
    if pp > 1 and rule is not None and rule.in_groups:
        period, filled = pp, 2 * pp
    short = filled + (num_micro_batches - filled) % period
    if short + period >= num_micro_batches:
        return Window(None, num_micro_batches)
    return Window(short, short + period)


def predict_long(model: CostModel, plan_with: Callable[[int], Plan], num_micro_batches: int) -> Prediction:
    """The prediction of a step of ``num_micro_batches``. ``plan_with(m)``: the plan of one pipeline with ``m`` micro-batches."""
    lengths, long_plan = _long_plan(plan_with, num_micro_batches)
    long = prediction_of(model, long_plan, simulate(model, long_plan))
    if lengths.short is None:
        return long
    short = simulate(model, plan_with(lengths.short))
    before = waterfall_of(short)
    steps = (num_micro_batches - lengths.long) / (lengths.long - lengths.short)
    factor = num_micro_batches / lengths.long

    def further(a: float, b: float) -> float:
        return b + steps * (b - a)

    names = {*before, *long.waterfall}
    waterfall = {name: max(0.0, further(before.get(name, 0.0), long.waterfall.get(name, 0.0))) for name in sorted(names)}
    step = further(short.step_time_s, long.step_time_s)
    scale = step / long.step_time_s
    return long.replace(
        step_time_s=step,
        step_time_low_s=long.step_time_low_s * scale,
        step_time_high_s=long.step_time_high_s * scale,
        tokens_per_s=long.tokens_per_s * factor / scale,
        mfu=None if long.mfu is None else long.mfu * factor / scale,
        model_flop=long.model_flop * factor,
        waterfall=waterfall,
        bubble_fraction=waterfall.get("pipeline", 0.0) / step,
        ranks=(),
    )


def fits_long(model: CostModel, plan_with: Callable[[int], Plan], num_micro_batches: int) -> bool:
    """Whether :func:`predict_long` will find that the fullest rank fits, without simulating any time."""
    return max(fill(memory) for memory in plan_memory(model, _long_plan(plan_with, num_micro_batches)[1])) <= 1.0


def _long_plan(plan_with: Callable[[int], Plan], num_micro_batches: int) -> tuple[Window, Plan]:
    """The lengths to simulate and the plan of the longer one."""
    whole = plan_with(num_micro_batches)
    lengths = window(num_micro_batches, whole.pipelines[0].pp, whole.schedule)
    return lengths, whole if lengths.short is None else plan_with(lengths.long)
