"""Position of a resumed cell in its loops.

A checkpoint is made before a step. Besides the state of the step, it contains the variables of the
loop at the begin of this pass (`loop_variables.py`), and for each loop around it, such as the loop
over epochs, the number of its pass and the variables at the begin of that pass.

A resumed run repeats the passes before this position without steps: it reads the data again, and
leaves out the rest of each pass, because metrics, prints and decisions would use a state of the
past. It restores the variables at the begin of the saved pass of each loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.errors import StepError
from nbdist.worker.checkpoint.folder import Checkpoint, steps_in
from nbdist.worker.lifting.loop_variables import LoopVariables, Values, can_save
from nbdist.worker.runtime.shell import engine_shell, place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from nbdist.records import Saving
    from nbdist.worker.runtime.context import Worker


class OuterPass(msgspec.Struct):
    """Pass of a loop around a training loop.

    Attributes:
        loop: name of the loop: its function and its target. Other lines of a cell may change.
        number: number of its pass, from 1. All passes of the cell through this loop count.
        values: variables at its begin.
    """

    loop: str
    number: int
    values: Values


class LoopPosition(msgspec.Struct):
    """Position before a step of a training loop.

    Attributes:
        entries: number of times that the cell has begun the loop, from 1.
        repeats: number of these times in this pass of the loop around it, from 1.
        passes: number of completed passes since then.
        values: variables at the begin of the pass.
        outer: passes of the loops around it, outermost first.
    """

    entries: int
    repeats: int
    passes: int
    values: Values
    outer: tuple[OuterPass, ...]


class PassSkipped(BaseException):
    """The rest of a pass is left out, because the checkpoint contains it."""


class Passes:
    """Passes of one run of a cell through the loops that lead to its first training.

    Args:
        namespace: the global names of the cell.
        goal: position of the checkpoint from which the run resumes; None if it begins.
        warn: shows a warning.

    Attributes:
        goal: the same position until the run has reached it, then None.
        begun: number of passes of loops around training loops that the cell has begun.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        goal: LoopPosition | None,
        warn: Callable[[str], None],
    ) -> None:
        self.goal = goal
        self.begun = 0
        self._warn = warn
        self._variables = LoopVariables(namespace)
        self._counts: dict[str, int] = {}
        self._outer: list[OuterPass] = []

    def begin(self, loop: str, frame: FrameType) -> dict[str, Any]:
        """Begin a pass of a loop around a training loop.

        Returns:
            Local names that its function must assign.
        """
        self.begun += 1
        self._variables.begin(frame)
        number = self._counts[loop] = self._counts.get(loop, 0) + 1
        local: dict[str, Any] = {}
        depth = len(self._outer)
        if self.goal is not None and depth < len(self.goal.outer):
            saved = self.goal.outer[depth]
            if (saved.loop, saved.number) == (loop, number) and self._has_matched():
                local = self._variables.restore(saved.values, frame)
        values = self._variables.values(frame)
        self._outer.append(OuterPass(loop, number, values))
        return local

    def _has_matched(self) -> bool:
        """Return True if the passes around are those of the saved position."""
        assert self.goal is not None
        pairs = zip(self._outer, self.goal.outer, strict=False)
        return all((a.loop, a.number) == (b.loop, b.number) for a, b in pairs)

    @property
    def depth(self) -> int:
        """Number of passes that contain the present position."""
        return len(self._outer)

    def end(self, depth: int, frame: FrameType, line: int, error: BaseException | None) -> bool:
        """End the pass that began at this depth.

        Args:
            depth: value of `depth` before its begin.
            frame: the function or cell that contains the loop.
            line: line of the loop.
            error: error that ends it; None if none does.

        Returns:
            True if the loop continues after the error, because the checkpoint contains the pass.
        """
        ended = self._outer[depth]
        is_before = self.goal is not None and not self._has_matched()
        del self._outer[depth:]
        if is_before and isinstance(error, Exception):
            loop_line = place(frame, line)
            self._warn(
                f"{loop_line}: pass {ended.number}, which the checkpoint contains, failed without "
                f"its steps ({type(error).__name__}: {error}). If the order of the batches depends "
                "on it, the numbers differ from those of a run without a failure"
            )
            return True
        return isinstance(error, PassSkipped)

    def leave(self) -> None:
        """Leave out the rest of the pass if a resumed run has not reached its position.

        Raises:
            PassSkipped: see above.
        """
        if self.goal is not None and self._outer:
            raise PassSkipped

    def skips(self, repeats: int, passes: int) -> bool:
        """Return True if the saved position is behind this pass of the training loop."""
        goal = self.goal
        if goal is None:
            return False
        is_around = len(self._outer) == len(goal.outer) and self._has_matched()
        return not is_around or (repeats, passes) < (goal.repeats, goal.passes)

    def reach(self, frame: FrameType) -> dict[str, Any]:
        """Restore the variables at the saved position, and return local names to assign."""
        self._variables.begin(frame)
        goal, self.goal = self.goal, None
        return {} if goal is None else self._variables.restore(goal.values, frame)

    def position(
        self,
        entries: int,
        repeats: int,
        passes: int,
        frame: FrameType,
        left_out: frozenset[str],
    ) -> LoopPosition:
        """Return the position at the begin of a pass of the training loop."""
        values = self._variables.values(frame, left_out)
        return LoopPosition(entries, repeats, passes, values, tuple(self._outer))


