"""TrainingSpec: the job. The global batch is required and never changed by the planner."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from specs.base import Document, InvalidInputValue, InvalidInputValues, Spec
from specs.errors import nearest_name
from specs.graph import DTYPE_BYTES


class Objective(StrEnum):
    """What the planner minimises."""

    STEP_TIME = "step_time"
    COST = "cost"
    ENERGY = "energy"
    FEWEST_DEVICES = "fewest_devices"
    TIME_TO_TARGET = "time_to_target"


def _unknown(what: str, value: str, known: Iterable[str], loc: tuple[str | int, ...] = ()) -> InvalidInputValue:
    names = sorted(known)
    nearest = nearest_name(value, names)
    return InvalidInputValue(
        f"unknown_{what}", f"{what} '{value}' is not known", actual=value, allowed=names, nearest=nearest, loc=loc
    )


class Precision(Spec):
    """Dtypes of a training step. ``master_dtype`` is ``None`` when the optimizer updates the weights themselves."""

    param_dtype: str = "bfloat16"
    compute_dtype: str = "bfloat16"
    grad_dtype: str = Field(default="bfloat16", description="of the gradient buffer")
    reduce_dtype: str = "bfloat16"
    master_dtype: str | None = "float32"
    accumulate_dtype: str | None = Field(
        default=None,
        description="of a second gradient buffer that micro-batches are added into, beside grad_dtype's; none by default",
    )
    frozen_dtype: str | None = Field(default=None, description="of parameters that are not trained; default: param_dtype")
    matmul_dtype: str | None = Field(
        default=None,
        description="of the linear layers' products where narrower than compute_dtype (float8, float4); head and attention keep it",
    )

    @model_validator(mode="after")
    def _known(self) -> Precision:
        unknown = {name: value for name, value in self if value is not None and value not in DTYPE_BYTES}
        InvalidInputValues.raise_any([_unknown("dtype", value, DTYPE_BYTES, (name,)) for name, value in unknown.items()])
        return self


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(
        param_dtype="float32", compute_dtype="float32", grad_dtype="float32", reduce_dtype="float32", master_dtype=None
    ),
    "bf16_mixed": Precision(),  # 2 + 2 + 4 + 8 = 16 bytes per parameter with Adam
    "bf16_mixed_fp32_grad": Precision(grad_dtype="float32", reduce_dtype="float32"),  # 18 bytes per parameter
    "bf16_mixed_fp32_accumulation": Precision(accumulate_dtype="float32"),  # 20: gradients in both dtypes
    "fp16_mixed": Precision(param_dtype="float16", compute_dtype="float16", grad_dtype="float16", reduce_dtype="float16"),
    "bf16_pure": Precision(master_dtype=None),
}


class Optimizer(Spec):
    """The optimizer. ``states_per_param`` tensors of ``state_dtype`` per parameter (Adam 2, momentum SGD 1)."""

    name: str = "adamw"
    state_dtype: str = "float32"
    fused: bool = True
    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    @model_validator(mode="after")
    def _known(self) -> Optimizer:
        if self.name not in OPTIMIZER_STATES:
            raise _unknown("optimizer", self.name, OPTIMIZER_STATES, ("name",))
        return self

    @property
    def states_per_param(self) -> int:
        """State tensors per parameter."""
        return OPTIMIZER_STATES[self.name]


OPTIMIZER_STATES: dict[str, int] = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}


class Adapters(Spec):
    """Train low-rank adapters of ``rank`` beside linear layers of all blocks but embedding and head; the model itself is frozen."""

    rank: int = Field(ge=1)
    beside: Literal["linear", "attention"] = Field(
        default="linear", description="linear: every linear layer | attention: those right before attention and right after it"
    )


class LengthBin(Spec):
    """``weight`` of sequences of ``length`` tokens in a histogram of lengths."""

    length: int = Field(ge=1)
    weight: float = Field(gt=0)


class Limits(Spec):
    """Limits of the job; ``None`` = none."""

    memory_margin_fraction: float = Field(default=0.06, ge=0, lt=1, description="of device memory kept free for the allocator")
    max_devices: int | None = Field(default=None, ge=1)
    max_step_time_s: float | None = Field(default=None, gt=0)
    allow_algorithm_change: bool = Field(default=False, description="bounded staleness, local SGD and the like")


LOSS_KERNELS = ("full", "in_place", "fused")
ATTENTION_KERNELS = ("flash", "math")
PrecisionInput = (
    Literal["fp32", "bf16_mixed", "bf16_mixed_fp32_grad", "bf16_mixed_fp32_accumulation", "fp16_mixed", "bf16_pure"] | Precision
)


def _precision_preset(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value not in PRECISIONS:
        raise _unknown("precision", value, PRECISIONS)
    return PRECISIONS[value]


class TrainingSpec(Document):
    """The workload. ``precision`` takes a preset name or a full :class:`Precision`."""

    kind: ClassVar[str] = "workload"
    name: str = ""
    global_batch: int = Field(ge=1, description="sequences per optimizer step, all devices together; never changed")
    seq_len: int | None = Field(default=None, ge=1)
    seq_len_histogram: tuple[LengthBin, ...] = ()
    precision: Annotated[Precision, BeforeValidator(_precision_preset, json_schema_input_type=PrecisionInput)] = Precision()
    optimizer: Optimizer = Optimizer()
    adapters: Adapters | None = Field(default=None, description="train low-rank adapters only (LoRA); None: every parameter")
    loss_kernel: str = Field(
        default="full",
        description="full (float32 copies of logits) | in_place (gradient written over them) | fused (chunked with the head)",
    )
    attention_kernel: str = Field(default="flash", description="flash | math (materialises the s x s scores)")
    objective: Objective = Objective.STEP_TIME
    limits: Limits = Limits()
    micro_batches: tuple[int, ...] = Field(default=(), description="allowed micro-batch sizes; empty = any divisor")
    data_source: str = Field(default="synthetic", description="synthetic | path of a token file")
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSpec:
        broken = []
        if (self.seq_len is None) == (not self.seq_len_histogram):
            broken.append(InvalidInputValue("sequence_length", "give exactly one of 'seq_len' and 'seq_len_histogram'"))
        if self.loss_kernel not in LOSS_KERNELS:
            broken.append(_unknown("loss_kernel", self.loss_kernel, LOSS_KERNELS, ("loss_kernel",)))
        if self.attention_kernel not in ATTENTION_KERNELS:
            broken.append(_unknown("attention_kernel", self.attention_kernel, ATTENTION_KERNELS, ("attention_kernel",)))
        InvalidInputValues.raise_any(broken)
        return self

    @property
    def max_seq_len(self) -> int:
        """The longest sequence, which sets the memory."""
        return self.seq_len if self.seq_len is not None else max(item.length for item in self.seq_len_histogram)
