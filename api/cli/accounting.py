"""Verbs that count without simulating any time: memory, mfu."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from api.asking import Question, asker
from api.cli.inputs import Given, ServerOption, TokenOption, save_document
from api.cli.output import JsonOption, NoColorOption, output
from api.cli.show_accounts import show_memory_report, show_utilization
from api.documents import full
from api.engine import Engine
from specs.accounting import AttentionFlop, FlopConvention, Utilization, mfu_ratio
from specs.base import InvalidInputValue
from specs.errors import InvalidInput
from specs.training import TrainingSpec

OptionalModel = Annotated[str | None, typer.Option("--model", help="HF config.json, op graph, preset, or package.module:factory.")]


def memory(
    model: OptionalModel = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="Cluster file, or local[:N].")] = None,
    workload: Annotated[Path | None, typer.Option("--workload", help="Workload file; none: mixed precision with AdamW.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="Also the peak of 'zero=3 micro_batch=1'.")] = None,
    micro_batch: Annotated[int, typer.Option("--micro-batch", min=1, help="Sequences of a pass where no strategy says it.")] = 1,
    params: Annotated[float | None, typer.Option("--params", min=1, help="Parameters, in place of a model: states alone.")] = None,
    largest_layer: Annotated[float | None, typer.Option("--largest-layer-params", min=1, help="With --params.")] = None,
    num_devices: Annotated[int, typer.Option("--devices", min=1, help="With --params: devices of all nodes.")] = 1,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="With --params.")] = 1,
    precision: Annotated[str | None, typer.Option("--precision", help="Preset in place of the workload's precision.")] = None,
    host_buffer_factor: Annotated[
        float, typer.Option("--host-buffer-factor", min=1, help="Multiplies host bytes of offloaded states (DeepSpeed: 1.5).")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option("-o", "--output", help="Write the report to this file.")] = None,
    server: ServerOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """How much memory does it take? States term by term, activations, logits, offload; no time, no device needed.

    Example: meshwright memory --model llama-2-7b --cluster examples/clusters/two-a100-80g-nodes.yaml
    --workload examples/workloads/small-2k.yaml --strategy "zero=3 micro_batch=1 recompute=full"
    """
    engine = Engine(allow_factory=True)
    if params is not None:
        if model is not None or cluster is not None or strategy is not None:
            raise InvalidInput.single(
                "model_or_params", "--params stands for a model known by its counts: give no --model, --cluster, --strategy",
                allowed=["--model and --cluster", "--params"], subject="command line",
            )  # fmt: skip
        spec = _with_precision(
            TrainingSpec(global_batch=1, seq_len=1) if workload is None else TrainingSpec.load(workload), precision
        )
        report = engine.states(
            spec, num_params=params, largest_layer_params=largest_layer or 0.0, devices=num_devices, nodes=nodes,
            host_buffer_factor=host_buffer_factor,
        )  # fmt: skip
    elif model is None or cluster is None or workload is None:
        missing = [name for name, given in (("--model", model), ("--cluster", cluster), ("--workload", workload)) if given is None]
        raise InvalidInput.single(
            "missing_option", f"missing {', '.join(missing)}", allowed=["--model, --cluster and --workload", "--params"],
            subject="command line",
        )  # fmt: skip
    else:
        question = Question(model=model, cluster=cluster, workload=workload)
        if precision is None:
            report = asker(server, token).memory(question, strategy, micro_batch, host_buffer_factor)
        else:
            graph, resolved, spec, *_ = Given(engine).read(model, cluster, workload, None)
            spec = _with_precision(spec, precision)
            report = engine.memory(graph, resolved, spec, strategy, micro_batch=micro_batch, host_buffer_factor=host_buffer_factor)
    save_document(out, report)
    output.document(full(report), lambda console: show_memory_report(console, report))


def _with_precision(spec: TrainingSpec, precision: str | None) -> TrainingSpec:
    return spec if precision is None else TrainingSpec.parse({**spec.to_dict(), "precision": precision})


def mfu(
    device: Annotated[str, typer.Option("--device", help="Device of the catalogue (meshwright devices).")],
    model: OptionalModel = None,
    tokens_per_s: Annotated[float | None, typer.Option("--tokens-per-s", help="Tokens per second of one device.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1, help="Tokens of a sequence.")] = None,
    tflops: Annotated[float | None, typer.Option("--tflops", help="Achieved TFLOP/s of one device, in place of tokens.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the products, whose dense peak counts.")] = "bfloat16",
    attention: Annotated[AttentionFlop, typer.Option("--attention", help="What of the scores counts.")] = AttentionFlop.FULL,
    embedding_table: Annotated[
        bool, typer.Option("--embedding-table/--no-embedding-table", help="Whether 6N counts the input embedding.")
    ] = True,
    against: Annotated[Path | None, typer.Option("--against", help="Compare with a result of this verb (--json).")] = None,
    as_json: JsonOption = False,
    no_color: NoColorOption = False,
) -> None:
    """What share of the device's dense peak is that throughput, and by which count?

    Example: meshwright mfu --model llama-2-7b --device h100_sxm --tokens-per-s 9600 --seq-len 4096
    """
    engine = Engine(allow_factory=True)
    given = [tokens_per_s is not None and model is not None and seq_len is not None, tflops is not None]
    if sum(given) != 1:
        raise InvalidInput.single(
            "rate_not_given", "give --model, --seq-len and --tokens-per-s, or --tflops", subject="command line",
            allowed=["--model, --seq-len and --tokens-per-s", "--tflops"],
        )  # fmt: skip
    found = engine.utilization(
        None if model is None or tflops is not None else engine.load_model(model), device, dtype=dtype, seq_len=seq_len,
        tokens_per_s=tokens_per_s, achieved_flop_per_s=None if tflops is None else tflops * 1e12,
        convention=FlopConvention(attention=attention, embedding_table=embedding_table),
    )  # fmt: skip
    ratio = None if against is None else _ratio(found, against)
    document = full(found) if ratio is None else {"utilization": full(found), "ratio": ratio}

    def show(console: Console) -> None:
        show_utilization(console, found)
        if ratio is not None:
            console.print(Text(f"{ratio:.3f} times that of {against}"))

    output.document(document, show)


def _ratio(found: Utilization, path: Path) -> float:
    """The ratio to a stored result; bad input when it was counted otherwise."""
    other = Utilization.load(path)
    try:
        return mfu_ratio(found, other)
    except InvalidInputValue as error:
        raise InvalidInput([error.violation(("against",))], subject=str(path)) from error
