"""Silence and hangs of ranks, from the times of their messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.heartbeats import FIRST_STEP_HANGS_S, HANG_S, HANG_STEPS, SILENT_S, Heartbeats
from nbdist.records import Beat, Output, RankPosition, SystemSample

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances the clock by seconds."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def advance_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance_by


def beat(rank: int, step: int, tested: int = 0) -> Beat:
    return Beat(rank=rank, cell=1, step=step, tested=tested)


def after_ten_steps(
    advance: Callable[[float], None], step_s: float, **options: float
) -> Heartbeats:
    """Return the state of two ranks that have completed ten steps."""
    vitals = Heartbeats([0, 1], **options)
    vitals.begin_steps()
    for step in range(1, 11):
        advance(step_s)
        vitals.receive(beat(0, step))
        vitals.receive(beat(1, step))
    return vitals


def test_a_rank_without_heartbeats_is_silent(advance: Callable[[float], None]) -> None:
    vitals = Heartbeats([0, 1, 2])
    advance(SILENT_S)
    assert vitals.silent([0, 1, 2]) == []
    vitals.receive(beat(1, 0))
    advance(1.0)
    assert vitals.silent([0, 1, 2]) == [0, 2]
    assert vitals.silent([1, 2]) == [2]


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.1, HANG_S), (20.0, HANG_STEPS * 20.0)])
def test_steps_without_progress_are_a_hang(
    advance: Callable[[float], None], step_s: float, patience_s: float
) -> None:
    vitals = after_ten_steps(advance, step_s)
    advance(patience_s)
    assert not vitals.stalled_s()
    advance(1.0)
    assert vitals.stalled_s() == pytest.approx(patience_s + 1)
    assert (vitals.step(0), vitals.step(1)) == (10, 10)


def test_the_time_until_a_hang_can_be_set(advance: Callable[[float], None]) -> None:
    vitals = after_ten_steps(advance, 1.0, hang_after_s=2.0)
    advance(2.5)
    assert vitals.stalled_s() == pytest.approx(2.5)


def test_a_first_step_may_take_minutes(advance: Callable[[float], None]) -> None:
    vitals = Heartbeats([0])
    vitals.begin_steps()
    advance(FIRST_STEP_HANGS_S)
    assert not vitals.stalled_s()
    advance(1.0)
    assert vitals.stalled_s()


def test_a_cell_without_steps_never_hangs(advance: Callable[[float], None]) -> None:
    vitals = Heartbeats([0], hang_after_s=1.0)
    advance(1e6)
    assert not vitals.stalled_s()


def test_no_step_is_expected_between_trainings(advance: Callable[[float], None]) -> None:
    vitals = after_ten_steps(advance, 0.1)
    for trained in ([1], [0, 1]):
        advance(HANG_S + 1)
        for rank in (0, 1):
            vitals.receive(Beat(rank=rank, cell=1, step=10, tested=0, trained=rank in trained))
        assert bool(vitals.stalled_s()) == (trained == [1])
    vitals.receive(beat(0, 10))
    advance(HANG_S + 1)
    assert vitals.stalled_s()


def test_each_message_except_heartbeats_is_progress(
    advance: Callable[[float], None],
) -> None:
    vitals = after_ten_steps(advance, 0.1)
    for message in (beat(0, 10, tested=1), Output(rank=0, cell=1, stream="stdout", text="x")):
        advance(HANG_S)
        vitals.receive(message)
    advance(HANG_S)
    assert not vitals.stalled_s()
    query = RankPosition(rank=0, cell=1, step=10, place="", waits=True, cpu_s=1.0, stack="")
    sample = SystemSample(rank=0, cell=1, time_s=1.0, values={})
    for message in (beat(0, 10, tested=1), query, sample):
        vitals.receive(message)
    advance(1.0)
    assert vitals.stalled_s()
    vitals.restart_wait()
    assert not vitals.stalled_s()
