"""Megatron-LM flags: an args file, a launch script, or the line itself."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from planner.importers.reading import Reading
from specs.errors import InvalidInput
from specs.interchange import Imported

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([\"']?)([^\s\"'()`]*)\2\s*(?:#.*)?$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
_ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_MODULES = {"core_attn": "attention", "layernorm": "norm"}
_STAGE_ATOM = re.compile(r"([EtmL])(?:\*(\d+))?")
_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_IRRELEVANT = tuple(
    """
    --lr --min-lr --train- --eval --save --load --data- --tokenizer --vocab-file --merge-file --log- --tensorboard --wandb
    --seed --init-method --adam- --clip-grad --weight-decay --exit- --distributed- --split --mock-data --num-workers
    --dataloader --no-load --no-save --ckpt- --dist-ckpt --async-save --timing --attention-dropout --hidden-dropout --moe-aux
    --moe-router-load --rdzv --master --node_rank --node-rank --standalone --use-mcore-models --no-create --rotary
    --norm-epsilon --start-weight-decay --end-weight-decay --override-opt --finetune --max-position-embeddings --use-rotary
    --transformer-impl --no-gradient-accumulation-fusion --manual-gc --profile --use-precision-aware-optimizer
    --calculate-per-token
    """.split()
)


def read(text: str) -> Imported:
    """Flags of the text; shell variables that the text itself sets are filled in."""
    reading = Reading("megatron", _flags(text))
    _degrees(reading)
    _batch(reading)
    _sharding(reading)
    _recompute(reading)
    _precision(reading)
    _model(reading)
    _stages(reading)
    reading.ignore(_IRRELEVANT)
    return reading.imported()


def _flags(text: str) -> dict[str, object]:
    variables: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        return str(variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0]))

    for name, _, value in _ASSIGNMENT.findall(text):
        variables[name] = _VARIABLE.sub(fill, value)
    text = _VARIABLE.sub(fill, text)
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidInput.single("unparsable_flags", f"the flags do not parse: {error}", subject="megatron config") from None
    flags: dict[str, object] = {}
    for name, values in _grouped(tokens):
        flags[name] = True if not values else values[0] if len(values) == 1 else values
    return flags


def _grouped(tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for token in tokens:
        token = token.strip("()")
        if token.startswith("--") and len(token) > 2:
            if name:
                yield name, values
            name, equals, value = token.partition("=")
            values = [value] if equals else []
        elif name and token and not token.endswith((".py", ".sh")) and not token.startswith(("$", "&", "|", ";", ">")):
            values.append(token)
        elif name and token:
            yield name, values
            name, values = "", []
    if name:
        yield name, values


def _degrees(reading: Reading) -> None:
    reading.number("--tensor-model-parallel-size", "tp")
    reading.number("--pipeline-model-parallel-size", "pp")
    reading.number("--context-parallel-size", "cp")
    reading.number("--expert-model-parallel-size", "ep")
    etp = reading.number("--expert-tensor-parallel-size")
    if etp is not None and etp not in (1, reading.fields.get("tp", 1)):
        reading.cannot("--expert-tensor-parallel-size", etp, "experts are split over all of tp or not at all")
    if reading.flag("--sequence-parallel", "sequence_parallel=true"):
        reading.fields["sequence_parallel"] = True
    elif reading.fields.get("tp", 1) > 1:
        reading.fields["sequence_parallel"] = False
    nodes = reading.first(("--nnodes",)) or 1
    each = reading.first(("--nproc-per-node", "--nproc_per_node"))
    if str(nodes).isdigit() and str(each).isdigit():
        reading.num_devices = int(nodes) * int(each)
        reading.say("torchrun", reading.num_devices, "devices of the launch line")
        taken = 1
        for name in ("tp", "pp", "cp"):
            taken *= reading.fields.get(name, 1)
        if reading.num_devices % taken == 0:
            reading.fields["dp"] = reading.num_devices // taken


def _batch(reading: Reading) -> None:
    reading.number("--micro-batch-size", "micro_batch")
    total = reading.number("--global-batch-size", "global batch")
    if total is not None:
        reading.workload["global_batch"] = total
    length = reading.number("--seq-length", "sequence length")
    if length is not None:
        reading.workload["seq_len"] = length


def _sharding(reading: Reading) -> None:
    zero = 1 if reading.flag("--use-distributed-optimizer", "zero=1: optimizer states sharded over dp") else 0
    strategy = reading.value("--data-parallel-sharding-strategy")
    fsdp = reading.flag("--use-megatron-fsdp", "Megatron-FSDP") or reading.flag("--use-custom-fsdp", "Megatron-FSDP")
    if fsdp:
        name = str(strategy or "no_shard")
        if name not in _ZERO:
            reading.wrong("--data-parallel-sharding-strategy", name, f"strategy '{name}'", allowed=list(_ZERO))
        zero = _ZERO.get(name, 0)
        reading.say("--data-parallel-sharding-strategy", name, f"zero={zero}")
    elif reading.flag("--use-torch-fsdp2", "zero=3: torch fully_shard"):
        zero = 3
    reading.fields["zero"] = zero
    instances = reading.number("--num-distributed-optimizer-instances", "optimizer instances")
    if instances is not None and instances > 1:
        dp = reading.fields.get("dp")
        if dp is not None and dp % instances == 0:
            reading.fields["shard_group"] = dp // instances
        else:
            reading.cannot(
                "--num-distributed-optimizer-instances", instances, "needs the number of devices (--nnodes, --nproc-per-node)"
            )
    if reading.flag("--optimizer-cpu-offload"):
        reading.cannot("--optimizer-cpu-offload", True, "optimizer states in host memory are not part of a strategy's short form")
        reading.value("--optimizer-offload-fraction")
    reading.ignore(
        ("--overlap-", "--ddp-", "--no-overlap", "--tp-comm-overlap", "--align-"),
        "overlap and buckets: the planner has its own defaults",
    )


def _recompute(reading: Reading) -> None:
    granularity = reading.value("--recompute-granularity")
    if reading.flag("--recompute-activations"):
        granularity = "selective"
    method, count = reading.value("--recompute-method"), reading.value("--recompute-num-layers")
    modules = reading.value("--recompute-modules")
    if granularity == "selective":
        names = ["core_attn"] if modules is None else [modules] if isinstance(modules, str) else list(modules)
        known = [_MODULES[name] for name in names if name in _MODULES]
        for name in names:
            if name not in _MODULES:
                reading.cannot("--recompute-modules", name, f"recompute of {name} alone has no class of ops here")
        if known:
            reading.fields["recompute"] = "selective:" + "+".join(known)
        reading.say("--recompute-granularity", granularity, f"recompute={reading.fields.get('recompute', 'none')}")
    elif granularity == "full":
        reading.fields["recompute"] = "full"
        reading.say("--recompute-granularity", granularity, "recompute=full")
        if method == "block":
            reading.cannot("--recompute-num-layers", count, "full recompute of some layers only; taken as of all layers")
        elif str(count) not in ("None", "1"):
            reading.cannot("--recompute-num-layers", count, "recompute of several layers at once; taken as one by one")
    elif granularity is not None:
        reading.wrong("--recompute-granularity", granularity, f"granularity '{granularity}'", allowed=["full", "selective"])


def _precision(reading: Reading) -> None:
    bf16, fp16 = reading.flag("--bf16", "bfloat16 weights"), reading.flag("--fp16", "float16 weights")
    narrow = reading.flag("--grad-reduce-in-bf16", "gradients in bfloat16")
    reading.flag("--accumulate-allreduce-grads-in-fp32", "gradients in float32")
    if bf16:
        reading.workload["precision"] = "bf16_mixed" if narrow else "bf16_mixed_fp32_grad"
        if not narrow:
            reading.assumed.append("gradients in float32: Megatron's default with --bf16")
    elif fp16:
        reading.workload["precision"] = "fp16_mixed"
    else:
        reading.workload["precision"] = "fp32"
    if reading.flag("--cross-entropy-loss-fusion", "loss=in_place: gradient written over the logits"):
        reading.fields["loss"] = "in_place"
    reading.value("--cross-entropy-fusion-impl")
    optimizer = reading.value("--optimizer", "optimizer")
    if optimizer == "sgd":
        reading.workload["optimizer"] = {"name": "momentum"}


def _model(reading: Reading) -> None:
    sizes = {
        "--num-layers": "num_hidden_layers", "--hidden-size": "hidden_size", "--ffn-hidden-size": "intermediate_size",
        "--num-attention-heads": "num_attention_heads", "--kv-channels": "head_dim", "--num-query-groups": "num_key_value_heads",
        "--vocab-size": "vocab_size", "--num-experts": "num_local_experts", "--moe-router-topk": "num_experts_per_tok",
        "--padded-vocab-size": "vocab_size",
    }  # fmt: skip
    for flag, name in sizes.items():
        number = reading.number(flag, f"model {name}")
        if number is not None:
            reading.model[name] = number
    if not reading.flag("--group-query-attention", "grouped key/value heads"):
        reading.model.pop("num_key_value_heads", None)
    gated = reading.flag("--swiglu", "gated MLP")
    norm = reading.value("--normalization", "norm")
    tied = not reading.flag("--untie-embeddings-and-output-weights", "embedding and head are separate")
    position = reading.value("--position-embedding-type", "positions")
    reading.flag("--disable-bias-linear", "no biases")
    reading.flag("--qk-layernorm")
    reading.flag("--moe-grouped-gemm", "grouped products of experts")
    if reading.model and (gated or norm == "RMSNorm" or position == "rope"):
        reading.model["model_type"] = "mixtral" if "num_local_experts" in reading.model else "llama"
        reading.model["tie_word_embeddings"] = tied
    reading.ignore(("--use-flash-attn", "--attention-backend", "--make-vocab-size"), "already how the model is priced")


def parse_layout(text: str) -> list[int]:
    """Layers of each stage in Megatron's layout string; raises :class:`ValueError` on anything else."""
    plain = text.strip("'\"").replace(",", "").replace(" ", "")
    while _GROUP.search(plain):
        plain = _GROUP.sub(lambda match: match[1] * int(match[2]), plain)
        if len(plain) > 100_000:
            raise ValueError("the layout repeats too often")
    counts = []
    for stage in plain.split("|"):
        if _STAGE_ATOM.sub("", stage):
            raise ValueError(f"'{stage}' is no stage of E, t, m, L")
        counts.append(sum(int(times or 1) for kind, times in _STAGE_ATOM.findall(stage) if kind == "t"))
    return counts


