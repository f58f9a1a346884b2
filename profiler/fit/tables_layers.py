"""Matrix products and memory-bound ops inside public layer profiles: shapes are worked out from the model's dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from profiler.fit.forms import Products, joined, products
from profiler.fit.tables import Frame, ProductTable, read_table, table_of

Array = NDArray[np.float64]

MEGATRON = {
    "aceso_superscaler/ops_v100_fwd_bwd.csv.gz": "Aceso profiles, SuperScaler fa80ad0 (Microsoft, MIT), Megatron ops fp16",
    "mist/ops_fwd_bwd.csv.gz": "Mist d69e530 (Apache-2.0), Megatron ops fp16",
}
# Mist times only one of the two backward products on all its devices but the A10G; its V100 repeats Aceso's.
_MEGATRON_DEVICES = {
    ("aceso_superscaler", "V100-SXM2-32GB"): ("v100_sxm2_32gb", "float16", True),
    ("mist", "a10g"): ("a10g", "float16", True),
    ("mist", "l4"): ("l4", "float16", False),
    ("mist", "a100-sxm4-40gb"): ("a100_sxm_40gb", "float16", False),
}
_MEGATRON_PRODUCTS = ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
_VIDUR = {"a100": "a100_sxm_80gb", "h100": "h100_sxm", "a40": "a40"}
VIDUR_SOURCE = "Vidur 7d47513 (Microsoft, MIT), fp16 layer kernels"
_LLMSERVINGSIM = {"RTX3090": "rtx_3090", "RTX4090": "rtx_4090", "A6000": "rtx_a6000", "RTXPRO6000": "rtx_pro_6000_server",
                  "H100": "h100_sxm", "TPU-v6e-1": "tpu_v6e"}  # fmt: skip
LLMSERVINGSIM_SOURCE = "LLMServingSim 5daddb2 (KAIST, MIT), vLLM layers bf16"
# hidden, FFN hidden, query width, key width, vocabulary: of the models that LLMServingSim ran
_LLM_SHAPES = {
    "meta-llama/Llama-3.1-8B": (4096, 14336, 4096, 1024, 128256),
    "meta-llama/Llama-3.1-70B": (8192, 28672, 8192, 1024, 128256),
    "Qwen/Qwen3-32B": (5120, 25600, 8192, 1024, 151936),
}
MIB = 2**20
_SAMPLE_PER_OP = 400


@dataclass(frozen=True, slots=True)
class LayerOp:
    """A memory-bound op of a layer profile: aten name, rows x width elements, times (``None`` = not measured)."""

    device: str
    dtype: str
    target: str
    rows: float
    width: float
    forward_s: float | None
    backward_s: float | None
    source: str
    table_rows: float = 50_000.0  # of an embedding


def layer_product_tables(data: Path) -> list[ProductTable]:
    """Products in Megatron, Vidur and LLMServingSim profiles."""
    readers = (_megatron_products, _vidur_products, _llmservingsim_products)
    return [table for reader in readers for table in reader(data) if len(table)]


def _megatron(data: Path) -> Iterator[tuple[str, str, bool, str, str, Frame]]:
    """Device, dtype, whether backward is sound, laboratory, source and ops of GPT models on one device, medians of repeats."""
    for name, source in MEGATRON.items():
        path = data / name
        if not path.exists():
            continue
        frame = read_table(path)
        frame = frame[(frame["tp"] == 1) & frame["model"].str.match(r"gpt_[\d_]+[MB]$")]
        keys = ["gpu", "model", "mbs", "op_name"]
        columns = ["forward-compute", "backward-compute", "input_size", "output_size", "weights"]
        frame = frame.groupby(keys, as_index=False)[columns].median()
        laboratory = name.split("/")[0]
        for (key, gpu), (device, dtype, sound) in _MEGATRON_DEVICES.items():
            if key == laboratory and (frame["gpu"] == gpu).any():
                yield device, dtype, sound, laboratory, source, frame[frame["gpu"] == gpu]


def _with_model_sizes(frame: Frame) -> Frame:
    """Adds tokens and hidden of each row: the dense projection's weight is hidden^2, a norm's input is tokens x hidden (fp16)."""
    dense = frame[frame["op_name"] == "enc-attention-dense"].groupby("model")["weights"].median()
    hidden = np.sqrt(dense * MIB / 2).round().rename("hidden")
    norm = frame[frame["op_name"] == "enc-1st-layernorm"].groupby(["model", "mbs"])["input_size"].median().rename("stream_mib")
    frame = frame.merge(hidden, on="model").merge(norm, on=["model", "mbs"])
    return frame.assign(tokens=(frame["stream_mib"] * MIB / 2 / frame["hidden"]).round())


def _megatron_products(data: Path) -> Iterator[ProductTable]:
    for device, dtype, sound, laboratory, source, ops in _megatron(data):
        frame = _with_model_sizes(ops)
        weights, batched = _weight_products(frame), _attention_products(frame)
        shape = joined(weights[0], batched[0])
        time_s = np.concatenate([weights[1], batched[1]])
        yield table_of(device, dtype, laboratory, source, shape, time_s, eager=True)
        if sound:
            yield table_of(device, dtype, laboratory, source, weights[0], weights[2], eager=True, backward=True)


def _weight_products(frame: Frame) -> tuple[Products, Array, Array]:
    """Products with a weight, their forward and their backward times."""
    frame = frame[frame["op_name"].isin(_MEGATRON_PRODUCTS) & (frame["weights"] > 0)]
    hidden = frame["hidden"]
    other = (frame["weights"] * MIB / 2 / hidden).round()
    inward = frame["op_name"] == "enc-MLP-GEMM-2"  # reduces over the FFN width; the others reduce over hidden
    shape = products(frame["tokens"], np.where(inward, hidden, other), np.where(inward, other, hidden))
    return shape, _seconds(frame["forward-compute"]), _seconds(frame["backward-compute"])


def _attention_products(frame: Frame) -> tuple[Products, Array]:
    """Batched products of unfused attention, forward. The score op's result holds the scores and two streams passed through."""
    stream = frame["stream_mib"]
    score, context = frame["op_name"] == "enc-attention-score", frame["op_name"] == "enc-attention-context"
    frame = frame.assign(scores_mib=np.where(score, frame["output_size"], frame["input_size"]) - (2 * stream))[score | context]
    length = frame["tokens"] / frame["mbs"]
    batch = (frame["scores_mib"] * MIB / 2 / length**2).round()
    head_dim = (frame["hidden"] * frame["mbs"] / batch).round()
    is_score = frame["op_name"] == "enc-attention-score"
    shape = products(length, np.where(is_score, length, head_dim), np.where(is_score, head_dim, length), batch)
    return shape, _seconds(frame["forward-compute"])


