"""Durable jobs: DBOS Transact workflows over the service's own rows.

A job's workflow id is the job's id, its input is that id alone, and each step writes its outcome into ``api.store`` before
it returns, so a workflow holds no state of its own. After a crash DBOS dispatches every pending workflow again: finished
steps are not repeated, the interrupted one runs again from its start. That is right for capture, search and profiling, which
have no effect outside, and for executions, which train on synthetic data into nothing. A job that was started
``max_attempts`` times without an end is reported failed. The row is written before the workflow is enqueued; ``launch``
enqueues the workflows of open rows that have none (enqueueing twice is one workflow).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from dbos import DBOS, DBOSConfig, SetWorkflowID

from api.documents import full
from api.engine import Engine
from api.inputs import InputReader
from api.isolate import UnexpectedError, isolated
from api.logs import belonging_to
from api.problem_body import problem_of
from api.settings import Settings
from api.store import Job, Store
from specs.errors import ExecutionFailed, Infeasible, InvalidInput, MeshwrightError, NoAnswerInTime
from specs.measurement import Measurement
from specs.plan import Plan
from specs.prediction import Prediction
from specs.progress import Progress, ProgressSink

logger = logging.getLogger("meshwright.jobs")

# Jobs written by one version of these workflows must be resumed by the same; raise it when their steps change.
WORKFLOW_VERSION = "1"
PLAN_QUEUE, DEVICE_QUEUE = "meshwright-plans", "meshwright-devices"
PROGRESS_INTERVAL_S = 0.2
SEARCH_GRACE_S = 60.0  # a search ends itself at its limit; this ends one that does not


class JobCancelled(MeshwrightError):
    """A client cancelled the job."""


class ServiceStopping(BaseException):
    """The service stops in order: the job is put back and no outcome is recorded (hence no ``Exception``)."""


class Jobs:
    """The running jobs of this process. One at a time: DBOS is one per process."""

    def __init__(
        self, settings: Settings, store: Store, engine: Engine, notify: Callable[[str], None] = lambda _: None,
        observe: Callable[[Job], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.settings, self.store, self.engine, self.reader = settings, store, engine, InputReader(store, engine, settings)
        self._notify, self._observe = notify, observe
        self._stopping = threading.Event()
        self._idle = threading.Condition()
        self._active = 0

    def launch(self) -> None:
        """Start DBOS, its queues, and every job that a crash or a stop interrupted."""
        global _current
        config = DBOSConfig(
            name="meshwright", system_database_url=self.settings.url, application_version=WORKFLOW_VERSION,
            executor_id=self.settings.executor_id, log_level="WARNING", notification_listener_polling_interval_sec=0.2,
        )  # fmt: skip
        DBOS(config=config)
        _current = self
        DBOS.launch()
        DBOS.register_queue(
            PLAN_QUEUE, worker_concurrency=self.settings.plan_workers, polling_interval_sec=0.1, on_conflict="always_update"
        )
        DBOS.register_queue(DEVICE_QUEUE, worker_concurrency=1, polling_interval_sec=0.1, on_conflict="always_update")
        self._reconcile()

    def _reconcile(self) -> None:
        for job in self.store.open_jobs():
            status = DBOS.get_workflow_status(job.id)
            if status is None:
                self.submit(job)
            elif status.status not in ("ENQUEUED", "PENDING", "DELAYED"):
                self.finish(job.id, "failed", ExecutionFailed(f"the job ended without a result (workflow {status.status})"))

    def stop(self) -> None:
        """Put running jobs back, end their processes and stop DBOS; the jobs go on after the next :meth:`launch`."""
        global _current
        self._stopping.set()
        with self._idle:
            self._idle.wait_for(lambda: self._active == 0, timeout=15)
        DBOS.destroy()
        _current = None

    @property
    def is_running(self) -> bool:
        """Whether jobs are taken up."""
        return _current is self and not self._stopping.is_set()

    def submit(self, job: Job) -> None:
        """Enqueue a stored job; a second time is the first."""
        workflow = _WORKFLOWS[job.kind]
        with SetWorkflowID(job.id):
            DBOS.enqueue_workflow(PLAN_QUEUE if job.kind in ("plan", "recommendation") else DEVICE_QUEUE, workflow, job.id)

    def cancel(self, job_id: str) -> None:
        """End a job: a queued one at once, a running one within a second or so."""
        self.store.request_cancel(job_id)
        self._notify(job_id)

    def finish(self, job_id: str, status: str, error: BaseException | None = None) -> None:
        """Give an open job its final status."""
        changed = self.store.finish(job_id, status, error=None if error is None else problem_of(error))
        self._notify(job_id)
        job = self.store.job(job_id) if changed else None
        if job is not None:
            logger.info("%s ended as %s", job_id, status)
            self._observe(job)

    def run(self, job_id: str, steps: tuple[Callable[[str], bool], ...]) -> None:
        """The body of every workflow; its log lines carry the ids of the job and of the request that asked for it."""
        with belonging_to(request_id=self.store.request_id(job_id), job_id=job_id):
            self._run(job_id, steps)

    def _run(self, job_id: str, steps: tuple[Callable[[str], bool], ...]) -> None:
        """Count the attempt, then step by step until one says stop."""
        with self._idle:
            self._active += 1
        try:
            if self._stopping.is_set():
                raise ServiceStopping
            job = self.store.start(job_id)
            self._notify(job_id)
            if job is None:
                return
            if job.attempts > self.settings.max_attempts:
                self.finish(
                    job_id, "failed", ExecutionFailed(f"given up: the service ended {job.attempts - 1} times while this job ran")
                )
                return
            for step in steps:
                if not step(job_id):
                    return
        except ServiceStopping:
            self.store.put_back(job_id)
            raise
        except Exception as error:
            logger.exception("job %s", job_id)
            self.finish(job_id, "failed", error)
            raise
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def isolated(self, job: Job, call: Callable[..., Any], *args: Any, time_limit_s: float | None = None, **kwargs: Any) -> Any:
        """Run an engine call for a job in a child process, with its progress, cancellation and time limit."""
        return isolated(
            call, *args, progress=self._sink(job.id), stop=self._stop_reason(job.id), time_limit_s=time_limit_s, **kwargs
        )

    def _stop_reason(self, job_id: str) -> Callable[[], BaseException | None]:
        looked = time.monotonic()

        def reason() -> BaseException | None:
            nonlocal looked
            if self._stopping.is_set():
                return ServiceStopping()
            if time.monotonic() - looked < 0.3:
                return None
            looked = time.monotonic()
            job = self.store.job(job_id)
            return JobCancelled("cancelled") if job is None or job.cancel_requested else None

        return reason

    def _sink(self, job_id: str) -> ProgressSink:
        """Record progress: every change of stage and every end of one, in between a few events per second."""
        last_stage, last_time = "", 0.0

        def sink(event: Progress) -> None:
            nonlocal last_stage, last_time
            now = time.monotonic()
            is_end = event.total is not None and event.done >= event.total
            if event.stage == last_stage and not is_end and now - last_time < PROGRESS_INTERVAL_S:
                return
            last_stage, last_time = event.stage, now
            self.store.record(job_id, event.model_dump(mode="json"))
            self._notify(job_id)

        return sink


_current: Jobs | None = None


def _jobs() -> Jobs:
    if _current is None:
        raise ServiceStopping
    return _current


def _outcome(job_id: str, work: Callable[[Jobs, Job], None]) -> bool:
    """Do a step's work; write a failure into the job's row. False: the job has its final status."""
    jobs = _jobs()
    job = jobs.store.job(job_id)
    if job is None or not job.is_open:
        return False
    try:
        if job.cancel_requested:
            raise JobCancelled("cancelled")
        work(jobs, job)
    except JobCancelled:
        jobs.finish(job_id, "cancelled")
    except NoAnswerInTime as error:
        jobs.finish(job_id, "timed_out", error)
    except Infeasible as error:
        jobs.finish(job_id, "infeasible", error)
    except (InvalidInput, ExecutionFailed) as error:
        jobs.finish(job_id, "failed", error)
    except Exception as error:
        logger.error("job %s: %s", job_id, getattr(error, "trace", "") or error, exc_info=not isinstance(error, UnexpectedError))
        jobs.finish(job_id, "failed", error)
    else:
        return True
    return False


# steps -----------------------------------------------------------------------------------------------------------------


def _capture(jobs: Jobs, job: Job) -> None:
    jobs.reader.graph_of(
        jobs.reader.rows_of(job)["model"],
        lambda model: jobs.isolated(job, jobs.engine.capture, model.document, model.name, time_limit_s=600),
    )


def _search(jobs: Jobs, job: Job) -> None:
    from api.schemas import PlanOptions

    inputs, options = jobs.reader.load_job(job), PlanOptions.model_validate(job.request["options"])
    answer = jobs.isolated(
        job, jobs.engine.plan, inputs.graph, inputs.cluster, inputs.workload, inputs.profile, options,
        calibration=inputs.calibration, time_limit_s=options.time_limit_s + SEARCH_GRACE_S,
    )  # fmt: skip
    jobs.store.add_result(job.id, {"answer": full(answer)})
    jobs.finish(job.id, {"infeasible": "infeasible", "timed_out": "timed_out"}.get(answer.status, "succeeded"))


def _recommend(jobs: Jobs, job: Job) -> None:
    from api.schemas import RecommendOptions

    inputs, options = jobs.reader.load_job(job), RecommendOptions.model_validate(job.request["options"])
    answer = jobs.isolated(
        job, jobs.engine.recommend, inputs.graph, job.request["device"], inputs.workload, options,
        time_limit_s=options.time_limit_s + SEARCH_GRACE_S,
    )  # fmt: skip
    jobs.store.add_result(job.id, {"answer": full(answer)})
    jobs.finish(job.id, "infeasible" if answer.fewest_devices is None else "succeeded")


def _measure(jobs: Jobs, job: Job) -> None:
    inputs = jobs.reader.load_job(job)
    profile = jobs.isolated(
        job, jobs.engine.profile, inputs.graph, inputs.cluster, inputs.workload, strategies=tuple(job.request["strategies"]),
        quick=job.request["quick"], time_limit_s=jobs.settings.execution_time_limit_s,
    )  # fmt: skip
    row, _ = jobs.store.put_document(
        "profile",
        name=profile.name or "measured",
        content_hash=profile.content_hash(),
        document=profile.to_dict(),
        attributes={"job": job.id},
    )
    jobs.store.add_result(job.id, {"profile_id": row.id})
    jobs.finish(job.id, "succeeded")


def _predict(jobs: Jobs, job: Job) -> None:
    inputs, plan = jobs.reader.load_job(job), Plan.parse(job.request["plan"])
    if inputs.graph is None:
        raise ExecutionFailed("the model of this plan has no captured graph")
    prediction = jobs.engine.estimate(inputs.graph, inputs.cluster, inputs.workload, plan, inputs.profile, inputs.calibration)
    jobs.store.add_result(job.id, {"prediction": full(prediction)})


def _execute(jobs: Jobs, job: Job) -> None:
    inputs, plan = jobs.reader.load_job(job), Plan.parse(job.request["plan"])
    limit_s = jobs.settings.execution_time_limit_s
    measurement: Measurement = jobs.isolated(
        job, jobs.engine.execute, plan, inputs.graph, inputs.workload, steps=job.request["steps"],
        warmup_steps=job.request["warmup_steps"], profile=inputs.profile, time_limit_s=limit_s + 30, run_time_limit_s=limit_s,
    )  # fmt: skip
    jobs.store.add_result(job.id, {"measurement": full(measurement)})
    if measurement.status != "succeeded":
        raise ExecutionFailed(measurement.error or "the run failed")


def _compare(jobs: Jobs, job: Job) -> None:
    result = job.result or {}
    comparison = jobs.engine.compare(Prediction.parse(result["prediction"]), Measurement.parse(result["measurement"]))
    jobs.store.add_result(job.id, {"comparison": full(comparison)})
    jobs.finish(job.id, "succeeded")


@DBOS.step(name="capture")
def capture_step(job_id: str) -> bool:
    """The model's graph, unless it is there."""
    return _outcome(job_id, _capture)


