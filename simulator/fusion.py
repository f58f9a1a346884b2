"""Which ops run as one kernel in software that fuses them, and what that saves in time and memory.

Chains of element-wise ops (with norms, where a compiler fuses) become one kernel that reads what comes from outside and writes
what is used outside; a group never contains two ops between which another op must run. Products that read one tensor
(query, key and value; gate and up) become one product where the software joins their weights.

Backward of a fused group reads the gradients of its results and what it kept, and writes the gradients of its inputs. It keeps
its inputs or what the separate ops would keep, whichever is less (the min-cut of a compiler's partitioner, in small).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.op_rules import gemm_kernel
from profiler.opset import Kernel, OpClass, base_name
from profiler.placed import LocalOp, LocalTensor, PlacedBlock, numeric_tensor
from simulator.memory_walk import saved_roots, weight_roots
from simulator.pricing import OpPrice, OpPricer
from specs.base import Provenance
from specs.graph import DTYPE_BYTES

POINTWISE = frozenset({OpClass.ELEMENTWISE, OpClass.COPY})
COMPILED = POINTWISE | {OpClass.NORM}


@dataclass(frozen=True, slots=True)
class Group:
    """Op positions that run as one kernel, with the roots that it reads and writes."""

    ops: tuple[int, ...]
    reads: tuple[LocalTensor, ...]
    writes: tuple[LocalTensor, ...]


def groups_of(placed: PlacedBlock, fusible: frozenset[OpClass]) -> list[Group]:
    """The groups of two or more ops (one is enough for a norm) that fuse, in op order."""
    ops = placed.ops
    producer = {tensor.root: index for index, op in enumerate(ops) for tensor in op.outputs if op.op_class != OpClass.VIEW}
    before = [{producer[t.root] for t in op.inputs if t.root in producer and producer[t.root] < i} for i, op in enumerate(ops)]
    ancestors = _ancestors(before)
    group = {index: index for index, op in enumerate(ops) if op.op_class in fusible}
    members = {index: {index} for index in group}
    for index in sorted(group):
        for source in sorted(before[index]):
            if source in group and group[source] != group[index]:
                joined = members[group[source]] | members[group[index]]
                if _is_convex(joined, ancestors):
                    name = group[source]
                    members[name] = joined
                    for member in joined:
                        group[member] = name
    found = {group[index] for index in group}
    return [_group(placed, tuple(sorted(members[name]))) for name in sorted(found) if len(members[name]) > 1 or _norm(ops, name)]


def _norm(ops: Sequence[LocalOp], index: int) -> bool:
    return ops[index].op_class == OpClass.NORM


def _ancestors(before: Sequence[set[int]]) -> list[int]:
    """For each op a bit mask of all ops that must run before it."""
    masks: list[int] = []
    for sources in before:
        mask = 0
        for source in sources:
            mask |= masks[source] | (1 << source)
        masks.append(mask)
    return masks


def _is_convex(members: set[int], ancestors: Sequence[int]) -> bool:
    """No op outside runs after one member and before another."""
    inside = sum(1 << index for index in members)
    for index in range(min(members), max(members) + 1):
        if index in members or not ancestors[index] & inside:
            continue
        if any(ancestors[member] >> index & 1 for member in members):
            return False
    return True


def _group(placed: PlacedBlock, members: tuple[int, ...]) -> Group:
    inside = set(members)
    made = {tensor.root for index in members for tensor in placed.ops[index].outputs}
    outside = {tensor.root for index, op in enumerate(placed.ops) if index not in inside for tensor in op.inputs}
    outside |= {tensor.root for tensor in placed.outputs}
    reads = {t.root: t for index in members for t in placed.ops[index].inputs if t.root not in made}
    writes = {t.root: t for index in members for t in placed.ops[index].outputs if t.root in outside}
    return Group(members, tuple(reads.values()), tuple(writes.values()))


class Fusion:
    """Prices of a block's ops with fusion applied; see the module docstring."""

    def __init__(self, placed: PlacedBlock, prices: Sequence[OpPrice], pricer: OpPricer, sizes: dict[str, float]) -> None:
        self.placed, self.prices, self.pricer, self.sizes = placed, list(prices), pricer, sizes
        self.weights = weight_roots(placed)
        self.compiled = pricer.software.fusion == "compiler"
        self.recomputed: set[str] = set()

    def run(self) -> list[OpPrice]:
        """The new prices, one per op; a group's price stands on its last op."""
        for group in groups_of(self.placed, COMPILED if self.compiled else POINTWISE):
            self._fuse(group)
        for index, op in enumerate(self.placed.ops):  # results that backward makes again are not kept by their readers either
            price = self.prices[index]
            inputs = tuple(position for position in price.saved_inputs if op.inputs[position].root not in self.recomputed)
            if inputs != price.saved_inputs:
                self.prices[index] = replace(price, saved_inputs=inputs)
        return self.prices

    def _bytes(self, tensors: Sequence[LocalTensor]) -> float:
        return sum(self.sizes[tensor.root] for tensor in tensors)

    def _fuse(self, group: Group) -> None:
        old = [self.prices[index] for index in group.ops]
        forward_class = OpClass.NORM if any(_norm(self.placed.ops, index) for index in group.ops) else OpClass.ELEMENTWISE
        forward_bytes = self._bytes(group.reads) + self._bytes(group.writes)
        grads = [tensor for tensor in group.reads if tensor.requires_grad and tensor.kind != "param"]
        kept, again = self._kept(group)
        self.recomputed |= again
        backward_bytes = self._bytes(group.writes) + self._bytes(grads) + sum(self.sizes[root] for root in kept | again)
        has_backward = any(price.backward_kernels for price in old)
        forward = self._seconds(forward_class, forward_bytes, backward=False)
        backward = self._seconds(forward_class, backward_bytes, backward=True) if has_backward else 0.0
        forward = min(forward, sum(price.forward_s for price in old))
        backward = min(backward, sum(price.backward_s for price in old))
        empty = replace(old[0], forward_s=0.0, backward_s=0.0, saved_inputs=(), saved_outputs=(), saved_extra_bytes=0.0,
                        backward_workspace_bytes=0.0, forward_kernels=0, backward_kernels=0)  # fmt: skip
        for index in group.ops:
            self.prices[index] = self._keeping(index, replace(empty, target=self.prices[index].target), kept)
        last = group.ops[-1]
        self.prices[last] = replace(
            self.prices[last], forward_s=forward, backward_s=backward, forward_kernels=1, backward_kernels=int(has_backward),
            source=_least_known(old), relative_error=_pooled_error(old),
            saved_extra_bytes=sum(price.saved_extra_bytes for price in old),
            backward_workspace_bytes=max(price.backward_workspace_bytes for price in old),
        )  # fmt: skip

    def _seconds(self, op_class: OpClass, moved: float, *, backward: bool) -> float:
        kernel = Kernel(op_class, 0, moved, 0, backward=backward)
        return self.pricer.kernel_s(kernel)

    def _kept(self, group: Group) -> tuple[set[str], set[str]]:
        """Roots that the group keeps for backward, and results of it that are then made again from those."""
        made = {tensor.root for index in group.ops for tensor in self.placed.ops[index].outputs}
        separate: set[str] = set()
        for index in group.ops:
            separate |= saved_roots(self.placed.ops[index], self.prices[index], self.weights)
        results: set[str] = set()
        if self.compiled:
            leaving = {tensor.root for tensor in self.placed.outputs}
            written = {tensor.root for tensor in group.writes} - leaving
            for index, op in enumerate(self.placed.ops):
                if index not in group.ops:
                    results |= saved_roots(op, self.prices[index], self.weights) & written
        if not (separate | results) & made:
            return separate, set()
        inputs = {tensor.root for tensor in group.reads if tensor.root not in self.weights and tensor.requires_grad}
        if self._total(inputs) < self._total(separate | results):
            return inputs, results
        return separate, set()

    def _total(self, roots: set[str]) -> float:
        return sum(self.sizes[root] for root in roots)

    def _keeping(self, index: int, price: OpPrice, kept: set[str]) -> OpPrice:
        """``price`` with what this op holds of ``kept``."""
        op = self.placed.ops[index]
        inputs = tuple(position for position, tensor in enumerate(op.inputs) if tensor.root in kept)
        outputs = tuple(position for position, tensor in enumerate(op.outputs) if tensor.root in kept)
        return replace(price, saved_inputs=inputs, saved_outputs=outputs)


