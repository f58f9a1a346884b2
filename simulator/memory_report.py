"""The memory question alone: states by ZeRO stage, activations by unit, loss, and the peak of a strategy; no time is simulated."""

from __future__ import annotations

from collections import Counter

from profiler.opset import FUSED_LOSS_CHUNK, OpClass
from profiler.placed import LocalOp, numeric_tensor
from profiler.placement import place_block
from simulator.cost_model import CostModel
from simulator.rank_memory import fill, memory_flags, plan_memory, recompute_flags, usable_bytes
from simulator.states import offload_states, recipe, zero_states
from specs.graph import ModelGraph
from specs.memory import LossMemory, MemoryReport, UnitMemory
from specs.plan import Plan
from specs.prediction import MemoryPrediction
from specs.training import Optimizer, Precision
from specs.units import format_bytes

ALLOCATOR_ADVICE = (
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: gathered weights and sequences of changing size split the allocator's "
    "blocks, and reserved memory grows beyond the margin counted here"
)


def states_report(
    *,
    num_params: float,
    largest_layer_params: float,
    devices: int,
    nodes: int = 1,
    precision: Precision = Precision(),  # noqa: B008  (frozen)
    optimizer: Optimizer = Optimizer(),  # noqa: B008
    num_trainable: float | None = None,
    host_buffer_factor: float = 1.0,
    model: str = "",
) -> MemoryReport:
    """Model states of any model that is known by its counts alone: at every ZeRO stage, and with offload."""
    trainable = num_params if num_trainable is None else num_trainable
    words, total = recipe(precision, optimizer)
    return MemoryReport(
        model=model or f"{num_params / 1e9:.3g} G parameters", num_params=num_params, num_trainable=trainable, devices=devices,
        recipe=words, bytes_per_param=total,
        states=tuple(
            zero_states(
                zero, trainable=trainable, frozen=num_params - trainable, shards=devices, precision=precision, optimizer=optimizer
            )
            for zero in range(4)
        ),
        offload=tuple(
            offload_states(
                num_params=num_params, largest_layer_params=largest_layer_params, devices=devices, nodes=nodes,
                precision=precision, optimizer=optimizer, host_buffer_factor=host_buffer_factor,
            )
        )
        if trainable == num_params
        else (),
    )  # fmt: skip


def memory_report(
    model: CostModel, plan: Plan | None = None, *, micro_batch: int = 1, host_buffer_factor: float = 1.0
) -> MemoryReport:
    """The report of a model, cluster and workload; with a valid ``plan`` the peak of its ranks too.

    ``micro_batch``: sequences of a pass where no plan says it. Units and loss are those of one device without tensor parallel.
    """
    model = model if plan is None else model.for_plan(plan)
    cluster, workload = model.cluster, model.workload
    batch = plan.pipelines[0].micro_batch if plan is not None else micro_batch
    report = states_report(
        num_params=model.graph.num_params(), num_trainable=model.graph.num_params(trainable_only=True), model=model.graph.name,
        largest_layer_params=largest_layer_params(model.graph), devices=cluster.num_devices,
        nodes=sum(group.count for group in cluster.nodes), precision=workload.precision, optimizer=workload.optimizer,
        host_buffer_factor=host_buffer_factor,
    )  # fmt: skip
    loss = loss_memory(model, batch)
    report = report.replace(
        device=cluster.device_table()[0].device,
        capacity_bytes=min(usable_bytes(model, rank) for rank in range(cluster.num_devices)),
        seq_len=model.seq, micro_batch=batch, units=tuple(_units(model, batch)), loss=loss,
    )  # fmt: skip
    return report if plan is None else _with_plan(report, model, plan, loss)


def _with_plan(report: MemoryReport, model: CostModel, plan: Plan, loss: LossMemory | None) -> MemoryReport:
    ranks = plan_memory(model, plan)
    return report.replace(
        strategy=plan.strategy, ranks=tuple(ranks), fits=all(fill(memory) <= 1 for memory in ranks),
        flags=(*memory_flags(ranks), *recompute_flags(model, plan)), notes=tuple(memory_notes(model, ranks, loss)),
    )  # fmt: skip


