"""Position of a resumed cell in its loops.

A checkpoint is made before a step. Besides the state of the step, it contains the variables of the
loop at the begin of this pass (`loop_variables.py`), and for each loop around it, such as the loop
over epochs, the number of its pass and the variables at the begin of that pass.

A resumed run repeats the passes before this position without steps: it reads the data again, and
leaves out the rest of each pass, because metrics, prints and decisions would use a state of the
past. The checkpoint contains the number of passes that each loop had, in the order in which the
loops began. At the saved pass of each loop, the run restores the variables.
"""

from __future__ import annotations

import copy
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

_ACTIVE, _EXHAUSTED, _LEFT = range(3)

_folders: set[str] = set()
"""Folders of the checkpoints of cells that this process has run."""


class Entry(msgspec.Struct, array_like=True):
    """A loop, from its begin to its end.

    Attributes:
        around: number of the entry of the loop around it; -1 without one.
        pass_around: number of that loop's pass, from 1.
        passes: passes that have begun.
        end: its end: it goes on, had no further pass, or was left early as by `break`.
    """

    around: int
    pass_around: int
    passes: int = 0
    end: int = _ACTIVE


class LoopPosition(msgspec.Struct):
    """Position before a step of a training loop.

    Attributes:
        epoch: number of times that the cell has begun the training loop, from 1.
        entries: the loops that the cell has begun, in this order. The passes of those that go on
            contain the position.
        values: variables at the begin of the pass of each loop that goes on, by its number.
    """

    epoch: int
    entries: list[Entry]
    values: dict[int, Values]


class PassSkipped(BaseException):
    """The rest of a pass is left out, because the checkpoint contains it."""