class LoopPasses:
    """Passes through one training loop.

    Args:
        passes: the passes of the cell; None if checkpoints do not contain this loop.
        own_names: names whose values belong to the step, or that the loop binds in each pass.
        kept: names that statements outside of the step read and assign for the next pass.

    Attributes:
        entries: number of times that the cell has begun the loop.
        restored: local names that the function must assign in this pass.
        lacking: names in `kept` whose values checkpoints do not contain.
    """

    def __init__(
        self, passes: Passes | None, own_names: frozenset[str], kept: Sequence[str]
    ) -> None:
        self.entries = 0
        self.restored: dict[str, Any] = {}
        self.lacking: tuple[str, ...] = ()
        self._passes = passes
        self._own_names = own_names
        self._kept = kept
        self._around = self._repeats = 0
        self._begun = 0
        self._position: LoopPosition | None = None

    @property
    def are_saved(self) -> bool:
        """True if checkpoints contain this loop."""
        return self._passes is not None

    def enter(self) -> None:
        """Begin the loop."""
        around = 0 if self._passes is None else self._passes.begun
        self._repeats = self._repeats + 1 if around == self._around else 1
        self._around = around
        self.entries += 1
        self._begun = 0

    def skips(self, frame: FrameType) -> bool:
        """Begin a pass in the function or cell of a frame. Return True if a resumed run skips it.

        A run that has reached its saved position restores the variables.
        """
        assert self._passes is not None
        before, self._begun = self._begun, self._begun + 1
        if self._passes.skips(self._repeats, before):
            return True
        if self._passes.goal is not None:
            self.entries = self._passes.goal.entries
        self.restored = self._passes.reach(frame)
        return False

    def note_position(self, frame: FrameType) -> None:
        """Keep the position at the begin of this pass for the next checkpoint."""
        assert self._passes is not None
        known = {**frame.f_globals, **frame.f_locals} if self._kept else {}
        self.lacking = tuple(n for n in self._kept if n in known and not can_save(known[n]))
        self._position = self._passes.position(
            self.entries, self._repeats, self._begun - 1, frame, self._own_names
        )

    def packed_position(self) -> bytes:
        """Return the position, encoded; empty if checkpoints do not contain this loop."""
        return b"" if self._position is None else msgspec.msgpack.encode(self._position)

    def leave(self) -> None:
        """Leave out the rest of the pass around; see `Passes.leave`."""
        if self._passes is not None:
            self._passes.leave()


class OuterLoop:
    """Pass of a loop around a training loop, as a context manager in the rewritten loop.

    Args:
        passes: the passes of the cell; None if it saves no checkpoints.
        loop: see `OuterPass`.
        frame: the function or cell that contains the loop.

    Attributes:
        restored: local names that the function must assign.
    """

    def __init__(self, passes: Passes | None, loop: str, frame: FrameType) -> None:
        self.restored: dict[str, Any] = {}
        self._passes = passes
        self._loop = loop
        self._frame = frame
        self._line = frame.f_lineno
        self._depth = 0

    def __enter__(self) -> OuterLoop:
        if self._passes is not None:
            self._depth = self._passes.depth
            self.restored = self._passes.begin(self._loop, self._frame)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> bool:
        if self._passes is None:
            return False
        return self._passes.end(self._depth, self._frame, self._line, error)

    def leave(self) -> None:
        """Leave out the rest of the pass around, as after a training loop."""
        if self._passes is not None:
            self._passes.leave()


def of_cell(worker: Worker) -> Passes | None:
    """Return the passes of the running cell; None if it saves no checkpoints."""
    state, saving = worker.cell_state, worker.request.saving
    if saving is None:
        return None
    if state.passes is None:
        state.passes = Passes(
            engine_shell().user_ns,
            _newest(saving, worker.rank),
            lambda text: worker.reporter.note_once("checkpoint", text, warning=True),
        )
    passes: Passes = state.passes
    return passes


def check_reached(worker: Worker) -> None:
    """Check at the end of a cell that a resumed run has reached the position of its checkpoint.

    Raises:
        StepError: the loops of the cell have ended before.
    """
    passes: Passes | None = worker.cell_state.passes
    if passes is not None and passes.goal is not None and worker.request.saving is not None:
        raise StepError(
            f"the cell trained nothing: its loops end before the position of the checkpoint in "
            f"{worker.request.saving.folder}. Use at least as many epochs, or another folder"
        )


def _newest(saving: Saving, rank: int) -> LoopPosition | None:
    """Return the position in the newest checkpoint if the run resumes."""
    folder = Path(saving.folder)
    for step in steps_in(folder)[-1:] if saving.resume else ():
        checkpoint = Checkpoint(folder, step)
        ranks = checkpoint.manifest().world_size
        packed = checkpoint.own(min(rank, ranks - 1))["loop"]
        return msgspec.msgpack.decode(packed, type=LoopPosition) if packed else None
    return None
