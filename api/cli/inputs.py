"""Arguments that name documents: files, presets, and this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from api.engine import Engine
from specs.base import Document, read_mapping
from specs.calibration import Calibration
from specs.cluster import ClusterSpec
from specs.errors import InvalidInput, MeshwrightError
from specs.graph import ModelGraph
from specs.plan import Plan
from specs.prediction import Prediction
from specs.profile import Profile
from specs.training import TrainingSpec

Kind = TypeVar("Kind", bound=Document)

ModelOption = Annotated[str, typer.Option("--model", help="HF config.json, op graph, preset name, or package.module:factory.")]
ClusterOption = Annotated[
    str, typer.Option("--cluster", help="Cluster file (YAML, JSON, TOML), or local[:N]: N worker processes of this machine.")
]
WorkloadOption = Annotated[Path, typer.Option("--workload", help="Workload file (YAML, JSON, TOML).")]
ProfileOption = Annotated[Path | None, typer.Option("--profile", help="Measured profile; none: efficiency models.")]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Factors refitted from measured runs, as 'meshwright calibrate' writes them.")
]


ServerOption = Annotated[
    str | None,
    typer.Option("--server", envvar="MESHWRIGHT_SERVER", metavar="URL", help="Ask this service; files are sent as documents."),
]
TokenOption = Annotated[str | None, typer.Option("--token", envvar="MESHWRIGHT_TOKEN", help="Bearer token of the service.")]


class Documents(NamedTuple):
    """What a question is about; ``cluster`` is resolved."""

    graph: ModelGraph
    cluster: ClusterSpec
    workload: TrainingSpec
    profile: Profile | None
    calibration: Calibration | None


class Given:
    """The documents that a command line names; everything wrong with any of them is reported at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._violations: list[Any] = []

    def read(self, model: str, cluster: str, workload: Path, profile: Path | None, calibration: Path | None = None) -> Documents:
        """The cheap documents first, capture last."""
        spec = self.try_read(lambda: TrainingSpec.load(workload))
        factors = None if calibration is None else self.try_read(lambda: Calibration.load(calibration))
        graph, resolved, measured = self.read_site(model, cluster, profile)
        return Documents(graph, resolved, spec, measured, factors)

    def read_site(self, model: str, cluster: str, profile: Path | None) -> tuple[ModelGraph, ClusterSpec, Profile | None]:
        """Graph, resolved cluster and profile; raises with all that was wrong, earlier documents included."""
        resolved = self.try_read(lambda: read_cluster(cluster, self._engine))
        measured = None if profile is None else self.try_read(lambda: Profile.load(profile))
        graph = self.try_read(lambda: self._engine.load_model(model))
        self.raise_any()
        return graph, resolved, measured

    def raise_any(self) -> None:
        """Raise with all that was wrong so far."""
        if self._violations:
            raise InvalidInput(self._violations, subject="command line")

    def try_read(self, load: Callable[[], Any]) -> Any:
        """What ``load`` gives, or None and its violations kept for later."""
        try:
            return load()
        except InvalidInput as error:
            self._violations += error.violations
            return None


def read_cluster(text: str, engine: Engine) -> ClusterSpec:
    """The resolved cluster of a file, or this machine for ``local[:N]``."""
    name, _, count = text.partition(":")
    if name == "local" and not Path(text).exists():
        if count and not (count.isdigit() and 0 < int(count) <= 64):
            raise InvalidInput.single(
                "bad_device_count",
                f"'{text}' is no local[:N]",
                loc=("cluster",),
                actual=count,
                allowed="1 to 64",
                subject="cluster",
            )
        return engine.resolve(engine.local_cluster(int(count or 2)))
    return engine.resolve(ClusterSpec.load(text))


def read_part(path: Path, kind: type[Kind], key: str) -> Kind:
    """A document of ``kind`` from a file that is one, or that holds one under ``key`` (an answer or an estimate)."""
    data = read_mapping(path)
    if isinstance(data, dict) and isinstance(data.get(key), dict):
        data = data[key]
    elif isinstance(data, dict) and key in data and data[key] is None:
        raise InvalidInput.single("no_such_part", f"{path} holds no {key} ({data.get('status', 'empty')})", subject=str(path))
    return kind.parse(data, subject=f"{kind.kind} {path}")


def read_plan(path: Path) -> Plan:
    """The plan in a plan file or in a whole answer."""
    return read_part(path, Plan, "plan")


def read_prediction(path: Path) -> Prediction:
    """The prediction in a prediction file, an estimate or a whole answer."""
    return read_part(path, Prediction, "prediction")


def save_document(path: Path | None, document: Document) -> None:
    """:func:`save_text` of a document, where a path was given."""
    if path is not None:
        save_text(path, document.to_json(indent=1) + "\n")


def save_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; a path that cannot be written is one clear error."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise MeshwrightError(f"cannot write {path}: {error.strerror}") from None
