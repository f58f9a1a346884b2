"""What clients send and get. Requests are strict: an unknown key is an error that names the nearest known one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from specs.answer import PlanAnswer
from specs.base import Spec
from specs.interchange import Framework, Target
from specs.measurement import Comparison, Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.questions import Recommendation

JobStatus = Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled", "timed_out"]
Reference = str | dict[str, Any]


class PlanOptions(Spec):
    """How to search. ``strategy`` gives fields that the plan must have; what it leaves open is searched."""

    time_limit_s: float = Field(default=60.0, gt=0)
    top: int = Field(default=5, ge=1, le=50, description="alternatives to list")
    seed: int = 0
    strategy: str | None = Field(
        default=None, min_length=1, max_length=2000, description="'tp=2 pp=2 micro_batch=1 recompute=full zero=0'"
    )


class RecommendOptions(Spec):
    """How to look for the number of devices."""

    max_devices: int = Field(default=512, ge=1, le=65536)
    preset: str | None = Field(default=None, description="node preset; none = one of the catalogue with that device")
    time_limit_s: float = Field(default=120.0, gt=0, description="of all searches together")
    seed: int = 0
    strategy: str | None = Field(default=None, min_length=1, max_length=2000, description="fields that every plan must have")
    efficient_at_least: float = Field(default=0.8, gt=0, le=1, description="share of the best tokens per second and device")


class PlanRequest(Spec):
    """A planning job. Every input is a document, or the id of a stored one."""

    model: Reference = Field(description="Hugging Face config.json, op graph, or id of a model")
    cluster: Reference = Field(description="cluster document, or id of a cluster ('local' is the machine that the service runs on)")
    workload: Reference = Field(description="workload document, or id of a workload")
    profile: Reference | None = Field(
        default=None, description="measured profile, or id of one; none = efficiency models of the device catalogue"
    )
    calibration: Reference | None = Field(default=None, description="calibration of the cluster, or id of one")
    options: PlanOptions = PlanOptions()


class EstimateRequest(Spec):
    """One plan to price: given whole, or as a strategy."""

    model: Reference
    cluster: Reference
    workload: Reference
    profile: Reference | None = None
    calibration: Reference | None = None
    plan: dict[str, Any] | None = None
    strategy: str | None = Field(default=None, min_length=1, max_length=2000)


class CalibrationRequest(Spec):
    """Measured runs of one model on one cluster, to refit the factors of its prices from."""

    model: Reference
    cluster: Reference
    workload: Reference = Field(description="of the runs that do not hold their own")
    profile: Reference | None = None
    measurements: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=64)
    plans: tuple[dict[str, Any], ...] = Field(default=(), max_length=64, description="plans that ran, where a run does not hold it")


class MemoryRequest(Spec):
    """The memory question alone; without a strategy, states and activations of one device."""

    model: Reference
    cluster: Reference
    workload: Reference
    strategy: str | None = Field(default=None, min_length=1, max_length=2000)
    micro_batch: int = Field(default=1, ge=1, description="sequences of a pass where no strategy says it")
    host_buffer_factor: float = Field(default=1.0, ge=1, description="multiplies host bytes of offloaded states; 1 = none hidden")


class ExportRequest(Spec):
    """A plan to write in another framework's words. With the id of a planning job, its own documents are used."""

    plan: Reference = Field(description="plan document, or id of a planning job")
    target: Target
    model: Reference | None = Field(default=None, description="adds the sizes of the model")
    cluster: Reference | None = Field(default=None, description="adds devices per node")
    workload: Reference | None = Field(default=None, description="adds precision and optimizer")


class ImportRequest(Spec):
    """A framework's config to judge. The text is data: nothing of it is opened or run."""

    text: str = Field(min_length=1, max_length=1_000_000, description="the file's content")
    framework: Framework
    strategy: str | None = Field(default=None, min_length=1, max_length=2000, description="fields that the file does not say")
    model: Reference | None = None
    cluster: Reference | None = None
    workload: Reference | None = None
    profile: Reference | None = None
    calibration: Reference | None = None


class ClusterTextRequest(Spec):
    """What people have at hand of a cluster, to be made a document. The texts are data."""

    name: str = Field(default="from texts", max_length=200)
    device: str | None = Field(
        default=None, min_length=1, max_length=100, description="device of the catalogue, when no preset is given"
    )
    preset: str | None = Field(default=None, min_length=1, max_length=100, description="node preset of the catalogue")
    count: int = Field(default=1, ge=1, le=65536, description="nodes, when no hostfile says it")
    hostfile: str | None = Field(default=None, max_length=1_000_000, description="lines 'host slots=8'")
    topology: str | None = Field(default=None, max_length=100_000, description="output of nvidia-smi topo -m; with 'device'")
    nccl_tests: tuple[str, ...] = Field(default=(), max_length=16, description="outputs of nccl-tests programs")