def _least_known(prices: Sequence[OpPrice]) -> Provenance:
    known = [price.source for price in prices if price.seconds > 0]
    return max(known, key=list(Provenance).index, default=Provenance.FITTED)


def _pooled_error(prices: Sequence[OpPrice]) -> float:
    total = sum(price.seconds for price in prices)
    return sum(price.seconds * price.relative_error for price in prices) / total if total > 0 else 0.0


def join_projections(
    placed: PlacedBlock, prices: Sequence[OpPrice], pricer: OpPricer, batch: int, seq: int, dtype: str
) -> list[OpPrice]:
    """Linear layers that read one tensor as one product: the price of the whole, shared out by the widths of the parts."""
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(placed.ops):
        if base_name(op.op.target) == "linear":
            readers.setdefault(op.inputs[0].name, []).append(index)
    joined = list(prices)
    for members in readers.values():
        if len(members) < 2:
            continue
        x = numeric_tensor(placed.ops[members[0]].inputs[0], batch, seq, pricer.compute_dtype)
        widths = [numeric_tensor(placed.ops[i].inputs[1], batch, seq, pricer.compute_dtype).shape[0] for i in members]
        rows, k, size = x.numel // x.shape[-1], x.shape[-1], DTYPE_BYTES[dtype]
        forward = pricer.kernel_s(gemm_kernel(rows, sum(widths), k, 1, size), dtype)
        backward = pricer.kernel_s(gemm_kernel(rows, k, sum(widths), 1, size, backward=True), dtype)
        backward += pricer.kernel_s(gemm_kernel(sum(widths), k, rows, 1, size, backward=True), dtype)
        for member, width in zip(members, widths, strict=True):
            share = width / sum(widths)
            first, alone = int(member == members[0]), joined[member]
            backward_s = min(alone.backward_s, backward * share)
            joined[member] = replace(
                alone, forward_s=min(alone.forward_s, forward * share), backward_s=backward_s,
                weight_grad_s=backward_s * alone.weight_grad_share, forward_kernels=first, backward_kernels=2 * first,
            )  # fmt: skip
    return joined