def _stages(reading: Reading) -> None:
    pp, layers = reading.fields.get("pp", 1), reading.model.get("num_hidden_layers")
    chunks = reading.number("--num-virtual-stages-per-pipeline-rank", "chunks")
    per_chunk = reading.number("--num-layers-per-virtual-pipeline-stage", "layers of a virtual stage")
    layout = reading.value("--pipeline-model-parallel-layout")
    first, last = (
        reading.number(f"--decoder-{end}-pipeline-num-layers", f"layers of the {end} stage") for end in ("first", "last")
    )
    reading.ignore(("--account-for-",), "moves layers between stages; the split is taken as balanced")
    if pp == 1:
        return
    if per_chunk and layers:
        chunks = layers // (pp * per_chunk)
    if layout is not None:
        try:
            counts = parse_layout(str(layout))
        except ValueError as error:
            reading.wrong("--pipeline-model-parallel-layout", layout, str(error), allowed="E, t, m, L, '|', '*n', '(...)*n'")
            return
        reading.split_layers("--pipeline-model-parallel-layout", counts)
        chunks = len(counts) // pp
    elif layers and (first or last):
        middle = pp - (first is not None) - (last is not None)
        rest, left = divmod(layers - (first or 0) - (last or 0), middle) if middle else (0, 0)
        if left or rest < 0:
            reading.wrong(
                "--num-layers", layers, f"{layers} layers leave {left} over after the first and last stage", allowed="an even rest"
            )
            return
        counts = [rest] * pp
        counts[0], counts[-1] = first or rest, last or rest
        reading.split_layers("--decoder-first/last-pipeline-num-layers", counts)
    elif layers and layers % (pp * (chunks or 1)) == 0:
        reading.split_layers("--num-layers", [layers // (pp * (chunks or 1))] * (pp * (chunks or 1)))
    elif layers:
        reading.wrong(
            "--num-layers", layers, f"{layers} layers on {pp * (chunks or 1)} stages: Megatron drops or refuses the rest",
            allowed="multiples, or first/last counts, or a layout string",
        )  # fmt: skip
    reading.fields["schedule"] = "interleaved" if (chunks or 1) > 1 else "1f1b"
    reading.fields["chunks"] = chunks or 1