@DBOS.step(name="search")
def search_step(job_id: str) -> bool:
    """The planner's answer."""
    return _outcome(job_id, _search)


@DBOS.step(name="recommend")
def recommend_step(job_id: str) -> bool:
    """The best plan at every size."""
    return _outcome(job_id, _recommend)


@DBOS.step(name="measure")
def measure_step(job_id: str) -> bool:
    """The profile."""
    return _outcome(job_id, _measure)


@DBOS.step(name="predict")
def predict_step(job_id: str) -> bool:
    """What the plan should do."""
    return _outcome(job_id, _predict)


@DBOS.step(name="execute")
def execute_step(job_id: str) -> bool:
    """What the plan does."""
    return _outcome(job_id, _execute)


@DBOS.step(name="compare")
def compare_step(job_id: str) -> bool:
    """The two joined."""
    return _outcome(job_id, _compare)


# workflows -------------------------------------------------------------------------------------------------------------


@DBOS.workflow(name="plan_job")
def plan_job(job_id: str) -> None:
    """Capture, then search."""
    _jobs().run(job_id, (capture_step, search_step))


@DBOS.workflow(name="recommendation_job")
def recommendation_job(job_id: str) -> None:
    """Capture, then search every size."""
    _jobs().run(job_id, (capture_step, recommend_step))


@DBOS.workflow(name="profile_job")
def profile_job(job_id: str) -> None:
    """Capture, then measure this machine."""
    _jobs().run(job_id, (capture_step, measure_step))


@DBOS.workflow(name="execution_job")
def execution_job(job_id: str) -> None:
    """Predict, run, compare."""
    _jobs().run(job_id, (predict_step, execute_step, compare_step))


_WORKFLOWS: dict[str, Callable[[str], None]] = {
    "plan": plan_job, "recommendation": recommendation_job, "profile": profile_job, "execution": execution_job,
}  # fmt: skip
