"""Model factories whose rank 1 goes wrong in a chosen step: for tests of what the launcher makes of it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch import nn

from profiler.hf import adapt
from profiler.models import build_model
from specs.graph import ModelGraph
from tests.executor_models import LLAMA, graph_of

FAULTY_RANK = 1
FAULTY_STEP = 2


def graph_with(fault: str) -> ModelGraph:
    """The small llama, built in the workers by the factory ``fault`` of this file."""
    return graph_of("llama").replace(attributes={"factory": f"tests.executor_faults:{fault}"})


def raising() -> nn.Module:
    return _with_fault(_raise)


def dying() -> nn.Module:
    return _with_fault(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hanging() -> nn.Module:
    return _with_fault(lambda: time.sleep(600))


def slow() -> nn.Module:
    """Every step takes a while, so that there is time to interfere."""
    model = build_model(adapt(LLAMA))
    model.embed.register_forward_pre_hook(lambda *_: time.sleep(0.3))
    return model


def _raise() -> None:
    raise ValueError("the gradient of the second moment has left the building")


def _with_fault(fault: Any) -> nn.Module:
    model = build_model(adapt(LLAMA))
    calls = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if os.environ.get("RANK") == str(FAULTY_RANK) and calls > FAULTY_STEP:
            fault()

    model.embed.register_forward_pre_hook(hook)
    return model
