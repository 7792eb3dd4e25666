"""A resumed cell skips the passes of its loops that the checkpoint contains.

The loops are written as nbdist rewrites them. `tests/end_to_end/test_resumed_loops.py` runs real
cells on workers.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from nbdist.worker.lifting.passes import LoopPasses, LoopPosition, OuterLoop, Passes


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave TensorFlow's context as it is: tests of replicas configure it at their begin."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


class StopError(Exception):
    """End of the first run, right after its position was noted."""


class Training:
    """Run of a cell: loops over folds, epochs and batches around a counter in place of a step.

    Args:
        goal: encoded position from which it resumes; empty if it begins.
    """

    __slots__ = ("last", "loop", "passes", "shown", "steps", "warnings")  # no variables of the user

    def __init__(self, goal: bytes = b"") -> None:
        saved = msgspec.msgpack.decode(goal, type=LoopPosition) if goal else None
        self.warnings: list[str] = []
        self.passes = Passes({}, saved, self.warnings.append)
        self.loop = LoopPasses(self.passes, frozenset({"batch"}), ())
        self.steps: list[tuple[int, int, int]] = []
        self.shown: list[str] = []
        self.last = -1

    def run(self) -> Any:
        """Train as rewritten code does. It stops after `last` steps."""
        history, best, rng = [], None, np.random.default_rng(0)
        with OuterLoop(self.passes, sys._getframe()) as folds:
            for fold in range(2):
                if folds.is_over(begins=True):
                    break
                with folds.each():
                    best = folds.restored.get("best", best)
                    with OuterLoop(self.passes, sys._getframe()) as epochs:
                        epoch = 0
                        while epoch < 6:
                            if epochs.is_over(begins=True):
                                break
                            with epochs.each():
                                best = epochs.restored.get("best", best)
                                epoch = epochs.restored.get("epoch", epoch)
                                total = self._epoch(fold, epoch, rng)
                                best = total if best is None else max(best, total)
                                history.append(total)
                                self.shown.append(f"{fold}.{epoch}")
                                epoch += 1
                                if epoch == 3 and epochs.may_leave():
                                    break
                            if epochs.is_over(begins=False):
                                break
                        epochs.leave()
                    self.shown.append(f"fold {fold}")
                if folds.is_over(begins=False):
                    break
            folds.leave()
        return history, best, rng.random()

    def _epoch(self, fold: int, epoch: int, rng: np.random.Generator) -> float:
        total, i = 0.0, 0
        self.loop.enter()
        while i < 8:
            frame = sys._getframe()
            if self.loop.begin_pass(frame):
                if self.loop.is_over(begins=True) or self.loop.is_over(begins=False):
                    break
                continue
            total = self.loop.restored.get("total", total)
            i = self.loop.restored.get("i", i)
            self.loop.note_position(frame)
            if len(self.steps) == self.last:
                raise StopError
            self.steps.append((fold, epoch, i))
            total += rng.random()
            i += 2
        else:
            self.loop.exhausted()
        self.loop.exit()
        self.loop.leave()
        return total


@pytest.mark.parametrize("last", [0, 1, 4, 6, 11, 12, 19, 23])
def test_resumed_run_ends_as_a_run_without_a_stop(last: int) -> None:
    """In skipped passes, the counters of the loops over epochs and batches remain 0."""
    whole = Training()
    expected = whole.run()
    stopped = Training()
    stopped.last = last
    with pytest.raises(StopError):
        stopped.run()
    resumed = Training(stopped.loop.packed_position())
    assert resumed.run() == expected
    assert resumed.steps == whole.steps[last:]
    assert stopped.shown + resumed.shown == whole.shown, "no pass ends twice"
    assert resumed.passes.goal is None
    assert resumed.warnings == []


def test_run_can_resume_twice() -> None:
    whole = Training()
    expected = whole.run()
    goal, made = b"", 0
    for last in (9, 8):
        run = Training(goal)
        run.last = last
        with pytest.raises(StopError):
            run.run()
        goal, made = run.loop.packed_position(), made + last
    resumed = Training(goal)
    assert resumed.run() == expected
    assert resumed.steps == whole.steps[made:]


def test_loop_without_checkpoints_keeps_no_position() -> None:
    loop = LoopPasses(None, frozenset(), ("total",))
    assert not loop.are_saved
    assert loop.packed_position() == b""
    loop.leave()
    with OuterLoop(None, sys._getframe()) as outer, outer.each():
        outer.leave()
        assert (outer.restored, outer.may_leave()) == ({}, True)


def test_values_that_cannot_be_saved_are_named() -> None:
    models, rate = [object()], 0.1
    loop = LoopPasses(Passes({}, None, [].append), frozenset(), ("models", "rate", "missing"))
    loop.enter()
    assert not loop.begin_pass(sys._getframe())
    loop.note_position(sys._getframe())
    assert loop.lacking == ("models",)
    assert (len(models), rate) == (1, 0.1)


def test_position_behind_the_end_is_not_reached() -> None:
    stopped = Training()
    stopped.last = 19
    with pytest.raises(StopError):
        stopped.run()
    position = msgspec.msgpack.decode(stopped.loop.packed_position(), type=LoopPosition)
    position.entries[0].passes = 9
    resumed = Training(msgspec.msgpack.encode(position))
    resumed.run()
    assert resumed.passes.goal is not None
    assert resumed.steps == []


def test_skipped_pass_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass reads a value that only the rest of a pass assigns."""
    monkeypatch.setattr("nbdist.worker.lifting.passes.place", lambda _frame, line: f"line {line}")
    log = Training()

    def train(goal: LoopPosition | None, last: int) -> LoopPasses:
        passes = Passes({}, goal, log.warnings.append)
        loop = LoopPasses(passes, frozenset(), ())
        history: list[int] = []
        with OuterLoop(passes, sys._getframe()) as epochs:
            for epoch in range(4):
                with epochs.each():
                    assert epoch == 0 or history[-1] == epoch - 1
                    loop.enter()
                    for _ in range(2):
                        if loop.begin_pass(sys._getframe()):
                            continue
                        loop.note_position(sys._getframe())
                        if len(log.steps) == last:
                            return loop
                        log.steps.append((0, epoch, 0))
                    loop.exhausted()
                    loop.exit()
                    loop.leave()
                    history.append(epoch)
        return loop

    position = msgspec.msgpack.decode(train(None, 5).packed_position(), type=LoopPosition)
    train(position, -1)
    assert [epoch for _, epoch, _ in log.steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    (text,) = log.warnings
    assert "pass 2 failed (IndexError" in text
