"""Trials of the step of a training loop: parts of a batch on all replicas, against the whole batch.

A step may be wrong on parts of a batch only for some batches: a mean over the positions of a mask
differs when a replica's rows have more padding than others. nbdist therefore tries the first batch
with its rare rows first too, batches 2, 3, 5, 9, ..., and batches with a new kind of row. It looks
for new kinds in the first 1,000 batches, and then in every 8th, if kinds matter to the step.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from msgspec import structs

from nbdist.worker.data.batches import RankRows
from nbdist.worker.runtime import context
from nbdist.worker.tensorflow.keras.row_kinds import RowKinds, rare_first
from nbdist.worker.tensorflow.keras.step_trial import repeatable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.records import Difference
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.tensorflow.compiled_step import CompiledStep
    from nbdist.worker.tensorflow.parity import MirroredSubject
    from nbdist.worker.training.parity import Findings

    _Found = tuple[Findings, list[Difference]]
    MakeSubject = Callable[[CompiledStep, Batch], MirroredSubject]

_NEAR = 1e-3
"""Tolerance of the ratio by which nbdist recognizes a sum over the rows of a batch."""

_LINEAR = 2e-5
"""Least difference of assigned values, slots of optimizers, and variables of plain descent.

Smaller ones are rounding. `fit` has the same limit.
"""

_LEAST, _OF_DRAWS = 3e-4, 1e-2
"""Least difference of other variables, and that in steps that draw random numbers."""

_LAST = 1 << 10
"""Number of the last batch that is tried for its number."""

_EXAMINED = 1 << 20
"""Largest number of elements of a batch whose rows are examined."""

_ALL, _EVERY = 1000, 8
"""Number of the first batches whose rows are all examined, and the interval after them."""


_BOLD = re.compile(r"\x1b\[[0-9;]*m")

_REASON = 200
"""Maximum length of a reason in a message."""

OF_THE_STEP = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)
"""Errors of operations that depend on the code of the step alone."""

_known: set[tuple[int, str]] = set()
"""Cells and lines of the loops that need whole batches."""


class LoopTrials:
    """Trials of a step with some of its batches.

    Args:
        make_subject: creates the trial of a compiled step.
        make_step: compiles the step again, for draws that are the same in all trials.
        place: line of the loop in its cell or file.
        replicas: number of replicas.
        gather: gathers int32 numbers from all ranks, which must decide the same.

    Attributes:
        needs_whole: True if every replica must compute whole batches.
        was_known: True if an earlier run of the cell found that.
    """

    def __init__(
        self,
        make_subject: MakeSubject,
        make_step: Callable[[], CompiledStep],
        *,
        place: str,
        replicas: int,
        gather: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._key = context.current().cell_state.source, place
        self.was_known = self.needs_whole = self._key in _known
        self._make_subject = make_subject
        self._make_step = make_step
        self._replicas = replicas
        self._gather = gather
        self._kinds = RowKinds()
        self._depending: dict[CompiledStep, bool] = {}
        self._batches = 0
        self._subjects: dict[int, MirroredSubject] = {}

    def continue_from(self, other: LoopTrials) -> None:
        """Take over which batches have been tried."""
        self.needs_whole = other.needs_whole
        self._kinds = other._kinds
        self._batches = other._batches

    def find_kink(self, step: CompiledStep, batch: Batch) -> bool:
        """Warn, and return True, if parts of a later batch may be wrong. Look at the first batch.

        Args:
            step: the step.
            batch: a batch that is divided over the replicas.
        """
        if self._batches == 0 and self._replicas > 1 and (text := step.kink(batch)):
            self._use_whole(f"because the step {text}")
        return self.needs_whole

    def verify(self, step: CompiledStep, batch: Batch) -> None:
        """Compare the step on parts of a batch with the step on all of it, if a trial is due.

        Args:
            step: the step.
            batch: a batch that is divided over the replicas.
        """
        if self.needs_whole or self._replicas == 1 or not self._is_due(step, batch):
            return
        is_first = self._batches == 1
        if self._fails(step, batch):
            return
        worst, causes = self._wrong(step, batch)
        is_wrong = self._any_rank(worst)
        if not is_wrong and is_first and (ordered := self._rare_first(batch)) is not None:
            if self._fails(step, ordered):
                return
            worst, causes = self._wrong(step, ordered)
            is_wrong = self._any_rank(worst)
        if name := step.unequal(batch):
            self._use_whole(f"because `{name}` depends on the number of rows of a part")
        elif is_wrong:
            if worst is None:  # another rank has found the difference, and warns
                self._use_whole("")
            else:
                self._warn(worst, causes, is_first=is_first)

    def _fails(self, step: CompiledStep, batch: Batch) -> bool:
        """Warn, and return True, if the step raises an error on the part of a rank.

        The error of one rank leaves the others in a collective, so ranks try without collectives.
        """
        failure = ""
        try:
            self._subject(step, batch).try_part(batch)
        except OF_THE_STEP as error:
            failure = reason(error)
        fails = self._any_rank(failure)
        if fails:
            self._use_whole(
                f"because the step fails on a part of a batch: {failure}" * bool(failure)
            )
        return fails

    def _any_rank(self, finds: object) -> bool:
        """Return True on all ranks if one finds something. Trials are collective."""
        return bool(self._gather(np.array([bool(finds)], np.int32)).any())

    def _warn(self, worst: Difference, causes: Sequence[str], *, is_first: bool) -> None:
        self._use_whole(
            "because the step gives other numbers on parts of a batch: "
            f"`{worst.name}` differs by {worst.largest:.2g}",
            causes,
            after=""
            if is_first
            else "Earlier steps may have other numbers than on one device: run the loop again from "
            "new variables to compute whole batches from the first step on.",
        )

    def _use_whole(self, reason: str, causes: Sequence[str] = (), after: str = "") -> None:
        """Compute whole batches from now on, and warn unless `reason` is empty."""
        self.needs_whole = True
        _known.add(self._key)
        if reason:
            text = f"{self._key[1]}: every worker computes whole batches, {reason}."
            after = after or "The numbers are those of one device, without a speed-up."
            context.current().reporter.note(
                "strategy", " ".join([text, after, *causes]), warning=True
            )

    def _is_due(self, step: CompiledStep, batch: Batch) -> bool:
        """Return True if a batch must be tried. Call it for each batch."""
        number, self._batches = self._batches, self._batches + 1
        depends = self._depends_on_kinds(step, batch)
        if not number & (number - 1) and number <= _LAST:
            self._kinds.is_new(self._examined(batch))
            return True
        if (number > _ALL and number % _EVERY) or not depends:
            return False
        return self._kinds.is_new(self._examined(batch))

    @property
    def examines_rows(self) -> bool:
        """True if kinds of rows matter to a step: a rank then looks at all rows of many batches."""
        return any(self._depending.values())

    def _depends_on_kinds(self, step: CompiledStep, batch: Batch) -> bool:
        if step not in self._depending:
            self._depending[step] = step.depends_on_kinds(batch)
        return self._depending[step]

    def _examined(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arrays with rows; none of large batches."""
        arrays = batch.everything()[: batch.divided]
        return arrays if sum(math.prod(a.shape) for a in arrays) <= _EXAMINED else ()

    def _rare_first(self, batch: Batch) -> Batch | None:
        """Return the batch with its rare rows first, all of them on one replica; None if equal."""
        arrays, divided = batch.everything(), batch.divided or 0
        order = rare_first(arrays[:divided])
        if order is None or (order[:-1] < order[1:]).all():
            return None
        ordered = (*(tf.gather(array, order) for array in arrays[:divided]), *arrays[divided:])

        def part(rows: slice) -> tuple[Any, ...]:
            return (*(array[rows] for array in ordered[:divided]), *ordered[divided:])

        worker = context.current()
        rows = RankRows(rank=worker.rank, ranks=worker.world_size, replicas=self._replicas)
        return structs.replace(rows.batch(batch.rows, part), divided=divided)

    def _wrong(self, step: CompiledStep, batch: Batch) -> tuple[Difference | None, Sequence[str]]:
        """Compare the step on parts of a batch with the step on the whole batch.

        Scalars that the step adds up over rows are combined as sums from then on.

        Returns:
            The largest difference, or None. Its likely causes.
        """
        found, failed = self._found(step, batch)
        if self._any_rank(failed and found.ordered):
            found, failed = self._found_with_equal_draws(batch)
        for difference in list(failed):
            is_sum = abs(difference.largest - 1 + 1 / self._replicas) < _NEAR
            if difference.reported and is_sum and found.moved:
                step.add_up(difference.name)
                failed.remove(difference)
        return max(failed, key=lambda d: d.largest, default=None), found.by_ratio

    def _found(self, step: CompiledStep, batch: Batch) -> _Found:
        return self._moved(self._subject(step, batch), batch)

    def _subject(self, step: CompiledStep, batch: Batch) -> MirroredSubject:
        key = id(step)
        if key not in self._subjects:
            step.find_rows(batch)
            self._subjects[key] = self._make_subject(step, batch)
        return self._subjects[key]

    def _found_with_equal_draws(self, batch: Batch) -> _Found:
        """Compare steps that draw the same random numbers in each trial."""
        step = self._make_step()
        with repeatable():
            step.find_rows(batch)
        with repeatable():
            subject = self._make_subject(_Repeatable(step), batch)  # type: ignore[arg-type]
        return self._moved(subject, batch)

    def _moved(self, subject: MirroredSubject, batch: Batch) -> _Found:
        """Compare; if no variable changes, compare the step that follows.

        The learning rate of the first step may be zero.
        """
        found = subject.compare(batch, self._replicas)
        if not self._any_rank(found.moved):
            with subject.one_step_later():
                found = subject.compare(batch, self._replicas)
        return found, _failed(found, subject)


