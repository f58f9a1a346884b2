"""The keys by which predicted and measured numbers are joined: time terms and memory terms, with their meaning."""

from __future__ import annotations

# Exclusive seconds of a step, mean over the ranks that take part; they sum to the step time.
TIME_TERMS: dict[str, str] = {
    "forward": "forward compute",
    "backward": "backward compute, recompute excluded",
    "recompute": "forward work done again in backward",
    "tp_comm": "tensor-parallel collectives, exposed part",
    "cp_comm": "context-parallel exchanges, exposed part",
    "ep_comm": "expert dispatch and combine, exposed part",
    "pipeline": "waiting for pipeline neighbours: bubble and exposed sends and receives",
    "dp_comm": "parameter gathers and gradient reductions, exposed part, packing included",
    "optimizer": "optimizer step",
    "transfer": "host and NVMe copies, exposed part",
    "host": "host launch time not hidden behind the device",
    "wait": "waiting for slower ranks at the end of the step",
    "other": "loss bookkeeping, data, gradient zeroing and what no other term names",
}

# Bytes of device memory at the peak moment of a rank; they sum to the peak.
MEMORY_TERMS: dict[str, str] = {
    "params": "parameters resident between steps (the rank's shard)",
    "grads": "gradient buffers",
    "optimizer": "optimizer states and master weights",
    "gathered": "parameters gathered from other ranks for use",
    "activations": "tensors saved for backward, of all micro-batches in flight",
    "workspace": "temporaries of the running op, gradients of activations, logits and loss",
    "comm_buffers": "bucket, pack and receive buffers",
    "margin": "allocator overhead and fragmentation",
}
