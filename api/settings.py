"""Settings of the service: defaults, then ``MESHWRIGHT_*`` environment variables, then what the command line gives."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from sqlalchemy import make_url

from specs.base import Spec, violations_of
from specs.errors import InvalidInput
from specs.units import MIB

ENVIRONMENT_PREFIX = "MESHWRIGHT_"
LOCAL_CLUSTER_ID = "local"


class Settings(Spec):
    """What an operator may set."""

    database_url: str = Field(
        default="", description="SQLAlchemy URL: sqlite:///file or postgresql://...; empty = a file of this user"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=0, le=65535)
    token: str | None = Field(default=None, description="bearer token that every request must carry; required off loopback")
    local_devices: int = Field(
        default=0,
        ge=0,
        le=64,
        description="register this machine as the cluster 'local' of so many worker processes; 0 = executions off",
    )
    max_body_bytes: int = Field(default=int(32 * MIB), ge=1024, description="largest request body")
    plan_workers: int = Field(default=1, ge=1, description="plan jobs that run at once")
    max_queued_jobs: int = Field(default=1000, ge=1, description="jobs of one kind that may wait; more are refused with 429")
    max_waiting_captures: int = Field(default=16, ge=1, description="requests that may wait for a capture; more get 503")
    max_depth: int = Field(default=64, ge=8, description="deepest nesting of a posted document")
    max_graph_ops: int = Field(default=50_000, ge=1, description="ops of a posted graph, blocks counted once")
    max_units: int = Field(default=10_000, ge=1, description="units of a posted graph or layers of a posted config")
    token_hashes: tuple[str, ...] = Field(
        default=(), description="'scopes:hash' of more tokens, as 'meshwright token' prints them; in the environment separated by ;"
    )
    max_attempts: int = Field(default=3, ge=1, description="starts of one job, crashes of the service included")
    max_time_limit_s: float = Field(default=3600.0, gt=0, description="longest search a client may ask for")
    execution_time_limit_s: float = Field(default=1800.0, gt=0, description="longest execution or profiling job")
    executor_id: str = Field(default="local", description="one name per service process on a shared PostgreSQL")

    @property
    def url(self) -> str:
        """The database URL in SQLAlchemy's form, the default filled in."""
        if not self.database_url:
            return f"sqlite:///{default_data_dir() / 'service.sqlite'}"
        scheme, separator, rest = self.database_url.partition("://")
        if scheme in ("postgres", "postgresql"):
            return f"postgresql+psycopg{separator}{rest}"
        return self.database_url

    @property
    def shown_url(self) -> str:
        """:attr:`url` without its password."""
        return make_url(self.url).render_as_string(hide_password=True)

    @property
    def has_tokens(self) -> bool:
        """Whether requests must carry a token."""
        return bool(self.token or self.token_hashes)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach ``host``."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check_exposed(self) -> None:
        """Raise :class:`InvalidInput` when others could reach the service without a token."""
        if not self.is_loopback and not self.has_tokens:
            raise InvalidInput.single(
                "token_required",
                f"listening on {self.host} lets other machines in, and no token is set",
                loc=("host",),
                actual=self.host,
                allowed="127.0.0.1, ::1 or localhost; any host with --token",
                nearest="127.0.0.1",
                subject="settings",
            )


def default_data_dir() -> Path:
    """Where this user's service keeps its database (XDG state directory)."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "meshwright"


def load_settings(**given: Any) -> Settings:
    """Defaults < environment < ``given`` (values that are None do not count)."""
    values: dict[str, Any] = {}
    for name in Settings.model_fields:
        text = os.environ.get(ENVIRONMENT_PREFIX + name.upper())
        if text is not None:
            values[name] = tuple(filter(None, text.split(";"))) if name == "token_hashes" else text
    values.update({name: value for name, value in given.items() if value is not None})
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(violations_of(error, Settings), subject="settings") from None
