"""Megatron-LM: one flag a line, with the uneven first and last stage or the layout string where stages differ."""

from __future__ import annotations

from planner.exporters.common import (
    STAGES,
    device_note,
    host_violations,
    loss_violations,
    schedule_violations,
    script,
    torchrun,
)
from planner.exporters.view import View, no
from specs.errors import Violation
from specs.graph import DTYPE_BYTES
from specs.plan import RecomputeMode

SCHEDULES = {"1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
# Our op classes by Megatron's recompute modules.
RECOMPUTE_MODULES = {"attention": "core_attn", "norm": "layernorm"}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
LOSSES = ("full", "in_place")

Flags = dict[str, str | int | float | bool]


def violations(view: View) -> list[Violation]:
    """What Megatron-LM has no flag for."""
    found = (
        schedule_violations(view, SCHEDULES) + loss_violations(view, LOSSES) + host_violations(view, optimizer=True, params=False)
    )
    mode, classes, _ = view.recompute
    unknown = [name for name in classes if name not in RECOMPUTE_MODULES]
    if mode == RecomputeMode.SELECTIVE and unknown:
        found.append(
            no(
                "selective_recompute", f"selective recompute of {'+'.join(unknown)}", (*STAGES, 0, "recompute"),
                actual=list(classes), allowed=list(RECOMPUTE_MODULES), nearest="attention",
            )
        )  # fmt: skip
    if view.workload is not None and view.workload.adapters is not None:
        found.append(no("adapters", "low-rank adapters", ("workload", "adapters")))
    if view.shard_group is not None and view.zero != 1:
        message = f"shard_group {view.shard_group} with zero {view.zero}: only the distributed optimizer has instances"
        found.append(no("shard_group", message, (*STAGES, 0, "shard_group"), actual=view.shard_group))
    return found


def write(view: View) -> tuple[dict[str, str], list[str]]:
    """``megatron.args`` and a launch script."""
    flags = {**_parallel(view), **_stages(view), **_batch(view), **_sharding(view), **_recompute(view), **_precision(view)}
    flags |= _model(view)
    lines = [name if value is True else f"{name} {value}" for name, value in flags.items()]
    # One connection keeps compute and communication kernels in launch order, which overlap needs; FSDP wants it unset.
    environment = "unset CUDA_DEVICE_MAX_CONNECTIONS" if view.zero >= 2 else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    # The layout string holds stars, which the shell must not take for file names.
    launch = script("set -f", environment, torchrun(view, 'pretrain_gpt.py $(cat megatron.args) "$@"'))
    notes = device_note(view)
    if view.graph is None:
        notes.append("sizes of the model are left out: give the model to have them written")
    notes += _padding(view)
    notes.append("data, tokenizer, learning rate schedule and --train-iters are yours: append them to launch.sh")
    return {"megatron.args": "\n".join(lines) + "\n", "launch.sh": launch}, notes


# Megatron's default of --make-vocab-size-divisible-by, for each tensor-parallel rank.
VOCAB_MULTIPLE = 128


def _padding(view: View) -> list[str]:
    """What Megatron adds to the vocabulary so that every rank holds as much of it."""
    vocab, hidden = view.size("vocab"), view.size("hidden")
    multiple = VOCAB_MULTIPLE * view.tp
    if vocab is None or hidden is None or vocab % multiple == 0:
        return []
    padded = -(-vocab // multiple) * multiple
    copies = 1 if view.graph is not None and view.graph.tied else 2
    more = f"{(padded - vocab) * hidden * copies / 1e6:.1f} M more parameters"
    return [f"Megatron pads the vocabulary of {vocab:,} to {padded:,} (a multiple of 128 x tp {view.tp}): {more}"]


def layout(view: View) -> str:
    """Megatron's layout string: ``Et*7|t*8|t*7L``."""
    stages = []
    for index, count in enumerate(view.layers):
        text = "" if count == 0 else ("t" if count == 1 else f"t*{count}")
        stages.append(("E" if index == 0 else "") + text + ("L" if index == len(view.layers) - 1 else ""))
    return "|".join(stages)


def _parallel(view: View) -> Flags:
    flags: Flags = {"--tensor-model-parallel-size": view.tp, "--pipeline-model-parallel-size": view.pp}
    if view.cp > 1:
        flags["--context-parallel-size"] = view.cp
    if view.ep > 1:
        flags["--expert-model-parallel-size"] = view.ep
        flags["--expert-tensor-parallel-size"] = 1 if view.whole_experts else view.tp
    if view.sequence_parallel:
        flags["--sequence-parallel"] = True
    return flags


def _stages(view: View) -> Flags:
    if view.pp == 1:
        return {}
    if view.even:
        return {"--num-virtual-stages-per-pipeline-rank": view.chunks} if view.chunks > 1 else {}
    middle = set(view.layers[1:-1])
    if view.chunks > 1 or len(middle) > 1 or 0 in view.layers:
        return {"--pipeline-model-parallel-layout": layout(view)}
    usual = next(iter(middle), view.layers[-1])
    flags: Flags = {}
    if view.layers[0] != usual:
        flags["--decoder-first-pipeline-num-layers"] = view.layers[0]
    if view.layers[-1] != usual:
        flags["--decoder-last-pipeline-num-layers"] = view.layers[-1]
    return flags


def _batch(view: View) -> Flags:
    return {
        "--micro-batch-size": view.micro_batch, "--global-batch-size": view.plan.global_batch, "--seq-length": view.plan.seq_len,
    }  # fmt: skip


def _sharding(view: View) -> Flags:
    flags: Flags = {}
    options = view.plan.collectives
    if view.zero >= 1:
        flags["--use-distributed-optimizer"] = True
    if view.zero >= 2:
        flags |= {
            "--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": SHARDING[view.zero],
            "--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor",
        }  # fmt: skip
    if view.shard_group is not None:
        flags["--num-distributed-optimizer-instances"] = view.dp // view.shard_group
    if view.dp > 1 and options.overlap_grad_reduce:
        flags["--overlap-grad-reduce"] = True
        if view.zero >= 1 and options.prefetch_units:
            flags["--overlap-param-gather"] = True
    if view.zero == 0 and view.dp > 1 and view.pp == 1:
        dtype = view.workload.precision.grad_dtype if view.workload else "float32"
        flags["--ddp-bucket-size"] = round(options.bucket_bytes / DTYPE_BYTES[dtype])
    if view.optimizer_on_host:
        flags |= {
            "--optimizer-cpu-offload": True, "--optimizer-offload-fraction": view.optimizer_on_host,
            "--use-precision-aware-optimizer": True,
        }  # fmt: skip
    return flags


def _recompute(view: View) -> Flags:
    mode, classes, first = view.recompute
    if mode == RecomputeMode.NONE:
        return {}
    if mode == RecomputeMode.SELECTIVE:
        modules = " ".join(RECOMPUTE_MODULES[name] for name in classes)
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    method, number = ("uniform", 1) if first < 0 else ("block", first)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": number}


def _precision(view: View) -> Flags:
    flags: Flags = {"--" + view.precision(): True} if view.precision() != "fp32" else {}
    workload = view.workload
    if workload is not None and view.precision() == "bf16":
        wide = workload.precision.grad_dtype == "float32"
        flags["--accumulate-allreduce-grads-in-fp32" if wide else "--grad-reduce-in-bf16"] = True
    if view.loss() == "in_place":
        flags["--cross-entropy-loss-fusion"] = True
    if workload is not None:
        flags["--optimizer"] = "sgd" if workload.optimizer.name in ("sgd", "momentum") else "adam"
        flags["--lr"], flags["--weight-decay"] = workload.optimizer.learning_rate, workload.optimizer.weight_decay
    return flags


_MODEL_FLAGS = {
    "hidden": "--hidden-size", "ffn": "--ffn-hidden-size", "heads": "--num-attention-heads", "head_dim": "--kv-channels",
}  # fmt: skip


def _model(view: View) -> Flags:
    flags: Flags = {"--num-layers": view.num_layers}
    for name, flag in _MODEL_FLAGS.items():
        size = view.size(name)
        if size is not None:
            flags[flag] = size
    heads, kv_heads = view.size("heads"), view.size("kv_heads")
    if kv_heads is not None and kv_heads != heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": kv_heads}
    experts, top_k = view.size("experts"), view.size("top_k")
    if experts:
        flags |= {"--num-experts": experts, **({"--moe-router-topk": top_k} if top_k else {})}
    if view.graph is not None:
        flags["--max-position-embeddings"] = view.plan.seq_len
        if not view.graph.tied:
            flags["--untie-embeddings-and-output-weights"] = True
    return flags
