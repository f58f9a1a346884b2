"""Examples of request bodies, shown in the OpenAPI document and its pages."""

from __future__ import annotations

from typing import Any

MODEL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CLUSTER = {"name": "two nodes", "nodes": [{"preset": "dgx_h100", "count": 2}]}
WORKLOAD = {"name": "pretrain", "global_batch": 256, "seq_len": 4096, "precision": "bf16_mixed"}
PLAN = {"model": MODEL, "cluster": CLUSTER, "workload": WORKLOAD, "options": {"time_limit_s": 30, "top": 5}}
PLAN_BY_ID = {
    "model": "model-0123456789abcdef",
    "cluster": "local",
    "workload": "workload-0123456789abcdef",
    "profile": "profile-0123456789abcdef",
}
FORCED_PLAN = {**PLAN_BY_ID, "options": {"strategy": "tp=2 micro_batch=4 recompute=full"}}
ESTIMATE = {"model": MODEL, "cluster": CLUSTER, "workload": WORKLOAD, "strategy": "tp=8 pp=1 dp=2 micro_batch=1 zero=1"}
MEMORY = {"model": MODEL, "cluster": CLUSTER, "workload": WORKLOAD, "strategy": "zero=3 micro_batch=1 recompute=full"}
PROFILE_JOB = {"model": "model-0123456789abcdef", "cluster": "local", "workload": "workload-0123456789abcdef", "quick": True}
CALIBRATION = {
    "model": "model-0123456789abcdef", "cluster": "cluster-0123456789abcdef", "workload": "workload-0123456789abcdef",
    "measurements": [{"plan_hash": "0123456789abcdef", "step_time_s": 1.9}], "plans": [],
}  # fmt: skip
EXPORT = {"plan": "plan-0123456789abcdef", "target": "megatron"}
IMPORT = {
    "framework": "megatron", "model": MODEL, "cluster": CLUSTER, "workload": WORKLOAD,
    "text": "--tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --bf16",
}  # fmt: skip
RECOMMENDATION = {
    "model": MODEL, "device": "h100_sxm", "workload": WORKLOAD, "options": {"max_devices": 64, "time_limit_s": 60},
}  # fmt: skip
CLUSTER_TEXT = {"name": "ours", "preset": "dgx_h100", "hostfile": "node1 slots=8\nnode2 slots=8\n"}
DIFF = {"before": "plan-0123456789abcdef", "after": "plan-fedcba9876543210"}
WHY_NOT_OF_PLAN = {"strategy": "tp=8 pp=2 micro_batch=1 zero=1"}
WHY_NOT = {"plan": "plan-0123456789abcdef", **WHY_NOT_OF_PLAN}
EXECUTION = {"steps": 10, "warmup_steps": 2}

_BY_KIND: dict[str, dict[str, Any]] = {
    "model": {"Hugging Face config": MODEL},
    "cluster": {"two DGX H100": CLUSTER},
    "workload": {"pretraining": WORKLOAD},
    "plan": {"documents": PLAN, "stored documents": PLAN_BY_ID, "with given fields": FORCED_PLAN},
    "estimate": {"a strategy": ESTIMATE},
    "memory": {"a strategy": MEMORY},
    "profile": {"measure this machine": PROFILE_JOB},
    "calibration": {"from a measured run": CALIBRATION},
    "execution": {"ten steps": EXECUTION},
    "export": {"of a planning job": EXPORT},
    "import": {"Megatron flags": IMPORT},
    "cluster_text": {"a hostfile": CLUSTER_TEXT},
    "diff": {"two planning jobs": DIFF},
    "why_not": {"against a planning job": WHY_NOT},
    "why_not_of_plan": {"a strategy": WHY_NOT_OF_PLAN},
    "recommendation": {"on H100": RECOMMENDATION},
}


def of(kind: str) -> dict[str, Any]:
    """OpenAPI ``examples`` of a body."""
    return {name: {"summary": name, "value": value} for name, value in _BY_KIND[kind].items()}