def _seconds(microseconds: Frame) -> Array:
    seconds: Array = microseconds.to_numpy(dtype=float) * 1e-6
    return seconds


_MEGATRON_LAYERS = {
    "enc-1st-layernorm": "layer_norm",
    "enc-2nd-layernorm": "layer_norm",
    "enc-MLP-gelu": "gelu",
    "encoder-embedding": "embedding",
}


def megatron_layer_ops(data: Path) -> Iterator[LayerOp]:
    """Layer norms and GELUs forward and backward, the embedding's backward (its forward contains dropout and transposes)."""
    for device, dtype, _, _, source, ops in _megatron(data):
        frame = _with_model_sizes(ops)
        frame = frame[frame["op_name"].isin(_MEGATRON_LAYERS)]
        columns = ["op_name", "tokens", "hidden", "weights", "forward-compute", "backward-compute"]
        for name, tokens, hidden, weights, forward_us, backward_us in frame[columns].itertuples(index=False):
            target = _MEGATRON_LAYERS[name]
            forward_s = None if target == "embedding" else forward_us * 1e-6
            width = hidden * (4 if target == "gelu" else 1)
            yield LayerOp(device, dtype, target, tokens, width, forward_s, backward_us * 1e-6, source, weights * MIB / 2 / hidden)


