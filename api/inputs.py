"""Documents of a request: parsed, checked and stored when posted inline, looked up when named by id; all violations at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from api.cache import Cache
from api.engine import Engine, is_graph
from api.limits import check_size
from api.settings import LOCAL_CLUSTER_ID, Settings
from api.store import Job, Store, StoredDocument
from specs.base import Document
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, Violation, nearest_name
from specs.graph import ModelGraph
from specs.profile import Profile
from specs.training import TrainingSpec

KINDS = ("model", "cluster", "workload", "profile", "calibration")
_PARSERS: dict[str, type[Document]] = {
    "cluster": ClusterSpec, "workload": TrainingSpec, "profile": Profile, "calibration": Calibration,
}  # fmt: skip


class _ConfigDocument(Document):
    """Gives a Hugging Face config the content hash of a document."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The documents that a job works on. ``graph`` is None until capture."""

    model: StoredDocument
    graph: ModelGraph | None
    cluster: ClusterSpec
    workload: TrainingSpec
    profile: Profile | None
    calibration: Calibration | None = None


class InputReader:
    """Turns what clients send into stored documents."""

    def __init__(self, store: Store, engine: Engine, settings: Settings) -> None:
        self._store, self._engine, self._settings = store, engine, settings
        self._graphs: Cache[ModelGraph] = Cache(16)
        self._known: Cache[str] = Cache(4096)

    def store_document(self, kind: str, data: dict[str, Any]) -> tuple[StoredDocument, bool]:
        """Check and store one posted document; raises :class:`InvalidInput` with every violation.

        What was posted before in the same words is looked up, not checked again.
        """
        check_size(kind, data, self._settings)
        words = hashlib.sha256(json.dumps([kind, data]).encode()).hexdigest()
        known = self._known.peek(words)
        row = None if known is None else self._store.document(kind, known)
        if row is not None:
            return row, False
        row, created = self._checked(kind, data)
        self._known.get(words, lambda: row.id)
        return row, created

    def _checked(self, kind: str, data: dict[str, Any]) -> tuple[StoredDocument, bool]:
        if kind == "model":
            return self._store_model(data)
        document = _PARSERS[kind].parse(data)
        attributes: dict[str, Any] = {}
        if isinstance(document, ClusterSpec):
            attributes = {"num_devices": self._engine.resolve(document).num_devices}
            if self.is_local(document):
                attributes["local"] = True
        if isinstance(document, TrainingSpec):
            _refuse_paths(document)
        name = getattr(document, "name", "") or kind
        return self._store.put_document(
            kind, name=name, content_hash=document.content_hash(), document=document.to_dict(), attributes=attributes
        )

    def _store_model(self, data: dict[str, Any]) -> tuple[StoredDocument, bool]:
        self._engine.check_model(data)
        if is_graph(data):
            graph = self._engine.capture(data, "posted")  # a graph is parsed and priced, nothing of it runs
            row, created = self._store.put_document(
                "model",
                name=graph.name,
                content_hash=graph.content_hash(),
                document=graph.to_dict(),
                attributes={"source": "graph"},
            )
            if created:
                self.keep_graph(row, graph)
            return self._store.document("model", row.id) or row, created
        name = str(data.get("_name_or_path") or data.get("name") or data.get("model_type") or "model")
        content_hash = _ConfigDocument(config=data).content_hash()
        return self._store.put_document(
            "model", name=name, content_hash=content_hash, document=data, attributes={"source": "hf_config"}
        )

    def keep_graph(self, model: StoredDocument, graph: ModelGraph) -> None:
        """Keep the graph that was captured from a model document."""
        facts = {
            **model.attributes,
            "num_params": graph.num_params(),
            "num_units": graph.num_units(),
            "graph_hash": graph.content_hash(),
        }
        self._store.put_graph(model.content_hash, graph.to_dict(), facts)

    def read(self, references: dict[str, Any]) -> dict[str, StoredDocument]:
        """Look up or store every reference (kind -> id or document); raises with the violations of all of them."""
        rows: dict[str, StoredDocument] = {}
        violations: list[Violation] = []
        for kind, reference in references.items():
            try:
                rows[kind] = self.find(kind, reference) if isinstance(reference, str) else self.store_document(kind, reference)[0]
            except InvalidInput as error:
                violations += [_below(violation, kind) for violation in error.violations]
        if violations:
            raise InvalidInput(violations, subject="request")
        return rows

    def find(self, kind: str, identifier: str) -> StoredDocument:
        """The stored document with that id, or the model preset of that name; raises :class:`InvalidInput` with the nearest."""
        row = self._store.document(kind, identifier)
        if row is not None:
            return row
        presets = self._engine.model_presets() if kind == "model" else []
        if identifier in presets:
            return self.store_document("model", {"name": identifier, **self._engine.model_preset(identifier)})[0]
        near = nearest_name(identifier, [*presets, *self._store.document_ids(kind)])
        raise InvalidInput.single("unknown_id", f"there is no {kind} '{identifier}'", actual=identifier, nearest=near, subject=kind)

    def is_local(self, cluster: ClusterSpec) -> bool:
        """Whether this is the cluster that the operator registered as this machine."""
        local = self._store.document("cluster", LOCAL_CLUSTER_ID)
        return local is not None and local.content_hash == cluster.content_hash()

    def load(self, rows: dict[str, StoredDocument]) -> Inputs:
        """Documents from their rows, the cluster resolved."""
        profile, calibration = self.measured(rows)
        return Inputs(
            model=rows["model"],
            graph=self.graph(rows["model"].content_hash),
            cluster=self._engine.resolve(ClusterSpec.parse(rows["cluster"].document)),
            workload=TrainingSpec.parse(rows["workload"].document),
            profile=profile,
            calibration=calibration,
        )

    def graph(self, model_hash: str) -> ModelGraph | None:
        """The captured graph of the model document with that hash, if it was captured."""

        def load() -> ModelGraph:
            stored = self._store.graph(model_hash)
            if stored is None:
                raise KeyError(model_hash)
            return ModelGraph.parse(stored)

        try:
            return self._graphs.get(model_hash, load)
        except KeyError:
            return None

    def measured(self, rows: dict[str, StoredDocument]) -> tuple[Profile | None, Calibration | None]:
        """Profile and calibration of the rows, where they are named."""
        profile, calibration = rows.get("profile"), rows.get("calibration")
        return (
            None if profile is None else Profile.parse(profile.document),
            None if calibration is None else Calibration.parse(calibration.document),
        )

    def rows_of(self, job: Job) -> dict[str, StoredDocument]:
        """The rows that a job's request names."""
        return {kind: self.find(kind, job.request[kind]) for kind in KINDS if job.request.get(kind)}

    def load_job(self, job: Job) -> Inputs:
        """The documents that a job's request names."""
        return self.load(self.rows_of(job))

    def graph_of(self, model: StoredDocument, capture: Callable[[StoredDocument], ModelGraph]) -> ModelGraph:
        """The graph of a model, captured and kept when nobody has done so yet."""
        found = self.graph(model.content_hash)
        if found is None:
            found = capture(model)
            self.keep_graph(model, found)
        return found


def _refuse_paths(workload: TrainingSpec) -> None:
    """A request never makes the server open a file."""
    if workload.data_source != "synthetic":
        raise InvalidInput.single(
            "data_source_not_allowed", "the service trains on synthetic tokens only; a token file needs 'meshwright run'",
            loc=("data_source",), actual=workload.data_source, allowed=["synthetic"], nearest="synthetic", subject="workload",
        )  # fmt: skip


def _below(violation: Violation, kind: str) -> Violation:
    """The violation with its place in the request instead of in its document."""
    loc = violation.loc if violation.loc[:1] == (kind,) else (kind, *violation.loc)
    return Violation(
        code=violation.code,
        message=violation.message,
        loc=loc,
        actual=violation.actual,
        allowed=violation.allowed,
        nearest=violation.nearest,
    )