class Passes:
    """Passes of one run of a cell through the loops that lead to its first training.

    Args:
        namespace: the global names of the cell.
        goal: position of the checkpoint from which the run resumes; None if it begins.
        warn: shows a warning.
        again: True if the saved run was in this process.

    Attributes:
        goal: the same position until the run has reached it, then None.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        goal: LoopPosition | None,
        warn: Callable[[str], None],
        *,
        again: bool = False,
    ) -> None:
        self.goal = goal
        self._warn = warn
        self._again = again
        self._variables = LoopVariables(namespace, warn)
        self._entries: list[Entry] = []
        self._around: list[int] = []
        self._starts: dict[int, int] = {}
        self._values: dict[int, Values] = {}

    def enter(self) -> int:
        """Begin a loop, and return its number."""
        around = self._around[-1] if self._around else -1
        self._entries.append(Entry(around, self._entries[around].passes if self._around else 0))
        return len(self._entries) - 1

    def exhausted(self, number: int) -> bool:
        """Note that a loop has no further pass. Return True if a resumed run skips what follows."""
        self._entries[number].end = _EXHAUSTED
        return self.goal is not None

    def exit(self, number: int) -> None:
        """End a loop."""
        entry = self._entries[number]
        entry.end = entry.end or _LEFT
        if self.goal is not None and self._is_known(number):
            self._entries[number] = copy.copy(self.goal.entries[number])
        self._values.pop(number, None)

    def _is_known(self, number: int) -> bool:
        """Return True if the saved run began the loop of this number in the same pass."""
        assert self.goal is not None
        if number >= len(self.goal.entries):
            return False
        saved, now = self.goal.entries[number], self._entries[number]
        return (saved.around, saved.pass_around) == (now.around, now.pass_around)

    def begin(self, number: int, frame: FrameType) -> dict[str, Any]:
        """Begin a pass of a loop around training loops.

        Returns:
            Local names that its function must assign.
        """
        self._around.append(number)
        self._entries[number].passes += 1
        self._starts[number] = len(self._entries)
        self._variables.begin(frame)
        local: dict[str, Any] = {}
        if self.goal is not None and self._is_at(number):
            local = self._variables.restore(self.goal.values[number], frame, again=self._again)
        self._values[number] = self._variables.values(frame)
        return local

    def _is_at(self, number: int) -> bool:
        """Return True if the present pass of a loop contains the saved position."""
        assert self.goal is not None
        if not self._is_known(number):
            return False
        saved, now = self.goal.entries[number], self._entries[number]
        if saved.end != _ACTIVE or saved.passes != now.passes:
            return False
        return now.around < 0 or self._is_at(now.around)

    def end(self, number: int, frame: FrameType, line: int, error: BaseException | None) -> bool:
        """End a pass of a loop around training loops.

        Args:
            number: number of the loop.
            frame: the function or cell that contains the loop.
            line: line of the loop.
            error: error that ends the pass; None if none does.

        Returns:
            True if the loop continues after the error, because the checkpoint contains the pass.
        """
        is_before = self.goal is not None and not self._is_at(number)
        self._around.remove(number)
        if not is_before:
            return isinstance(error, PassSkipped)
        self._take_over(number)
        if isinstance(error, Exception):
            what = f"{place(frame, line)}: pass {self._entries[number].passes}"
            self._warn(
                f"{what} failed ({type(error).__name__}: {error}). The checkpoint contains it, so "
                "nbdist ran it without its steps. If the order of the batches depends on it, the "
                "numbers differ from those of a run without a failure"
            )
            return True
        return isinstance(error, PassSkipped)

    def _take_over(self, number: int) -> None:
        """Note the loops that the saved run began in this pass, whatever path this run took."""
        assert self.goal is not None
        start, saved = self._starts[number], self.goal.entries
        end = start
        while end < len(saved):
            entry = saved[end]
            while entry.around > number:
                entry = saved[entry.around]
            if (entry.around, entry.pass_around) != (number, self._entries[number].passes):
                break
            end += 1
        self._entries[start:] = map(copy.copy, saved[start:end])

    def is_over(self, number: int, *, begins: bool, ahead: int = 0) -> bool:
        """Return True if a resumed run must leave a loop, as the saved run did.

        Args:
            number: number of the loop.
            begins: True at the begin of a pass, False at its end.
            ahead: 1 if this pass is not counted yet.
        """
        if self.goal is None:
            return False
        now = self._entries[number].passes + ahead
        if not self._is_known(number):
            return True
        saved = self.goal.entries[number]
        return now > saved.passes if begins else saved.end == _LEFT and now >= saved.passes

    def may_leave(self, number: int) -> bool:
        """Return True if the cell may leave a loop by `break` in this pass."""
        if self.goal is None:
            return True
        return not self._has_more() and self.is_over(number, begins=False)

    def _has_more(self) -> bool:
        """Return True if the saved run began a further training loop in the present pass."""
        assert self.goal is not None
        number = len(self._entries)
        if number >= len(self.goal.entries):
            return False
        saved = self.goal.entries[number]
        around = self._around[-1] if self._around else -1
        passes = self._entries[around].passes if self._around else 0
        return (saved.around, saved.pass_around) == (around, passes)

    def leave(self) -> None:
        """Leave out the rest of the pass if a resumed run has not reached its position.

        Raises:
            PassSkipped: see above.
        """
        if self.goal is not None and self._around and not self._has_more():
            raise PassSkipped

    def skips(self, number: int) -> bool:
        """Begin a pass of the training loop. Return True if a resumed run skips its step."""
        self._entries[number].passes += 1
        return self.goal is not None and not self._is_at(number)

    def reach(self, number: int, frame: FrameType) -> dict[str, Any]:
        """Restore the variables at the saved position, and return local names to assign."""
        self._variables.begin(frame)
        goal, self.goal = self.goal, None
        return (
            {}
            if goal is None
            else self._variables.restore(goal.values[number], frame, again=self._again)
        )

    def position(
        self, epoch: int, number: int, frame: FrameType, left_out: frozenset[str]
    ) -> LoopPosition:
        """Return the position at the begin of a pass of the training loop."""
        values = {**self._values, number: self._variables.values(frame, left_out)}
        return LoopPosition(epoch, self._entries, values)


class _CountedLoop:
    """A loop whose passes count.

    Args:
        passes: the passes of the cell; None if checkpoints do not contain this loop.
    """

    def __init__(self, passes: Passes | None) -> None:
        self._passes = passes
        self._number = -1

    def exhausted(self) -> bool:
        """Note the end of the loop; see `Passes.exhausted`."""
        return self._passes is not None and self._passes.exhausted(self._number)

    def leave(self) -> None:
        """Leave out the rest of the pass around; see `Passes.leave`."""
        if self._passes is not None:
            self._passes.leave()


class LoopPasses(_CountedLoop):
    """Passes through one training loop.

    Args:
        passes: the passes of the cell; None if checkpoints do not contain this loop.
        own_names: names whose values belong to the step, or that the loop binds in each pass.
        kept: names that statements outside of the step read and assign for the next pass.

    Attributes:
        epoch: number of times that the cell has begun the loop.
        restored: local names that the function must assign in this pass.
        lacking: names in `kept` whose values checkpoints do not contain.
    """

    def __init__(
        self, passes: Passes | None, own_names: frozenset[str], kept: Sequence[str]
    ) -> None:
        super().__init__(passes)
        self.epoch = 0
        self.restored: dict[str, Any] = {}
        self.lacking: tuple[str, ...] = ()
        self._own_names = own_names
        self._kept = kept
        self._packed = b""

    @property
    def are_saved(self) -> bool:
        """True if checkpoints contain this loop."""
        return self._passes is not None

    @property
    def is_behind(self) -> bool:
        """True if a resumed run has not reached its saved position."""
        return self._passes is not None and self._passes.goal is not None

    def enter(self) -> None:
        """Begin the loop."""
        self.epoch += 1
        if self._passes is not None:
            self._number = self._passes.enter()

    def exit(self) -> None:
        """End the loop."""
        if self._passes is not None:
            self._passes.exit(self._number)

    def begin_pass(self, frame: FrameType) -> bool:
        """Begin a pass in the function or cell of a frame.

        A run that has reached its saved position restores the variables.

        Returns:
            True if a resumed run skips the pass.
        """
        assert self._passes is not None
        if self._passes.skips(self._number):
            return True
        if self._passes.goal is not None:
            self.epoch = self._passes.goal.epoch
        self.restored = self._passes.reach(self._number, frame)
        return False

    def note_position(self, frame: FrameType) -> None:
        """Keep the position at the begin of this pass for the next checkpoint."""
        assert self._passes is not None
        known = {**frame.f_globals, **frame.f_locals} if self._kept else {}
        self.lacking = tuple(n for n in self._kept if n in known and not can_save(known[n]))
        position = self._passes.position(self.epoch, self._number, frame, self._own_names)
        self._packed = msgspec.msgpack.encode(position)

    def packed_position(self) -> bytes:
        """Return the position, encoded; empty if checkpoints do not contain this loop."""
        return self._packed

    def is_over(self, *, begins: bool) -> bool:
        """Return True if a resumed run must leave the loop; see `Passes.is_over`."""
        return self._passes is not None and self._passes.is_over(self._number, begins=begins)


class OuterLoop(_CountedLoop):
    """A loop around training loops, as a context manager in the rewritten code.

    Args:
        passes: the passes of the cell; None if it saves no checkpoints.
        frame: the function or cell that contains the loop.

    Attributes:
        restored: local names that the function must assign in this pass.
    """

    def __init__(self, passes: Passes | None, frame: FrameType) -> None:
        super().__init__(passes)
        self.restored: dict[str, Any] = {}
        self._frame: FrameType | None = None if passes is None else frame
        self._line = frame.f_lineno

    def __enter__(self) -> OuterLoop:
        if self._passes is not None:
            self._number = self._passes.enter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._passes is not None:
            self._passes.exit(self._number)
        self._frame = None  # which refers to this object

    def each(self) -> OuterPass:
        """Return the context of one pass."""
        return OuterPass(self)

    def begin(self) -> None:
        """Begin a pass."""
        if self._passes is not None and self._frame is not None:
            self.restored = self._passes.begin(self._number, self._frame)

    def end(self, error: BaseException | None) -> bool:
        """End a pass; see `Passes.end`."""
        if self._passes is None or self._frame is None:
            return False
        return self._passes.end(self._number, self._frame, self._line, error)

    def is_over(self, *, begins: bool) -> bool:
        """Return True if a resumed run must leave the loop; see `Passes.is_over`."""
        if self._passes is None:
            return False
        return self._passes.is_over(self._number, begins=begins, ahead=int(begins))

    def may_leave(self) -> bool:
        """Return True if the cell may leave the loop by `break`; see `Passes.may_leave`."""
        return self._passes is None or self._passes.may_leave(self._number)


class OuterPass:
    """One pass of a loop around training loops, as a context manager.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.begin()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> bool:
        return self._loop.end(error)


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
            again=saving.folder in _folders,
        )
        _folders.add(saving.folder)
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
            f"the cell trained nothing: its loops ended before the position of the checkpoint in "
            f"{worker.request.saving.folder}. They have fewer passes now, or took another path: "
            "use at least as many epochs, or another folder"
        )


def _newest(saving: Saving, rank: int) -> LoopPosition | None:
    """Return the position in the newest checkpoint if the run resumes."""
    folder = Path(saving.folder)
    for step in steps_in(folder)[-1:] if saving.resume else ():
        checkpoint = Checkpoint(folder, step)
        ranks = checkpoint.manifest().world_size
        packed = checkpoint.own(min(rank, ranks - 1)).get("loop", b"")
        return msgspec.msgpack.decode(packed, type=LoopPosition) if packed else None
    return None