def add_shared_gradients(
    placed: PlacedBlock, prices: Sequence[OpPrice], pricer: OpPricer, sizes: Mapping[str, float]
) -> list[OpPrice]:
    """Autograd sums the gradients of a tensor that several ops read: a kernel of two reads and a write for each further one.

    A compiler folds the sums into its kernels; joint projections are one reader. ``sizes``: bytes by tensor name.
    """
    priced = list(prices)
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(placed.ops):
        for tensor in op.inputs:
            if tensor.requires_grad and tensor.kind not in ("param", "buffer"):
                readers.setdefault(tensor.name, []).append(index)
    for name, members in readers.items():
        products = [index for index in members if placed.ops[index].op_class == OpClass.GEMM]
        joined = len(products) - 1 if pricer.software.joint_projections and len(products) > 1 else 0
        sums = len(set(members)) - 1 - joined
        if sums > 0:
            tensor = next(item for item in placed.ops[members[0]].inputs if item.name == name)
            moved = 3 * sizes[tensor.name]
            kernel = Kernel(OpClass.ELEMENTWISE, 0, moved, 0, backward=True)
            first, seconds = priced[members[0]], sums * pricer.kernel_s(kernel)
            total = first.seconds + seconds
            error = first.seconds * first.relative_error + seconds * pricer.kernel_error(kernel)
            priced[members[0]] = replace(
                first, backward_s=first.backward_s + seconds, backward_kernels=first.backward_kernels + sums,
                relative_error=error / max(total, 1e-30),
            )  # fmt: skip
    return priced