def memory_notes(model: CostModel, ranks: list[MemoryPrediction], loss: LossMemory | None) -> list[str]:
    """What fills the fullest rank, in words: largest terms, the op classes behind them, logits, allocator."""
    fullest = max(ranks, key=fill)
    peak = fullest.peak_bytes
    notes = [
        f"allocated {format_bytes(peak)} at '{fullest.peak_moment}'; reserved {format_bytes(fullest.reserved_bytes or peak)} = "
        f"allocated + {fullest.margin_fraction:.0%} for the allocator + {format_bytes(fullest.baseline_bytes)} of the process, "
        f"of {format_bytes(fullest.capacity_bytes)}"
    ]
    order = sorted(fullest.terms, key=lambda name: -fullest.terms[name])
    notes.append("most is " + ", ".join(f"{name} {format_bytes(fullest.terms[name])}" for name in order[:3]))
    saved = sorted(fullest.saved_by_class.items(), key=lambda item: -item[1])
    if saved:
        notes.append("activations are kept by " + ", ".join(f"{name} {format_bytes(size)}" for name, size in saved[:4]))
    if model.workload.attention_kernel == "math":
        notes.append("attention that is not fused keeps its scores, length x length for every head; a flash kernel keeps none")
    if loss is not None and loss.kernel == "full" and loss.total_bytes > 0.1 * peak:
        notes.append(
            f"logits: {loss.tokens} tokens x {loss.vocabulary} words take {format_bytes(loss.total_bytes)} at the loss "
            f"({format_bytes(loss.logits_bytes)} themselves, {format_bytes(loss.log_probabilities_bytes)} log-probabilities and "
            f"{format_bytes(loss.gradient_bytes)} gradient in float32); loss_kernel fused holds 1/{1 / FUSED_LOSS_CHUNK:.0f} of it"
        )
    if model.device(model.network.places[fullest.peak_rank].device).kind == "gpu":
        notes.append(ALLOCATOR_ADVICE)
    return notes


def largest_layer_params(graph: ModelGraph) -> int:
    """Parameters of the module that holds most of its own (the embedding of most models)."""
    sizes: Counter[str] = Counter()
    for block in graph.blocks:
        for param in block.params:
            if not param.buffer:
                sizes[f"{block.name}:{param.fqn.rpartition('.')[0]}"] += param.num_elements
    return max(sizes.values())


def _units(model: CostModel, batch: int) -> list[UnitMemory]:
    device, shape = model.cluster.device_table()[0].device, model.network.shape((0,))
    found = []
    for block, count in Counter(model.unit_blocks).items():
        cost = model.unit(block, device=device, tp_shape=shape, sequence_parallel=False, batch=batch)
        found.append(
            UnitMemory(
                block=block, count=count, params=model.params(block, 1).total, saved_bytes=cost.saved_bytes,
                saved_by_class=cost.saved_by_class,
            )
        )  # fmt: skip
    return found


def loss_memory(model: CostModel, batch: int) -> LossMemory | None:
    """Bytes of the loss of one micro-batch as the op table prices it; ``None`` for a model without a known loss."""
    for block in dict.fromkeys(model.unit_blocks):
        placed = place_block(model.graph.block(block), 1, False)
        for op in placed.ops:
            if op.op_class == OpClass.LOSS:
                return _loss_of(model, op, batch)
    return None


def _loss_of(model: CostModel, op: LocalOp, batch: int) -> LossMemory:
    pricer = model.pricer(model.cluster.device_table()[0].device)
    logits = numeric_tensor(op.inputs[0], batch, model.seq, pricer.compute_dtype)
    price = pricer.price(op, batch, model.seq)
    share = FUSED_LOSS_CHUNK if pricer.kernels.loss == "fused" else 1.0
    parts = (float(logits.bytes) * share, price.saved_extra_bytes, price.backward_workspace_bytes)
    return LossMemory(
        kernel=pricer.kernels.loss, tokens=int(logits.numel / logits.shape[-1]), vocabulary=int(logits.shape[-1]),
        logits_bytes=parts[0], log_probabilities_bytes=parts[1], gradient_bytes=parts[2], total_bytes=sum(parts),
    )  # fmt: skip
