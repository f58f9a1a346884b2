"""What an answer says, in sentences for people who do not read waterfalls."""

from __future__ import annotations

from specs.answer import PlanAnswer
from specs.plan import Plan
from specs.prediction import Prediction
from specs.terms import TIME_TERMS
from specs.units import format_bytes, format_seconds

# Terms that are the work itself; what is left of the step is what the parallelism costs.
_WORK = ("forward", "backward")


def verdict(answer: PlanAnswer) -> list[str]:
    """The headline first: what to do and how sure that is; then speed, what costs most, and memory."""
    if answer.plan is None or answer.prediction is None:
        head = "No plan was found in the time given." if answer.status == "timed_out" else "No plan keeps the limits."
        lines = [head, *(f"{limit.message}." for limit in answer.limits)]
        return [*lines, *(f"Would help: {item}." for limit in answer.limits for item in limit.relaxations)]
    return [
        _choice(answer, answer.plan),
        _speed(answer.plan, answer.prediction),
        _cost(answer.prediction),
        _memory(answer.prediction),
    ]


def _choice(answer: PlanAnswer, plan: Plan) -> str:
    mesh = plan.pipelines[0].stages[0].mesh
    pp = plan.pipelines[0].pp
    zero = plan.pipelines[0].stages[0].zero
    parts = []
    if mesh.dp > 1:
        parts.append(f"data parallel over {mesh.dp}" + (f" with ZeRO {zero}" if zero else ""))
    if mesh.tp > 1:
        parts.append(f"tensor parallel over {mesh.tp}")
    if pp > 1:
        parts.append(f"a pipeline of {pp}")
    how = ", ".join(parts) or "one device"
    left = f", {len(plan.unused_devices)} devices left out" if plan.unused_devices else ""
    sure = "proven best of the searched space" if answer.status == "optimal" else _gap(answer)
    return f"Train with {how} on {plan.world_size} devices{left}: {sure}."


def _gap(answer: PlanAnswer) -> str:
    gap = answer.search.gap
    return "the best found in time" if gap is None else f"at most {gap:.1%} slower than anything in the searched space"


def _speed(plan: Plan, prediction: Prediction) -> str:
    low, high = format_seconds(prediction.step_time_low_s), format_seconds(prediction.step_time_high_s)
    each = prediction.tokens_per_s / plan.world_size
    mfu = "" if prediction.mfu is None else f", {prediction.mfu:.1%} of the devices' peak"
    return (
        f"A step takes {format_seconds(prediction.step_time_s)} (80 % sure: {low} to {high}): "
        f"{prediction.tokens_per_s:,.0f} tokens per second, {each:,.0f} per device{mfu}."
    )


def _cost(prediction: Prediction) -> str:
    other = {name: value for name, value in prediction.waterfall.items() if name not in _WORK}
    if not other:
        return "Nothing but the model's own work takes time."
    worst = max(other, key=lambda name: other[name])
    share = other[worst] / prediction.step_time_s
    return (
        f"Beyond the model's own work most goes into {TIME_TERMS[worst]}: {format_seconds(other[worst])}, {share:.0%} of the step."
    )


def _memory(prediction: Prediction) -> str:
    memory = prediction.memory
    needed = memory.reserved_bytes or memory.peak_bytes
    share = needed / memory.capacity_bytes
    largest = max(memory.terms, key=lambda name: memory.terms[name])
    risk = " That is tight: the allocator may stall." if "performance_risk" in prediction.flags else ""
    return (
        f"The fullest device needs {format_bytes(needed)} of {format_bytes(memory.capacity_bytes)} ({share:.0%}, margin and "
        f"process included), most of it {largest}.{risk}"
    )
