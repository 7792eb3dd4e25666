"""Silence and hangs of ranks, from the times of their messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.heartbeats import FIRST_STEP_HANGS_S, HANG_S, HANG_STEPS, SILENT_S, Vitals
from nbdist.records import Beat, Output, Where

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances the clock by seconds."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def let(seconds: float) -> None:
        nonlocal now
        now += seconds

    return let


def beat(rank: int, step: int, tested: int = 0) -> Beat:
    return Beat(rank=rank, cell=1, step=step, tested=tested)


def stepping(passes: Callable[[float], None], step_s: float, **options: float) -> Vitals:
    """Return the state of two ranks that have completed ten steps."""
    vitals = Vitals([0, 1], **options)
    vitals.begin_steps()
    for step in range(1, 11):
        passes(step_s)
        vitals.hear(beat(0, step))
        vitals.hear(beat(1, step))
    return vitals


def test_a_rank_without_heartbeats_is_silent(passes: Callable[[float], None]) -> None:
    vitals = Vitals([0, 1, 2])
    passes(SILENT_S)
    assert vitals.silent([0, 1, 2]) == []
    vitals.hear(beat(1, 0))
    passes(1.0)
    assert vitals.silent([0, 1, 2]) == [0, 2]
    assert vitals.silent([1, 2]) == [2]


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.1, HANG_S), (20.0, HANG_STEPS * 20.0)])
def test_steps_without_progress_are_a_hang(
    passes: Callable[[float], None], step_s: float, patience_s: float
) -> None:
    vitals = stepping(passes, step_s)
    passes(patience_s)
    assert not vitals.still_s()
    passes(1.0)
    assert vitals.still_s() == pytest.approx(patience_s + 1)
    assert (vitals.step(0), vitals.step(1)) == (10, 10)


def test_the_time_until_a_hang_can_be_set(passes: Callable[[float], None]) -> None:
    vitals = stepping(passes, 1.0, hang_after_s=2.0)
    passes(2.5)
    assert vitals.still_s() == pytest.approx(2.5)


def test_a_first_step_may_take_minutes(passes: Callable[[float], None]) -> None:
    vitals = Vitals([0])
    vitals.begin_steps()
    passes(FIRST_STEP_HANGS_S)
    assert not vitals.still_s()
    passes(1.0)
    assert vitals.still_s()


def test_a_cell_without_steps_never_hangs(passes: Callable[[float], None]) -> None:
    vitals = Vitals([0], hang_after_s=1.0)
    passes(1e6)
    assert not vitals.still_s()


def test_each_message_except_heartbeats_is_progress(
    passes: Callable[[float], None],
) -> None:
    vitals = stepping(passes, 0.1)
    for message in (beat(0, 10, tested=1), Output(rank=0, cell=1, stream="stdout", text="x")):
        passes(HANG_S)
        vitals.hear(message)
    passes(HANG_S)
    assert not vitals.still_s()
    query = Where(rank=0, cell=1, step=10, place="", waits=True, cpu_s=1.0, stack="")
    for message in (beat(0, 10, tested=1), query):
        vitals.hear(message)
    passes(1.0)
    assert vitals.still_s()
    vitals.look_again()
    assert not vitals.still_s()
