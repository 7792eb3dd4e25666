"""Double of the module `time`, which advances only when a test advances it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import pytest


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def replace_time(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Clock:
    """Give modules one clock in place of `time`, and return it."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
