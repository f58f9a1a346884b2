"""What all tests share: a home directory of their own, so that neither the user's files nor other runs matter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from profiler.store import HOME_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Captures are traced anew in every run of the tests, once, also for the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.getbasetemp()
        shared = "PYTEST_XDIST_WORKER" in os.environ  # workers' folders lie in one folder of the run
        folder = base.parent / "home" if shared else base / "home"
        folder.mkdir(exist_ok=True)
        patch.setenv(HOME_VARIABLE, str(folder))
        yield