def _vidur(data: Path) -> Iterator[tuple[str, Frame]]:
    for short, device in _VIDUR.items():
        path = data / "vidur" / f"mlp_{short}.csv.gz"
        if path.exists():
            frame = read_table(path)
            keys = [
                "op",
                "num_tokens",
                "num_tensor_parallel_workers",
                "n_head",
                "n_kv_head",
                "n_embd",
                "n_expanded_embd",
                "use_gated_mlp",
            ]
            frame = frame.groupby(keys, as_index=False)["median_ms"].median()
            yield device, frame.rename(columns={"num_tokens": "tokens", "num_tensor_parallel_workers": "tp", "n_embd": "hidden"})


def _vidur_products(data: Path) -> Iterator[ProductTable]:
    for device, frame in _vidur(data):
        head = frame["hidden"] / frame["n_head"]
        widths = {
            "attn_pre_proj": ((frame["n_head"] + 2 * frame["n_kv_head"]) * head / frame["tp"], frame["hidden"]),
            "attn_post_proj": (frame["hidden"], frame["hidden"] / frame["tp"]),
            "mlp_up_proj": (frame["n_expanded_embd"] * np.where(frame["use_gated_mlp"], 2, 1) / frame["tp"], frame["hidden"]),
            "mlp_down_proj": (frame["hidden"], frame["n_expanded_embd"] / frame["tp"]),
        }
        parts = [frame.assign(n=n, k=k)[frame["op"] == op] for op, (n, k) in widths.items()]
        rows = pd.concat(parts)
        shape = products(rows["tokens"], rows["n"], rows["k"])
        time_s = rows["median_ms"].to_numpy(dtype=float) * 1e-3
        yield table_of(device, "float16", "Vidur", VIDUR_SOURCE, shape, time_s, eager=True)


def vidur_layer_ops(data: Path) -> Iterator[LayerOp]:
    """Residual additions and embeddings of Vidur's kernels, forward only (its norm is an inference kernel, unlike training's)."""
    targets = {"add": "add", "emb": "embedding"}
    for device, frame in _vidur(data):
        rows = frame[frame["op"].isin(targets) & (frame["tp"] == 1)]
        rows = rows.sample(frac=1.0, random_state=0).groupby("op").head(_SAMPLE_PER_OP).sort_index()
        for row in rows.itertuples(index=False):
            named = row._asdict()
            time_s = float(named["median_ms"]) * 1e-3
            yield LayerOp(
                device, "float16", targets[str(named["op"])], named["tokens"], named["hidden"], time_s, None, VIDUR_SOURCE
            )


def _llmservingsim_products(data: Path) -> Iterator[ProductTable]:
    path = data / "llmservingsim" / "layers.csv.gz"
    if not path.exists():
        return
    everything = read_table(path)
    for gpu, device in _LLMSERVINGSIM.items():
        parts = []
        for model, (hidden, ffn, query, key, vocabulary) in _LLM_SHAPES.items():
            frame = everything[(everything["gpu"] == gpu) & (everything["model"] == model)]
            split = {
                "q_proj": (query, hidden, True), "k_proj": (key, hidden, True), "v_proj": (key, hidden, True),
                "qkv_proj": (query + 2 * key, hidden, True), "gate_proj": (ffn, hidden, True), "up_proj": (ffn, hidden, True),
                "gate_up_proj": (2 * ffn, hidden, True), "o_proj": (hidden, query, False), "down_proj": (hidden, ffn, False),
                "lm_head": (vocabulary, hidden, True),
            }  # fmt: skip
            for op, (n, k, columns) in split.items():
                rows = frame[(frame["op"] == op) & ((frame["tp"] == 1) | (op != "lm_head"))]
                over_n, over_k = (rows["tp"], 1) if columns else (1, rows["tp"])
                parts.append(rows.assign(n=n / over_n, k=k / over_k))
        rows = pd.concat(parts)
        shape = products(rows["tokens"], rows["n"], rows["k"])
        yield table_of(device, "bfloat16", "LLMServingSim", LLMSERVINGSIM_SOURCE, shape, _seconds(rows["us"]), eager=True)
