"""Cost of one unit (an instance of a block) on one rank: time, tensor-parallel collectives, and memory op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from profiler.opset import PRODUCTS, OpClass
from profiler.placed import LocalTensor, PlacedBlock, numeric_tensor
from simulator.exchange import WHOLE, Split, exchanges, exposed_s, with_local_experts
from simulator.factors import COMPUTE
from simulator.fusion import Fusion, add_shared_gradients, join_projections
from simulator.memory_walk import MemoryWalk, RecomputeChoice
from simulator.network import GroupShape, Network
from simulator.pricing import OpPrice, OpPricer
from specs.base import Provenance
from specs.graph import DTYPE_BYTES
from specs.plan import RecomputeMode


@dataclass(slots=True)
class SourceShare:
    """What rests on one kind of number: seconds forward and backward, their expected absolute error (its squares by op summed up),
    how many ops, and how many of the seconds are arithmetic (products and attention)."""

    seconds: float = 0.0
    error_s: float = 0.0
    num_ops: int = 0
    error_squares: float = 0.0
    arithmetic_s: float = 0.0

    def add(self, other: SourceShare) -> None:
        """Count another share in."""
        self.seconds += other.seconds
        self.error_s += other.error_s
        self.num_ops += other.num_ops
        self.error_squares += other.error_squares
        self.arithmetic_s += other.arithmetic_s


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit at one micro-batch on one rank.

    Seconds: compute forward, backward (recompute apart), and tensor-parallel collectives of each. Bytes: kept between
    forward and backward (``saved_bytes``, the unit's input included when something needs it); most held beyond that during forward
    and during backward; size of the residual stream that enters and leaves; what is kept, by the class of the op that keeps it.

    Backward may be split: ``weight_grad_s`` of ``backward_s`` can run later, and then ``weight_saved_bytes`` stay until it has
    run, ``input_backward_peak_bytes`` is the most held in the rest beyond ``saved_bytes``, and tensor-parallel collectives take
    ``tp_split_backward_s``.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    tp_forward_s: float
    tp_backward_s: float
    tp_recompute_s: float
    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    input_bytes: float
    output_bytes: float
    tp_bytes: float
    tp_forward_calls: int
    tp_backward_calls: int
    partial_grad_elements: float
    weight_grad_s: float = 0.0
    weight_saved_bytes: float = 0.0
    input_backward_peak_bytes: float = 0.0
    tp_split_backward_s: float = 0.0
    exchange_forward: dict[str, float] = field(default_factory=dict)
    exchange_backward: dict[str, float] = field(default_factory=dict)
    exchange_bytes: float = 0.0
    by_source: dict[Provenance, SourceShare] = field(default_factory=dict)
    unknown_ops: tuple[str, ...] = ()
    saved_by_class: dict[str, float] = field(default_factory=dict)

    @property
    def total_forward_s(self) -> float:
        """Forward with its collectives."""
        return self.forward_s + self.tp_forward_s + sum(self.exchange_forward.values())

    @property
    def total_backward_s(self) -> float:
        """Backward with recompute and collectives."""
        return self.backward_s + self.recompute_s + self.tp_backward_s + self.tp_recompute_s + sum(self.exchange_backward.values())


def unit_cost(
    placed: PlacedBlock,
    pricer: OpPricer,
    network: Network,
    tp_shape: GroupShape,
    *,
    batch: int,
    seq: int,
    recompute: RecomputeChoice,
    matmul_dtype: str | None = None,
    split: Split = WHOLE,
) -> UnitCost:
    """Price every op and collective of a placed block and walk its memory. ``matmul_dtype``: of its products, where narrower.

    ``seq`` is the whole sequence; ``split`` says over how many context- and expert-parallel ranks the unit is spread.
    """
    placed, seq = with_local_experts(placed, split.ep), -(-seq // split.cp)
    prices = block_prices(placed, pricer, batch, seq, matmul_dtype, cp=split.cp)
    exchanged = exchanges(placed, prices, network, split, batch=batch, seq=seq, dtype=pricer.compute_dtype)
    exchange_backward = dict(exchanged.backward)
    if recompute.mode == RecomputeMode.FULL:
        for name, seconds in exchanged.forward.items():
            exchange_backward[name] = exchange_backward.get(name, 0.0) + seconds
    walk = MemoryWalk(placed, prices, batch, seq, pricer, recompute, matmul_dtype)
    forward = busy_s(prices, pricer.launch_s)
    backward = busy_s(prices, pricer.launch_s, backward=True)
    regathers = pricer.software.regathers_inputs
    comm = _Collectives(placed, network, tp_shape, batch, seq, pricer.compute_dtype, regathers=regathers)
    comm.hide(prices, pricer.software.tp_overlap)
    rerun = walk.rerun_ops(stops_early=pricer.software.recompute_stops_early)
    recompute_s, tp_recompute_s = 0.0, 0.0
    if recompute.mode == RecomputeMode.FULL:
        recompute_s = busy_s(prices[:rerun], pricer.launch_s)
        tp_recompute_s = comm.forward_s(before=rerun)
    elif recompute.mode == RecomputeMode.SELECTIVE:
        recompute_s = sum(prices[index].forward_s for index in walk.recomputed)
    return UnitCost(
        forward_s=forward,
        backward_s=backward,
        recompute_s=recompute_s,
        tp_forward_s=comm.forward_s(),
        tp_backward_s=comm.backward_s(),
        tp_recompute_s=tp_recompute_s,
        saved_bytes=walk.saved_bytes(),
        forward_peak_bytes=walk.forward_peak(),
        backward_peak_bytes=walk.backward_peak(),
        input_bytes=sum(walk.bytes_of(tensor) for tensor in placed.inputs if tensor.requires_grad),
        output_bytes=sum(walk.bytes_of(tensor) for tensor in placed.outputs),
        tp_bytes=comm.total_bytes,
        tp_forward_calls=len(comm.forward),
        tp_backward_calls=len(comm.backward),
        partial_grad_elements=sum(_numel(placed.params[name]) for name in placed.partial_grad_params),
        weight_grad_s=backward * _weight_grad_share(prices),
        weight_saved_bytes=walk.weight_saved_bytes(),
        input_backward_peak_bytes=walk.backward_peak(split=True),
        tp_split_backward_s=comm.backward_s() + comm.unhidden_s,
        exchange_forward=exchanged.forward,
        exchange_backward=exchange_backward,
        exchange_bytes=exchanged.num_bytes,
        by_source=_by_source(placed, prices),
        unknown_ops=tuple(sorted({price.target for price in prices if not price.known})),
        saved_by_class=walk.saved_by_class(),
    )


def _by_source(placed: PlacedBlock, prices: Sequence[OpPrice]) -> dict[Provenance, SourceShare]:
    found: dict[Provenance, SourceShare] = {}
    for op, price in zip(placed.ops, prices, strict=True):
        if price.seconds > 0:  # views, and ops that a fusion took in, cost nothing
            error_s = price.seconds * price.relative_error
            share = SourceShare(price.seconds, error_s, 1, error_s**2, price.seconds if op.op_class in COMPUTE else 0.0)
            found.setdefault(price.source, SourceShare()).add(share)
    return found


def _weight_grad_share(prices: Sequence[OpPrice]) -> float:
    """Share of backward that makes gradients of parameters alone; launches are taken to be shared out alike."""
    total = sum(price.backward_s for price in prices)
    return sum(price.weight_grad_s for price in prices) / total if total > 0 else 0.0


def busy_s(prices: Sequence[OpPrice], launch_s: float, *, backward: bool = False) -> float:
    """Seconds of a run of ops: the device's, or the host's where launching its kernels takes longer than running them."""
    device = sum(price.backward_s if backward else price.forward_s for price in prices)
    kernels = sum(price.backward_kernels if backward else price.forward_kernels for price in prices)
    return max(device, launch_s * kernels)


def block_prices(
    placed: PlacedBlock, pricer: OpPricer, batch: int, seq: int, matmul_dtype: str | None = None, cp: int = 1
) -> list[OpPrice]:
    """The price of every op of a block as the software runs it: fused where it fuses."""
    if matmul_dtype is not None and any(op.op_class == OpClass.LOSS for op in placed.ops):
        matmul_dtype = None  # the output head keeps the compute dtype
    prices = [pricer.price(op, batch, seq, placed.block.name, matmul_dtype=matmul_dtype, cp=cp) for op in placed.ops]
    if pricer.software.joint_projections:
        prices = join_projections(placed, prices, pricer, batch, seq, matmul_dtype or pricer.compute_dtype)
    if pricer.software.caches_positions:
        prices = _without_constants(placed, prices)
    if pricer.software.fusion != "none":
        prices = Fusion(placed, prices, pricer, root_bytes(placed, batch, seq, pricer.compute_dtype)).run()
    if pricer.software.fusion == "compiler" or pricer.table is not None or pricer.device.kind == "cpu_process":
        return prices
    return add_shared_gradients(placed, prices, pricer, _tensor_bytes(placed, batch, seq, pricer.compute_dtype))


def _without_constants(placed: PlacedBlock, prices: list[OpPrice]) -> list[OpPrice]:
    """Ops that depend on no input and no parameter are run once, not in every pass."""
    constant: set[str] = {name for name, tensor in placed.params.items() if tensor.kind == "buffer"}
    found = []
    for op, price in zip(placed.ops, prices, strict=True):
        if all(tensor.name in constant for tensor in op.inputs):
            constant |= {tensor.name for tensor in op.outputs}
            price = replace(price, forward_s=0.0, backward_s=0.0, forward_kernels=0, backward_kernels=0)
        found.append(price)
    return found


def root_bytes(placed: PlacedBlock, batch: int, seq: int, compute_dtype: str) -> dict[str, float]:
    """Local bytes of every storage of the block, parameters included."""
    sizes: dict[str, float] = {}
    for tensor in (*placed.params.values(), *placed.inputs, *(t for op in placed.ops for t in (*op.inputs, *op.outputs))):
        size = float(numeric_tensor(tensor, batch, seq, compute_dtype).bytes)
        sizes[tensor.root] = max(sizes.get(tensor.root, 0.0), size)
    return sizes


def _tensor_bytes(placed: PlacedBlock, batch: int, seq: int, compute_dtype: str) -> dict[str, float]:
    """Local bytes of every activation by its own name (a slice counts as itself)."""
    tensors = (*placed.inputs, *(t for op in placed.ops for t in (*op.inputs, *op.outputs)))
    return {tensor.name: float(numeric_tensor(tensor, batch, seq, compute_dtype).bytes) for tensor in tensors}


def _numel(tensor: LocalTensor) -> float:
    total = 1.0
    for size in tensor.shape:
        total *= size(1, 1)
    return total


class _Collectives:
    """The block's tensor-parallel collectives, priced."""

    def __init__(
        self, placed: PlacedBlock, network: Network, shape: GroupShape, batch: int, seq: int, dtype: str, *, regathers: bool = False
    ) -> None:
        self.placed = placed
        self.forward: list[tuple[int, float]] = []
        self.backward: list[float] = []
        self._sites: list[tuple[int, bool, str]] = []  # of backward: op, whether before it, tensor
        self._forward_sites: list[tuple[int, bool, str]] = []
        self.total_bytes = 0.0
        self.unhidden_s = 0.0
        element_bytes = {"float32": DTYPE_BYTES[dtype]}
        for index, op in enumerate(placed.ops):
            for before, item in [*((True, c) for c in op.before), *((False, c) for c in op.after)]:
                size = item.num_elements(batch, seq) * (4.0 if item.count > 1 else element_bytes.get(item.dtype, 4.0))
                again = regathers and before and item.forward == "all_gather" and op.op_class in PRODUCTS
                directions = [(item.forward, "forward"), (item.backward, "backward")]
                for kind, sink in [*directions, *([("all_gather", "backward")] if again else [])]:
                    if kind is None:
                        continue
                    seconds = item.count * network.collective(kind, size, shape).seconds
                    self.total_bytes += item.count * size
                    if sink == "forward":
                        self.forward.append((index if before else index + 1, seconds))
                        self._forward_sites.append((index, before, item.tensor))
                    else:
                        self.backward.append(seconds)
                        self._sites.append((index, before, item.tensor))

    def hide(self, prices: Sequence[OpPrice], overlap: str) -> None:
        """Keep of each collective what the software does not hide behind the products that it belongs to.

        ``backward``: sums of input gradients run beside the weight gradients of the products that read the tensor. ``ring``: every
        collective is cut into parts that run beside parts of its product.
        """
        if overlap == "none":
            return
        for position, (index, before, tensor) in enumerate(self._sites):
            if before:
                beside = sum(prices[reader].backward_s / 2 for reader in self._readers(index, tensor))
            else:
                beside = prices[index].backward_s if overlap == "ring" else 0.0
            hidden = exposed_s(self.backward[position], beside)
            if before and overlap == "backward":  # split from the input gradient, the weight gradients run too late to hide it
                self.unhidden_s += self.backward[position] - hidden
            self.backward[position] = hidden
        if overlap == "ring":
            for position, (index, before, tensor) in enumerate(self._forward_sites):
                readers = self._readers(index, tensor) if before else [index]
                at, seconds = self.forward[position]
                self.forward[position] = (at, exposed_s(seconds, sum(prices[reader].forward_s for reader in readers)))

    def _readers(self, index: int, tensor: str) -> list[int]:
        """Products that read the tensor that is gathered (or whose gradient is summed) before op ``index``."""
        ops = self.placed.ops
        return [
            position
            for position, op in enumerate(ops)
            if position >= index and op.op_class in PRODUCTS and any(item.name == tensor for item in op.inputs)
        ]

    def forward_s(self, before: int | None = None) -> float:
        """Seconds of forward collectives; ``before``: those alone that come before op ``before`` reads its inputs."""
        return sum(seconds for index, seconds in self.forward if before is None or index <= before)

    def backward_s(self) -> float:
        """Seconds of backward collectives."""
        return sum(self.backward)