class _Repeatable:
    """Step whose traces all draw the same random numbers."""

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self.compared = step.compared

    def variables(self, batch: Batch) -> tuple[tf.Variable, ...]:
        with repeatable():
            return self._step.variables(batch)

    def together(self, batch: Batch) -> Any:
        with repeatable():
            return self._step.together(batch)

    def alone(self, values: tuple[Any, ...]) -> Any:
        with repeatable():
            return self._step.alone(values)


def _failed(found: Findings, subject: MirroredSubject) -> list[Difference]:
    """Return the differences that are too large."""
    failed, optimized = [], subject.optimized
    for difference in found.differences:
        is_linear = difference.reported or difference.name in optimized.linear
        least = _LINEAR if is_linear else _OF_DRAWS if found.ordered else _LEAST
        if difference.largest > max(difference.tolerance, least):
            failed.append(difference)
    wrong = {difference.name for difference in failed}
    return [d for d in failed if optimized.amplified.get(d.name, wrong) & wrong]


def reason(error: Exception) -> str:
    """Return the sentence of an error that says what is wrong, without places in libraries."""
    if "merge_call" in str(error):
        return "an update is inside of an `if` on a tensor or a loop over tensors"
    if "Ellipsis" in str(error):  # the value of an unassigned name, see `rewrite.step_source`
        return (
            "an `if` on a tensor or a loop over tensors assigns a name that has no value before: "
            "assign it earlier in the body of the training loop"
        )
    text = str(error).partition("Arguments received by")[0]  # of Keras
    lines = [line for line in map(str.strip, _BOLD.sub("", text).splitlines()) if line]
    lines = [line for line in lines if not line.startswith("[[")]  # node of a graph
    kind, last = type(error).__name__, lines[-1] if lines else ""
    return textwrap.shorten(last if last.startswith(kind) else f"{kind}: {last}", _REASON)
