"""Deferral of interrupts to the end of a step, with real signals of this process."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import SOON, StopAfter, Stopping
from nbdist.worker.runtime import interrupts
from nbdist.worker.runtime.stop_point import StopPoint

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rank:
    """Minimal worker for a stop point."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def record_fields(self) -> dict[str, int]:
        return {"rank": 0, "cell": 1}

    def send(self, record: Any, *, urgent: bool) -> None:
        assert urgent
        self.words.append(record)


@pytest.fixture
def installed_interrupts() -> Iterator[interrupts.Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    handler = interrupts.Interrupts()
    handler.install()
    yield handler
    signal.signal(signal.SIGINT, before)


def test_interrupts_are_deferred_until_forced(installed_interrupts: interrupts.Interrupts) -> None:
    rank = Rank()
    stop = StopPoint(rank, installed_interrupts, lambda _seconds: StopAfter(number=1, step=SOON))  # type: ignore[arg-type]
    with installed_interrupts.admitted(), installed_interrupts.deferred():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            assert not stop.is_before(1)
        assert [type(word) for word in rank.words] == [Stopping]
        installed_interrupts.force_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupt_before_the_start_is_noted(
    installed_interrupts: interrupts.Interrupts,
) -> None:
    rank = Rank()
    answers = [StopAfter(number=1, step=SOON), StopAfter(number=1, step=2)]
    stop = StopPoint(rank, installed_interrupts, lambda _seconds: answers.pop(0))  # type: ignore[arg-type]
    with installed_interrupts.admitted(), installed_interrupts.deferred(is_pending=True):
        assert not stop.is_before(1)
        assert not stop.is_before(2)
        assert stop.is_before(3)
