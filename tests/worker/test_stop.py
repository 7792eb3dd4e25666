"""How long an interrupt of steps is put off, on this process's own signals."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import SOON, Stopping
from nbdist.worker import interrupts
from nbdist.worker.stop import StopPoint

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 0.3


class Rank:
    """What a stop point takes of a worker."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def said(self) -> dict[str, int]:
        return {"rank": 0, "cell": 1}

    def say(self, record: Any, *, urgent: bool) -> None:
        assert urgent
        self.words.append(record)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[interrupts.Interrupts]:
    monkeypatch.setattr(interrupts, "PATIENCE_S", PATIENCE_S)
    before = signal.getsignal(signal.SIGINT)
    made = interrupts.Interrupts()
    made.install()
    yield made
    signal.signal(signal.SIGINT, before)


def test_patience_begins_again_when_a_rank_has_said_how_far_it_goes(
    installed: interrupts.Interrupts,
) -> None:
    rank = Rank()
    stop = StopPoint(rank, installed, lambda _seconds: SOON)  # type: ignore[arg-type]
    with installed.admitted(), installed.put_off():
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1 * PATIENCE_S)  # the step that it met
        assert not stop.is_before(1)
        assert [type(word) for word in rank.words] == [Stopping]
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1 * PATIENCE_S)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_from_before_the_rank_began_is_noted(
    installed: interrupts.Interrupts,
) -> None:
    rank = Rank()
    answers = [SOON, 2]
    stop = StopPoint(rank, installed, lambda _seconds: answers.pop(0))  # type: ignore[arg-type]
    with installed.admitted(), installed.put_off(noted=True):
        assert not stop.is_before(1)
        assert not stop.is_before(2)
        assert stop.is_before(3)
