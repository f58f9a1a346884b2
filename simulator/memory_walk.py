"""Memory of a unit op by op: what autograd keeps between forward and backward, and the most that is held in either."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from profiler.opset import FUSED_LOSS_CHUNK, PRODUCTS, OpClass
from profiler.placed import LocalOp, LocalTensor, PlacedBlock, numeric_tensor
from simulator.kept import kept_sizes, made_again
from simulator.pricing import OpPrice, OpPricer
from specs.plan import RecomputeMode

EVERY_SECOND_PRODUCT = "gemm/2"
# Ops whose weight gradients are kernels of their own; those of norms and biases come with the input's gradient.
WITH_WEIGHTS = (*PRODUCTS, OpClass.EMBEDDING)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """How a unit recomputes: mode and, if selective, the op classes that are recomputed.

    ``EVERY_SECOND_PRODUCT`` among them means by operator: the results of attention and of every second product are kept, everything
    else is made again (torchtitan's per-op activation checkpointing). The words of ``simulator.kept.DISCARDED`` mean results that
    are dropped after use, not only what an op keeps for itself.
    """

    mode: RecomputeMode = RecomputeMode.NONE
    op_classes: tuple[str, ...] = ()

    @property
    def by_operator(self) -> bool:
        """Whether results of operators are kept instead of what the other ops save."""
        return self.mode == RecomputeMode.SELECTIVE and EVERY_SECOND_PRODUCT in self.op_classes


def weight_roots(placed: PlacedBlock) -> frozenset[str]:
    """Storages of parameters and buffers: they are there anyway, whatever view of them an op keeps."""
    return frozenset(name for name, tensor in placed.params.items() if tensor.kind in ("param", "buffer"))


def saved_roots(op: LocalOp, price: OpPrice, weights: Set[str]) -> set[str]:
    """Storages that an op keeps for backward beside the ``weights``."""
    tensors = [op.inputs[index] for index in price.saved_inputs if index < len(op.inputs)]
    tensors += [op.outputs[index] for index in price.saved_outputs if index < len(op.outputs)]
    return {tensor.root for tensor in tensors if tensor.root not in weights}


class MemoryWalk:
    """Bytes held while the block's ops run forward and backward, by the storage each tensor lives in."""

    def __init__(
        self, placed: PlacedBlock, prices: list[OpPrice], batch: int, seq: int, pricer: OpPricer, recompute: RecomputeChoice,
        matmul_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.placed, self.prices, self.batch, self.seq, self.dtype = placed, prices, batch, seq, pricer.compute_dtype
        self.recompute = recompute
        self.weights = weight_roots(placed)
        self.sizes: dict[str, float] = {}
        for tensor in (*placed.inputs, *(t for op in placed.ops for t in (*op.inputs, *op.outputs))):
            self.sizes.setdefault(tensor.root, 0.0)
            self.sizes[tensor.root] = max(self.sizes[tensor.root], self.bytes_of(tensor))
        if pricer.kernels.loss == "fused":
            for op in placed.ops:
                if op.op_class == OpClass.LOSS:
                    self.sizes[op.inputs[0].root] *= FUSED_LOSS_CHUNK
        self.saved_by_op = [saved_roots(op, price, self.weights) for op, price in zip(placed.ops, prices, strict=True)]
        self.kept_sizes = kept_sizes(
            placed, self.sizes, self.saved_by_op, pricer.software, matmul_dtype, batch=batch, seq=seq, dtype=self.dtype
        )
        self.discarded = self._discarding_ops()
        self.recomputed = self._recomputed_ops()
        inputs = {tensor.root for tensor in placed.inputs}
        dropped = {tensor.root for index in self.discarded for tensor in placed.ops[index].outputs} - inputs
        self.kept_by_op = [
            self._inputs_to_rerun(index) if index in self.recomputed else saved - dropped
            for index, saved in enumerate(self.saved_by_op)
        ]
        if recompute.by_operator:
            for index, op in enumerate(placed.ops):
                self.kept_by_op[index] = set() if index in self.recomputed else {tensor.root for tensor in op.outputs}
            if self.kept_by_op:
                self.kept_by_op[0] = self.kept_by_op[0] | {tensor.root for tensor in placed.inputs}

    def bytes_of(self, tensor: LocalTensor) -> float:
        """Local bytes of a tensor."""
        return float(numeric_tensor(tensor, self.batch, self.seq, self.dtype).bytes)

    def _inputs_to_rerun(self, index: int) -> set[str]:
        """Attention runs again from its queries, keys and values, unless their ops run again as well; element-wise ops and norms
        start from what their neighbours keep."""
        op = self.placed.ops[index]
        if op.op_class != OpClass.ATTENTION and index not in self.discarded:
            return set()
        made = {tensor.root for other in self.recomputed for tensor in self.placed.ops[other].outputs}
        return {tensor.root for tensor in op.inputs} - made - self.weights

    def _discarding_ops(self) -> frozenset[int]:
        if self.recompute.mode != RecomputeMode.SELECTIVE:
            return frozenset()
        return made_again(self.placed, self.recompute.op_classes)

    def _recomputed_ops(self) -> frozenset[int]:
        """Positions of the ops that selective recompute runs again."""
        if self.recompute.mode != RecomputeMode.SELECTIVE:
            return frozenset()
        ops = self.placed.ops
        if not self.recompute.by_operator:
            classes = self.recompute.op_classes
            return self.discarded | {index for index, op in enumerate(ops) if op.op_class.value in classes}
        products = [index for index, op in enumerate(ops) if op.op_class in PRODUCTS]
        kept = {*products[::2], *(index for index, op in enumerate(ops) if op.op_class == OpClass.ATTENTION)}
        return frozenset(range(len(ops))) - kept

    def rerun_ops(self, *, stops_early: bool) -> int:
        """How many ops, from the first on, full recompute runs again.

        ``stops_early``: it ends when the last tensor that backward needs is there. An op that keeps nothing but inputs has packed
        them before it runs, so it does not run again.
        """
        if not stops_early:
            return len(self.prices)
        for index in reversed(range(len(self.prices))):
            price, op = self.prices[index], self.placed.ops[index]
            if price.saved_extra_bytes or any(position < len(op.outputs) for position in price.saved_outputs):
                return index + 1
            if self.saved_by_op[index]:
                return index
        return 0

    def _extra(self, index: int) -> float:
        return 0.0 if index in self.recomputed else self.prices[index].saved_extra_bytes

    def all_saved_bytes(self) -> float:
        """What an uncheckpointed forward keeps."""
        roots = set().union(*self.kept_by_op) if self.kept_by_op else set()
        return sum(self.kept_sizes[root] for root in roots) + sum(self._extra(index) for index in range(len(self.prices)))

    def saved_bytes(self) -> float:
        """What is kept between forward and backward."""
        if self.recompute.mode == RecomputeMode.FULL:
            return sum(self.bytes_of(tensor) for tensor in self.placed.inputs)
        return self.all_saved_bytes()

    def saved_by_class(self) -> dict[str, float]:
        """The same by the class of the op that keeps it first; with full recompute all of it is the unit's input."""
        if self.recompute.mode == RecomputeMode.FULL:
            return {"unit input": self.saved_bytes()}
        found: dict[str, float] = {}
        seen: set[str] = set()
        for index, op in enumerate(self.placed.ops):
            own = sum(self.kept_sizes[root] for root in self.kept_by_op[index] - seen) + self._extra(index)
            seen |= self.kept_by_op[index]
            if own:
                found[op.op_class.value] = found.get(op.op_class.value, 0.0) + own
        return found

    def forward_peak(self) -> float:
        """Most bytes held during forward beyond what is kept at its end (the unit's input not counted unless kept)."""
        keep_all = self.recompute.mode != RecomputeMode.FULL
        return max(0.0, self._forward_curve(keep_all) - self.saved_bytes())

    def _forward_curve(self, keep: bool) -> float:
        """Peak of live bytes while running forward, with (or without) what autograd keeps."""
        last_use: dict[str, int] = {}
        for index, op in enumerate(self.placed.ops):
            last_use.update({tensor.root: index for tensor in op.inputs})
        outputs = {tensor.root for tensor in self.placed.outputs}
        live = {tensor.root for tensor in self.placed.inputs}
        kept: set[str] = set() if keep else {tensor.root for tensor in self.placed.inputs}
        extra = peak = 0.0
        for index, op in enumerate(self.placed.ops):
            live |= {tensor.root for tensor in op.outputs}
            if keep:
                kept |= self.kept_by_op[index]
                extra += self._extra(index)
            now = sum(self.sizes[root] for root in live - self.weights) + extra
            now += sum(self.kept_sizes[root] for root in kept - live - self.weights)
            peak = max(peak, now + self.prices[index].forward_workspace_bytes)
            live = {root for root in live if last_use.get(root, -1) > index or root in outputs}
        return peak

    def _weight_needs(self) -> tuple[set[str], set[str]]:
        """Roots that gradients of parameters are made from: inputs of the ops with parameters, and their results' gradients."""
        inputs: set[str] = set()
        results: set[str] = set()
        for op in self.placed.ops:
            if op.op_class in WITH_WEIGHTS and any(tensor.kind == "param" and tensor.requires_grad for tensor in op.inputs):
                inputs |= {tensor.root for tensor in op.inputs} - self.weights
                results |= {tensor.root for tensor in op.outputs}
        return inputs, results

    def weight_saved_bytes(self) -> float:
        """What stays after the input-gradient part of a split backward until the weight gradients are made."""
        inputs, results = self._weight_needs()
        return sum(self.kept_sizes[root] for root in inputs) + sum(self.sizes[root] for root in results)

    def backward_peak(self, *, split: bool = False) -> float:
        """Most bytes held in backward beyond what was kept before it: activation gradients, temporaries, recomputed tensors.

        Walks the ops in reverse: the gradient of each result lives from its first use until the op's backward ran; what an op
        kept is freed once no earlier op kept it too. Weight gradients are counted elsewhere. ``split``: of the input-gradient part
        alone, which frees nothing that weight gradients need.
        """
        start = self.saved_bytes()
        inputs, results_kept = self._weight_needs() if split else (set(), set())
        held = self.all_saved_bytes() + (start if self.recompute.mode == RecomputeMode.FULL else 0.0)
        if self.recompute.mode == RecomputeMode.SELECTIVE:
            held += self._recomputed_bytes()
        first_keeper: dict[str, int] = {}
        for index in reversed(range(len(self.placed.ops))):
            for root in self.saved_by_op[index] if self.recompute.mode == RecomputeMode.SELECTIVE else self.kept_by_op[index]:
                if root not in inputs:
                    first_keeper[root] = index
        grads = {tensor.root for tensor in self.placed.outputs if tensor.requires_grad}
        peak = held + sum(self.sizes[root] for root in grads)
        for index in reversed(range(len(self.placed.ops))):
            op, price = self.placed.ops[index], self.prices[index]
            if not any(tensor.requires_grad for tensor in op.outputs):
                continue
            produced = {tensor.root for tensor in op.inputs if tensor.requires_grad and tensor.root not in self.weights}
            now = held + sum(self.sizes[root] for root in grads | produced) + price.backward_workspace_bytes
            now += sum(max(0.0, self.sizes[root] - self.kept_sizes[root]) for root in self.saved_by_op[index])
            peak = max(peak, now)
            results = {tensor.root for tensor in op.outputs}
            grads = (grads | produced) - (results - produced - results_kept)
            held -= sum(self.kept_sizes[root] for root, keeper in first_keeper.items() if keeper == index) + price.saved_extra_bytes
        return max(0.0, max(peak, self.weight_saved_bytes() if split else 0.0) - start)

    def _recomputed_bytes(self) -> float:
        again = set().union(*self.saved_by_op, set())
        kept = set().union(*self.kept_by_op, set())
        extra = sum(self.prices[index].saved_extra_bytes for index in self.recomputed)
        return sum(self.kept_sizes[root] for root in again - kept) + extra
