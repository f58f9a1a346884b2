"""The cache of the service."""

from __future__ import annotations

import pytest

from api.cache import Cache


def test_values_are_made_once_and_the_oldest_goes() -> None:
    cache: Cache[int] = Cache(2)
    made: list[str] = []

    def make(key: str) -> int:
        made.append(key)
        return len(made)

    assert cache.get("a", lambda: make("a")) == 1
    assert cache.get("b", lambda: make("b")) == 2
    assert cache.get("a", lambda: make("a")) == 1
    cache.get("c", lambda: make("c"))  # "b" was used least recently
    assert cache.get("a", lambda: make("a")) == 1
    assert cache.get("b", lambda: make("b")) == 4


def test_failures_are_not_kept() -> None:
    cache: Cache[int] = Cache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)
    assert cache.get("a", lambda: 5) == 5
