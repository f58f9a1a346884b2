"""The price of an op on a device: the one way that anything in Meshwright turns an op into seconds.

First that applies: measured on this device at this shape -> interpolated between measurements -> extrapolated from
measurements -> efficiency model from the device's specs. The answer says which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from profiler.interpolate import OpTable
from profiler.opset import DEFAULT_KERNELS, PRODUCTS, Call, Kernel, Kernels, OpClass, OpRule, Tensor, describe
from profiler.placed import LocalOp, numeric_tensor
from profiler.shapes import record_key
from simulator.efficiency import defaults, kernel_time_s, relative_error, source_of
from simulator.factors import UNCALIBRATED, Factors
from simulator.software import NATIVE, Software, attention_slowdown
from specs.base import Provenance
from specs.cluster import DeviceType
from specs.profile import DeviceProfile, OpRecord


@dataclass(frozen=True, slots=True)
class OpPrice:
    """Seconds of one op forward and backward, what memory it holds, and where the numbers come from.

    ``saved_inputs``/``saved_outputs`` are positions among the op's tensor arguments / results. ``*_kernels``: kernels whose launch
    is not in the seconds (measured ones include it). ``relative_error``: expected of both passes together. ``weight_grad_s``: the
    part of backward that makes gradients of parameters alone; those of biases and norms come with the input's gradient.
    """

    forward_s: float
    backward_s: float
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    saved_extra_bytes: float
    forward_workspace_bytes: float
    backward_workspace_bytes: float
    source: Provenance
    target: str
    known: bool = True
    forward_kernels: int = 0
    backward_kernels: int = 0
    relative_error: float = 0.0
    weight_grad_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s

    @property
    def weight_grad_share(self) -> float:
        """Share of backward that makes gradients of parameters alone."""
        return self.weight_grad_s / self.backward_s if self.backward_s > 0 else 0.0


# Kernels that a software adds to a view (sums of gradients) are priced by the efficiency model.
FREE = OpPrice(0.0, 0.0, (), (), 0.0, 0.0, 0.0, Provenance.FITTED, "view")


def _lengthened(tensor: Tensor, factor: int) -> Tensor:
    """A key or value (batch, heads, length, head size) of a longer sequence."""
    return replace(tensor, shape=(*tensor.shape[:2], tensor.shape[2] * factor, *tensor.shape[3:]))


class OpPricer:
    """Prices ops of one device type, optionally with its measured profile."""

    def __init__(
        self,
        device: DeviceType,
        compute_dtype: str,
        profile: DeviceProfile | None = None,
        kernels: Kernels = DEFAULT_KERNELS,
        software: Software = NATIVE,
        factors: Factors = UNCALIBRATED,
    ) -> None:
        self.kernels, self.software, self.factors = kernels, software, factors
        self.device = device
        self.compute_dtype = compute_dtype
        self.profile = profile
        self.table = OpTable(profile) if profile is not None else None
        launch = profile.launch_s if profile is not None and profile.launch_s is not None else software.launch_s
        default_s = 0.0 if device.kind == "cpu_process" else float(defaults()["launch_s"])
        self.launch_s = factors.host * (launch if launch is not None else default_s)
        self.context = {item.block: item for item in profile.context_factors} if profile is not None else {}

    def price(self, op: LocalOp, batch: int, seq: int, block: str = "", *, matmul_dtype: str | None = None, cp: int = 1) -> OpPrice:
        """Price ``op`` at micro-batch ``batch`` and sequence ``seq``; ``block`` selects the context factor of measured ops.

        ``matmul_dtype``: products run in it instead of the compute dtype. ``cp``: attention sees that many times the keys and
        values that the rank itself holds.
        """
        if op.op_class == OpClass.VIEW:
            return FREE
        inputs = tuple(numeric_tensor(tensor, batch, seq, self.compute_dtype) for tensor in op.inputs)
        outputs = tuple(numeric_tensor(tensor, batch, seq, self.compute_dtype) for tensor in op.outputs)
        if cp > 1 and op.op_class == OpClass.ATTENTION:
            inputs = (inputs[0], *(_lengthened(tensor, cp) for tensor in inputs[1:3]), *inputs[3:])
        rule = describe(Call(op.op.target, inputs, outputs, op.op.args, op.op.kwargs, self.kernels))
        found = None
        if self.table is not None and self._is_measured_kernel(op.op_class):
            found = self.table.lookup(record_key(op, batch, seq, self.compute_dtype))
        if found is not None:
            return self._measured(op, rule, found.forward_s, found.backward_s, found.provenance, found.record, block)
        dtype = matmul_dtype if matmul_dtype is not None and op.op_class in PRODUCTS else self.compute_dtype
        return self._modelled(op, rule, dtype)

    def _modelled(self, op: LocalOp, rule: OpRule, dtype: str) -> OpPrice:
        """By the efficiency model; assumed as a whole where one of its kernels or its rule is."""
        forward = [self.kernel_s(kernel, dtype) for kernel in rule.forward]
        backward = [self.kernel_s(kernel, dtype) for kernel in rule.backward]
        source, error_s = Provenance.FITTED if rule.known else Provenance.ASSUMED, 0.0
        for kernel, seconds in zip((*rule.forward, *rule.backward), (*forward, *backward), strict=True):
            error_s += seconds * self.kernel_error(kernel, dtype)
            if source_of(kernel, self.device, dtype) == Provenance.ASSUMED:
                source = Provenance.ASSUMED
        return OpPrice(
            sum(forward), sum(backward), rule.saved_inputs, rule.saved_outputs, float(rule.saved_extra_bytes), 0.0,
            float(rule.backward_workspace_bytes), source, op.op.target, rule.known, len(forward), len(backward),
            error_s / max(sum(forward) + sum(backward), 1e-30),
            sum(seconds for kernel, seconds in zip(rule.backward, backward, strict=True) if kernel.weight_grad),
        )  # fmt: skip

    def kernel_s(self, kernel: Kernel, dtype: str | None = None) -> float:
        """Seconds of one kernel by the efficiency model, on the software's generation of it."""
        seconds = kernel_time_s(kernel, self.device, dtype or self.compute_dtype)
        if kernel.op_class == OpClass.ATTENTION:
            seconds *= attention_slowdown(self.software.attention_generation, self.device.arch, backward=kernel.backward)
        return seconds * self.factors.of_op(kernel.op_class)

    def kernel_error(self, kernel: Kernel, dtype: str | None = None) -> float:
        """Expected relative error of :meth:`kernel_s` on unseen data."""
        return relative_error(kernel, self.device, dtype or self.compute_dtype)

    def _is_measured_kernel(self, op_class: OpClass) -> bool:
        """Profiles measure torch's default kernels: flash attention and the full loss."""
        special = {OpClass.ATTENTION: self.kernels.attention != "flash", OpClass.LOSS: self.kernels.loss != "full"}
        return not special.get(op_class, False)

    def _measured(
        self,
        op: LocalOp,
        rule: OpRule,
        forward_s: float,
        backward_s: float,
        source: Provenance,
        record: OpRecord | None,
        block: str,
    ) -> OpPrice:
        factor = self.context.get(block) or self.context.get("")
        if factor is not None:
            forward_s, backward_s = forward_s * factor.forward, backward_s * factor.backward
        forward_s, backward_s = (seconds * self.factors.of_op(op.op_class) for seconds in (forward_s, backward_s))
        saved_inputs, saved_outputs, extra = rule.saved_inputs, rule.saved_outputs, float(rule.saved_extra_bytes)
        forward_workspace, backward_workspace = 0.0, float(rule.backward_workspace_bytes)
        if record is not None:
            saved_inputs = record.saved_inputs if record.saved_inputs is not None else saved_inputs
            saved_outputs = record.saved_outputs if record.saved_outputs is not None else saved_outputs
            extra = record.saved_extra_bytes if record.saved_extra_bytes is not None else extra
            forward_workspace = record.forward_workspace_bytes or 0.0
            backward_workspace = (
                record.backward_workspace_bytes if record.backward_workspace_bytes is not None else backward_workspace
            )
        return OpPrice(
            forward_s, backward_s, saved_inputs, saved_outputs, extra, forward_workspace, backward_workspace, source, op.op.target,
            relative_error=float(defaults()["interval"][source.value]), weight_grad_s=backward_s * even_share(rule),
        )  # fmt: skip


def even_share(rule: OpRule) -> float:
    """Share of an op's backward that makes gradients of parameters, every kernel taken as equally long: a measurement has backward
    as a whole (the two products of a linear layer's backward have the same FLOP)."""
    return sum(kernel.weight_grad for kernel in rule.backward) / len(rule.backward) if rule.backward else 0.0
