"""What goes to and comes from other frameworks: exported configs, imported ones, and what was made of every key."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from specs.base import Document, Spec
from specs.plan import Plan
from specs.prediction import Prediction
from specs.questions import BrokenRule

TARGETS = ("megatron", "deepspeed", "accelerate", "torchtitan", "slurm", "csv")
FRAMEWORKS = ("megatron", "deepspeed", "accelerate", "torchtitan", "nanotron", "neox")
Target = Literal["megatron", "deepspeed", "accelerate", "torchtitan", "slurm", "csv"]
Framework = Literal["megatron", "deepspeed", "accelerate", "torchtitan", "nanotron", "neox"]


class Exported(Document):
    """A plan in a framework's own words. ``files``: name to text, the first one is the config itself."""

    kind: ClassVar[str] = "exported config"
    target: Target
    version: str = Field(description="release of the target that the text was checked against")
    files: dict[str, str]
    notes: tuple[str, ...] = Field(default=(), description="what the files alone do not do: model code, launch, environment")


class ReadKey(Spec):
    """One key of an imported config: ``meaning`` in words of the plan, or why it was not understood."""

    key: str
    value: Any = None
    meaning: str


class Imported(Document):
    """What a framework's config asks for. ``workload`` and ``model`` are partial documents: only what the file says."""

    kind: ClassVar[str] = "imported config"
    framework: Framework
    strategy: str = Field(description="what it asks for in the planner's words, dp only where the file says it")
    workload: dict[str, Any] = {}
    model: dict[str, Any] = Field(default={}, description="keys of a Hugging Face config")
    num_devices: int | None = None
    understood: tuple[ReadKey, ...] = ()
    ignored: tuple[ReadKey, ...] = Field(default=(), description="known to change neither time nor memory of a step")
    not_understood: tuple[ReadKey, ...] = ()
    assumed: tuple[str, ...] = Field(default=(), description="what the file leaves open and was filled in")


class Judgement(Document):
    """A foreign config judged: what it asks for, and how fast and full that is where model, cluster and workload are known."""

    kind: ClassVar[str] = "judgement"
    imported: Imported
    strategy: str = Field(description="what was priced: the config's strategy with the caller's own fields")
    conflicts: tuple[str, ...] = Field(
        default=(), description="where the config and the given documents disagree; the documents win"
    )
    missing: tuple[str, ...] = Field(default=(), description="what a prediction would still need")
    rules: tuple[BrokenRule, ...] = Field(default=(), description="every rule that forbids it on this model and cluster")
    plan: Plan | None = None
    prediction: Prediction | None = None
    fits: bool | None = None
