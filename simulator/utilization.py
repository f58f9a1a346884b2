"""Model FLOP utilisation: what a throughput means as a share of a device's dense peak, by a stated convention.

FLOP per token: 6 N + 12 L a d s (N parameters that a token meets, L layers, a heads of size d, s tokens of the sequence), attention
halved where the convention counts only the causal half (Chowdhery et al., arXiv 2204.02311 appendix B; Korthikanti et al., arXiv
2205.05198 appendix A). Both parts are read from the captured ops, so they hold for models of any shape.
"""

from __future__ import annotations

from profiler.opset import PRODUCTS, OpClass, op_class_of
from simulator.efficiency import peak_flop_per_s, rate_dtype
from specs.accounting import AttentionFlop, FlopConvention, Utilization
from specs.base import InvalidInputValue
from specs.cluster import DeviceType
from specs.graph import Block, ModelGraph

ATTENTION_SHARE = {AttentionFlop.NONE: 0.0, AttentionFlop.FULL: 1.0, AttentionFlop.CAUSAL: 0.5}
DEFAULT_CONVENTION = FlopConvention()


def flop_per_token(graph: ModelGraph, seq_len: int, convention: FlopConvention = DEFAULT_CONVENTION) -> float:
    """Model FLOP of one token, forward and backward, at sequences of ``seq_len`` tokens."""
    attention = products = table = 0.0
    for segment in graph.segments:
        block = graph.block(segment.block)
        for op in block.ops:
            kind = op_class_of(op.target)
            flop = segment.count * (op.forward_flop(1, seq_len) + op.backward_flop(1, seq_len)) / seq_len
            attention += flop if kind == OpClass.ATTENTION else 0.0
            products += flop if kind in PRODUCTS else 0.0
        table += segment.count * _table_params(block)
    # a tied table is the head's weight as well, whose product counts already
    counted = 6.0 * table if convention.embedding_table and not graph.tied else 0.0
    return products + counted + ATTENTION_SHARE[convention.attention] * attention


def _table_params(block: Block) -> int:
    """Elements of the embedding tables that the block looks up."""
    read = {name for op in block.ops if op_class_of(op.target) == OpClass.EMBEDDING for name in op.input_refs()}
    return sum(param.num_elements for param in block.params if param.name in read)


def utilization(
    graph: ModelGraph,
    device: DeviceType,
    *,
    seq_len: int,
    tokens_per_s: float,
    dtype: str = "bfloat16",
    convention: FlopConvention = DEFAULT_CONVENTION,
) -> Utilization:
    """The utilisation of ``tokens_per_s`` tokens per second on one ``device``; raises :class:`InvalidInputValue` above the peak."""
    per_token = flop_per_token(graph, seq_len, convention)
    return _checked(
        Utilization(
            model=graph.name, convention=convention, formula=convention.text(), seq_len=seq_len, tokens_per_s=tokens_per_s,
            flop_per_token=per_token, **_rates(device, dtype, per_token * tokens_per_s),
        )
    )  # fmt: skip


def utilization_of_rate(device: DeviceType, *, achieved_flop_per_s: float, dtype: str = "bfloat16") -> Utilization:
    """The utilisation of an achieved FLOP rate of one device; how its FLOP were counted stays its source's word."""
    formula = "FLOP as the source of the achieved rate counted them; of the dense peak"
    return _checked(Utilization(formula=formula, **_rates(device, dtype, achieved_flop_per_s)))


def _rates(device: DeviceType, dtype: str, achieved: float) -> dict[str, object]:
    if not achieved > 0:
        raise InvalidInputValue("not_positive", f"an achieved rate of {achieved:g} FLOP/s is none", actual=achieved, allowed="> 0")
    peak = peak_flop_per_s(device, dtype)
    source = device.provenance.get("peak_flop_per_s", "given")
    return {
        "device": device.name, "dtype": rate_dtype(device, dtype), "peak_flop_per_s": peak, "achieved_flop_per_s": achieved,
        "peak_source": f"dense, {source}", "mfu": achieved / peak,
    }  # fmt: skip


def _checked(found: Utilization) -> Utilization:
    """No device computes faster than its peak: a share above 1 means another device, dtype, count or time."""
    if found.mfu <= 1:
        return found
    raise InvalidInputValue(
        "utilization_above_peak",
        f"{found.achieved_flop_per_s / 1e12:.1f} TFLOP/s are {found.mfu:.0%} of the dense {found.dtype} peak of {found.device} "
        f"({found.peak_flop_per_s / 1e12:.1f} TFLOP/s): the device, the dtype, the count ({found.formula}) or the time is wrong",
        actual=found.mfu, allowed="<= 1",
    )  # fmt: skip
