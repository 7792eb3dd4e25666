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


class StopError(Exception):
    """End of the first run, right after its position was noted."""


class Training:
    """Run of a cell: loops over folds, epochs and batches around a counter in place of a step.

    Args:
        goal: encoded position from which it resumes; empty if it begins.
    """

    def __init__(self, goal: bytes = b"") -> None:
        saved = msgspec.msgpack.decode(goal, type=LoopPosition) if goal else None
        self.warnings: list[str] = []
        self.passes = Passes({}, saved, self.warnings.append)
        self.loop = LoopPasses(self.passes, frozenset({"batch"}), ())
        self.steps: list[tuple[int, int, int]] = []
        self.shown: list[str] = []

    def outer(self, place: str) -> OuterLoop:
        return OuterLoop(self.passes, place, sys._getframe(1))

    def run(self, *, last: int = -1) -> Any:
        """Train. `last` is the number of steps after which it stops."""
        history, best, rng = [], None, np.random.default_rng(0)
        for fold in range(2):
            with self.outer("line 1") as outer:
                if "best" in outer.restored:
                    best = outer.restored["best"]
                for epoch in range(3):
                    with self.outer("line 2") as inner:
                        if "best" in inner.restored:
                            best = inner.restored["best"]
                        total = self._epoch(fold, epoch, rng, last)
                        best = total if best is None else max(best, total)
                        history.append(total)
                        self.shown.append(f"{fold}.{epoch}")
                self.outer("line 2").leave()
                self.shown.append(f"fold {fold}")
        self.outer("line 1").leave()
        return history, best, rng.random()

    def _epoch(self, fold: int, epoch: int, rng: np.random.Generator, last: int) -> float:
        total = 0.0
        self.loop.enter()
        for batch in range(4):
            frame = sys._getframe()
            if self.loop.skips(frame):
                continue
            if "total" in self.loop.restored:
                total = self.loop.restored["total"]
            self.loop.note_position(frame)
            if len(self.steps) == last:
                raise StopError
            self.steps.append((fold, epoch, batch))
            total += rng.random()
        self.loop.leave()
        return total


@pytest.mark.parametrize("last", [0, 1, 4, 6, 11, 12, 19, 23])
def test_resumed_run_ends_as_a_run_without_a_stop(last: int) -> None:
    whole = Training()
    expected = whole.run()
    stopped = Training()
    with pytest.raises(StopError):
        stopped.run(last=last)
    resumed = Training(stopped.loop.packed_position())
    assert resumed.run() == expected
    assert resumed.steps == whole.steps[last:]
    assert stopped.shown + resumed.shown == whole.shown, "no pass ends twice"
    assert resumed.passes.goal is None


def test_loop_without_checkpoints_keeps_no_position() -> None:
    loop = LoopPasses(None, frozenset(), ("total",))
    assert not loop.are_saved
    assert loop.packed_position() == b""
    loop.leave()
    with OuterLoop(None, "line 1", sys._getframe()) as outer:
        outer.leave()
        assert outer.restored == {}


def test_values_that_cannot_be_saved_are_named() -> None:
    models, rate = [object()], 0.1
    loop = LoopPasses(Passes({}, None, [].append), frozenset(), ("models", "rate", "missing"))
    loop.enter()
    assert not loop.skips(sys._getframe())
    loop.note_position(sys._getframe())
    assert loop.lacking == ("models",)
    assert (len(models), rate) == (1, 0.1)


def test_position_behind_the_end_is_not_reached() -> None:
    stopped = Training()
    with pytest.raises(StopError):
        stopped.run(last=19)
    position = msgspec.msgpack.decode(stopped.loop.packed_position(), type=LoopPosition)
    resumed = Training(msgspec.msgpack.encode(msgspec.structs.replace(position, repeats=9)))
    resumed.run()
    assert resumed.passes.goal is not None
    assert resumed.steps == []


def test_skipped_pass_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass reads a value that only the rest of a pass assigns."""
    monkeypatch.setattr("nbdist.worker.lifting.passes.place", lambda _frame, line: f"line {line}")
    passes = [Passes({}, None, [].append)]
    loop = LoopPasses(passes[0], frozenset(), ())
    warnings: list[str] = []
    run: list[int] = []

    def train(last: int) -> None:
        history: list[int] = []
        for epoch in range(4):
            with OuterLoop(passes[-1], "line 3", sys._getframe()):
                assert epoch == 0 or history[-1] == epoch - 1
                loop.enter()
                for _ in range(2):
                    if loop.skips(sys._getframe()):
                        continue
                    loop.note_position(sys._getframe())
                    if len(run) == last:
                        raise StopError
                    run.append(epoch)
                loop.leave()
                history.append(epoch)

    with pytest.raises(StopError):
        train(5)
    position = msgspec.msgpack.decode(loop.packed_position(), type=LoopPosition)
    passes.append(Passes({}, position, warnings.append))
    loop = LoopPasses(passes[-1], frozenset(), ())
    train(-1)
    assert run == [0, 0, 1, 1, 2, 2, 3, 3]
    (text,) = warnings
    assert "pass 2, which the checkpoint contains, failed without its steps (IndexError" in text