class DiffRequest(Spec):
    """Two plans of one model: documents, or ids of planning jobs."""

    before: Reference
    after: Reference
    model: Reference | None = Field(default=None, description="needed when neither plan is a planning job")
    workload: Reference | None = Field(default=None, description="needed when neither plan is a planning job")
    cluster: Reference | None = Field(default=None, description="adds the time of the move")


class WhyNotOfPlanRequest(Spec):
    """A strategy to hold against the chosen plan of a finished planning job."""

    strategy: str = Field(min_length=1, max_length=2000, description="'tp=8 pp=2 micro_batch=1 zero=1'")


class WhyNotRequest(WhyNotOfPlanRequest):
    """A strategy to hold against a given plan. With the id of a planning job, its own documents are used."""

    plan: Reference = Field(description="plan document, or id of a planning job")
    model: Reference | None = None
    cluster: Reference | None = None
    workload: Reference | None = None
    profile: Reference | None = None
    calibration: Reference | None = None


class RecommendRequest(Spec):
    """How many devices of this type does the job need?"""

    model: Reference
    device: str = Field(min_length=1, max_length=100, description="device of the catalogue")
    workload: Reference
    options: RecommendOptions = RecommendOptions()


class ProfileRequest(Spec):
    """A profiling job on the machine that the service runs on: the ops, collectives and optimizer of this model."""

    model: Reference
    cluster: Reference = "local"
    workload: Reference
    strategies: tuple[str, ...] = Field(
        default=(), max_length=64, description="strategies whose local shapes are measured; none = the planner's usual ones"
    )
    quick: bool = Field(default=True, description="fewer samples, under a minute for a small model")


class ExecutionRequest(Spec):
    """A run of a plan on this machine."""

    steps: int = Field(default=10, ge=1, le=10_000, description="measured steps")
    warmup_steps: int = Field(default=2, ge=0, le=1000)
    profile: Reference | None = Field(default=None, description="profile for the prediction; none = the plan's own")


class DocumentResource(BaseModel):
    """A stored document. ``document`` is left out in lists."""

    id: str
    kind: str
    name: str
    content_hash: str
    created_at: str = Field(description="UTC, ISO 8601")
    attributes: dict[str, Any] = {}
    document: dict[str, Any] | None = None


class JobProgress(BaseModel):
    """The last progress event."""

    stage: str
    message: str = ""
    done: float = 0
    total: float | None = None
    eta_s: float | None = None
    data: dict[str, Any] = {}


class JobResource(BaseModel):
    """A long piece of work. Times are UTC, ISO 8601. ``error`` is a problem body (RFC 9457) when ``status`` is failed."""

    id: str
    kind: str
    status: JobStatus
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    progress: JobProgress | None = None
    request: dict[str, Any] = Field(description="the inputs as ids, and the options")
    error: dict[str, Any] | None = None
    links: dict[str, str] = {}


class PlanResource(JobResource):
    """A planning job and its answer. An infeasible answer is a result: ``answer.limits`` say what breaks and by how much."""

    answer: PlanAnswer | None = None


class RecommendationResource(JobResource):
    """A recommendation job and its answer."""

    answer: Recommendation | None = None


class ExecutionResource(JobResource):
    """A run of a plan."""

    plan_id: str
    prediction: Prediction | None = None
    measurement: Measurement | None = None


class ComparisonResource(BaseModel):
    """Prediction and measurement of one execution, joined."""

    execution_id: str
    comparison: Comparison


class ProfileJobResource(JobResource):
    """A profiling job; ``profile_id`` names the profile once it is there."""

    profile_id: str | None = None


class EstimateResource(BaseModel):
    """A priced plan; ``fits`` compares the peak with the memory of the device, the margin of the workload kept free."""

    plan: Plan
    prediction: Prediction
    fits: bool


class Page(BaseModel):
    """A list, newest first. ``next`` is the cursor of the next page, None at the end."""

    items: list[Any]
    next: str | None = None


class ProblemError(BaseModel):
    """One broken rule."""

    loc: list[str | int]
    code: str
    msg: str
    actual: Any = None
    allowed: Any = None
    nearest: Any = None


class Problem(BaseModel):
    """RFC 9457 problem body, media type application/problem+json; ``errors`` holds every violation."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str | None = None
    errors: list[ProblemError] = []
