"""Long steps from short ones: beyond the pipeline's fill every further group of micro-batches takes the same time.

A step of ``m`` micro-batches is simulated with two smaller numbers of them and each term is continued in a straight line; the
memory is that of the longer of the two, which holds as many micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.cost_model import CostModel
from simulator.predict import prediction_of, simulate
from specs.plan import Plan
from specs.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Window:
    """Numbers of micro-batches to simulate: exact when ``short`` is None."""

    short: int | None
    long: int


def window(num_micro_batches: int, pp: int, chunks: int = 1) -> Window:
    """The two lengths for a schedule of ``pp`` ranks; interleaved ones grow by whole groups of ``pp``."""
    group = pp if chunks > 1 else 1
    short = group * (2 if chunks > 1 else max(2, pp + 2))
    long = short + (group if chunks > 1 else 1 if pp == 1 else 4)
    if num_micro_batches <= long + group:
        return Window(None, num_micro_batches)
    return Window(short, long)


def predict_long(
    model: CostModel, plan_with: Callable[[int], Plan], num_micro_batches: int, pp: int, chunks: int = 1
) -> Prediction:
    """The prediction of a step of ``num_micro_batches``. ``plan_with(m)``: the plan with ``m`` micro-batches."""
    lengths = window(num_micro_batches, pp, chunks)
    long_plan = plan_with(lengths.long)
    long = prediction_of(model, long_plan, simulate(model, long_plan))
    if lengths.short is None:
        return long
    short_plan = plan_with(lengths.short)
    short = prediction_of(model, short_plan, simulate(model, short_plan))
    steps = (num_micro_batches - lengths.long) / (lengths.long - lengths.short)
    factor = num_micro_batches / lengths.long

    def further(a: float, b: float) -> float:
        return b + steps * (b - a)

    names = {*short.waterfall, *long.waterfall}
    waterfall = {name: max(0.0, further(short.waterfall.get(name, 0.0), long.waterfall.get(name, 0.0))) for name in sorted(names)}
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
