"""What a program on fake tensors would hold: every storage that an op makes is counted until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Allocations(TorchDispatchMode):
    """A fake tensor mode that knows the bytes held now, and at the fullest moment since :meth:`reset_peak`. May be entered again.

    ``moment`` is asked for a name whenever there is a new peak. Storages on ``meta`` hold nothing. What an op's kernel needs while
    it runs is not seen.
    """

    def __init__(self, moment: Callable[[], str] = str) -> None:
        super().__init__()
        self.held_bytes = self.peak_bytes = 0
        self.peak_moment = ""
        self._moment = moment
        self._sizes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._resize = torch.UntypedStorage.resize_
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def reset_peak(self) -> None:
        """Begin a new peak at what is held now."""
        self.peak_bytes, self.peak_moment = self.held_bytes, ""

    def __enter__(self) -> Allocations:
        self._fake_mode.__enter__()
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            tracker._resize(storage, size)
            if storage in tracker._sizes:
                tracker._change(tracker._sizes[storage], storage.nbytes())

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._fake_mode.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its local ops come here one by one
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:  # DTensor derives shapes under a mode of its own
            for item in tree_leaves(result):
                if isinstance(item, Tensor) and item.device.type != "meta":
                    self._see(item.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._sizes:
            return
        size = [0]
        self._sizes[storage] = size
        weakref.finalize(storage, partial(self._change, size, 0))
        self._change(size, storage.nbytes())

    def _change(self, size: list[int], num_bytes: int) -> None:
        """A storage's size is now ``num_bytes``."""
        self.held_bytes += num_bytes - size[0]
        size[0] = num_bytes
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_moment = self.held_bytes, self._moment()
