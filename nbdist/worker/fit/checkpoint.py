"""Checkpoints of `fit`: saving during training, and resuming in the middle of an epoch.

If a cell runs again to resume, it skips each finished `fit` and the finished batches of the
unfinished one. Keras reads these batches in the same order, but does not train on them. Keras's own
`BackupAndRestore` resumes only at an epoch, from a file that each rank would write.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.checkpoint.saver import Unsaved, checkpoints
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from nbdist.records import Saving
    from nbdist.worker.checkpoint.saver import Checkpoints, State
    from nbdist.worker.runtime.context import Worker

_enumerate_upstream = EpochIterator._enumerate_iterator
_passing: list[FitSaver] = []
"""The fit whose next pass through the data begins at its checkpoint."""


def apply() -> None:
    """Patch Keras so that a pass through data can begin in the middle."""
    EpochIterator._enumerate_iterator = _enumerate_from


def _enumerate_from(self: Any) -> Iterator[Any]:
    if not _passing:
        yield from _enumerate_upstream(self)
        return
    saver = _passing.pop()
    for _ in range(saver.at.epoch):
        for _, _, data in _enumerate_upstream(self):
            if not saver.pass_over(data, self.steps_per_execution):
                break
    for first, last, data in _enumerate_upstream(self):
        if first < saver.at.batches:
            saver.pass_over(data, self.steps_per_execution)
            continue
        saver.restore()
        yield first, last, data
    saver.restore()


class CellCheckpoints:
    """Checkpoints of all fits of a cell; the first fit creates them.

    Args:
        worker: this rank.
        saving: folder and interval; None if the fits save nothing.

    Attributes:
        fits: number of fits that have begun.
        checkpoints: checkpoints of the run; `Unsaved` if the fits save nothing.
        position: position from which the run resumes; None if it begins.
        stops: True if all ranks have agreed to end the cell at the same step.
    """

    def __init__(self, worker: Worker, saving: Saving | None) -> None:
        self.fits = 0
        self.stops = False
        self.checkpoints: Checkpoints = Unsaved()
        self.position: Position | None = None
        if saving is None:
            return
        self.checkpoints = checkpoints(
            saving,
            worker.reporter,
            ranks=worker.world_size,
            batch=0,
            common=True,
            gather=gather_of(worker),
        )
        worker.ending.push(self._end)
        self.position = self.checkpoints.begin()

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        self.checkpoints.close(failed=kind is not None and not self.stops)


class FitSaver:
    """Saves and restores one `fit`.

    Args:
        worker: this rank.
        model: model in training.
        epochs: requested number of epochs.

    Attributes:
        at: position of the fit; its `epoch` counts from 0, as in Keras.
        is_over: True if an earlier run of the cell finished this fit, or if nbdist only repeats
            the cell for its names.
    """

    def __init__(self, worker: Worker, model: Any, epochs: int) -> None:
        self._worker = worker
        self._model = model
        self._epochs = epochs
        state, progress = worker.cell_state, worker.progress
        self._saving = _saving_of(worker)
        fits = state.fits
        if not isinstance(fits, CellCheckpoints):
            state.fits = fits = CellCheckpoints(worker, self._saving)
        self._cell = fits
        self._cell.fits += 1
        self._restored = True
        self._order = state.order
        progress.passed_rows = 0
        self.at = Position(
            step=progress.batches,
            epoch=0,
            batches=0,
            fit=self._cell.fits,
            earlier=progress.epochs,
        )
        before = self._cell.position
        is_past = before is not None and before.fit > self._cell.fits
        self.is_over = state.request.replays or is_past
        if self.is_over:
            model._initial_epoch = epochs
        elif before is not None and before.fit == self._cell.fits:
            self._resume_at(before)
        else:
            self._open()

    def _resume_at(self, position: Position) -> None:
        self.at = position
        self._restored = False
        self._model._initial_epoch = position.epoch
        progress = self._worker.progress
        progress.epochs = position.earlier + position.epoch
        progress.batches = progress.step = position.step
        self._order.seed = position.order
        _passing.append(self)

    def _open(self) -> None:
        if self._saving is not None:
            self._cell.checkpoints.open(state_of(self._worker, self._model))

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch; return the number of its batches that are skipped."""
        self._model._initial_epoch = None  # Keras would reuse it for the next fit
        passed = self.at.batches if not self._restored else 0
        self._epoch = epoch
        return passed

    def pass_over(self, data: Iterator[Any], batches: int) -> bool:
        """Skip `batches` batches; return False if the data end before."""
        passed = list(itertools.islice(data, batches))
        progress = self._worker.progress
        progress.tested += len(passed)  # so that the rank does not seem hung
        if passed and keras.backend.backend() == "jax":
            rows = (leaf.shape[0] for leaf in keras.tree.flatten(passed[0]) if leaf.ndim)
            progress.passed_rows = max(progress.passed_rows, *rows)
        return len(passed) == batches

    def restore(self) -> None:
        """Restore the values of the checkpoint, once."""
        if not self._restored:
            self._restored = True
            self._open()
            if not self.at.batches:
                self._model.reset_metrics()  # they may contain values of the last validation

    def due(self, step: int) -> bool:
        """Return True if to save the state after batch `step` of the cell."""
        return self._saving is not None and self._cell.checkpoints.due(step)

    def save(self, step: int, batches: int) -> None:
        """Save the state after `step`, the last of `batches` batches of the epoch."""
        self._save(step, self._epoch, batches)

    def stop(self, step: int, batches: int) -> None:
        """Save the state like `save`, at the step where all ranks have agreed to stop."""
        self._cell.stops = True
        self.save(step, batches)

    def end(self, step: int) -> None:
        """End the fit, and save its state."""
        self._model._initial_epoch = None
        if _passing and _passing[-1] is self:
            _passing.pop()
        if not self.is_over:
            self.restore()
            self._save(step, self._epochs, 0)

    def _save(self, step: int, epoch: int, batches: int) -> None:
        if self._saving is None:
            return
        if keras.backend.backend() == "jax":
            self._model.jax_state_sync()
        self._cell.checkpoints.save(
            Position(
                step=step,
                epoch=epoch,
                batches=batches,
                fit=self.at.fit,
                earlier=self.at.earlier,
                order=self._order.seed,
            )
        )


def _saving_of(worker: Worker) -> Saving | None:
    """Return where to save a fit. After a training loop of the cell, nbdist saves no fits."""
    saving = worker.request.saving
    if saving is None or not worker.cell_state.loops:
        return saving
    text = (
        "checkpoints contain only the first training of the cell: a resumed run repeats the whole "
        "`fit` after its loop"
    )
    worker.reporter.note_once("checkpoint", text)
    return None


def gather_of(worker: Worker) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that gathers int32 numbers, shape `(n,)` to `(ranks, n)`."""
    if keras.backend.backend() == "jax":
        from nbdist.worker.jax.runtime import processes

        return processes.gather
    from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

    return gather_over(worker.strategies["mirrored"])


def state_of(worker: Worker, model: Any) -> State:
    """Return the state of a `fit`, and of all other objects behind the cell's names.

    If nothing is saved, TensorFlow's state contains only the model: to describe other models, it
    would have to build their optimizers.
    """
    namespace = engine_shell().user_ns
    if keras.backend.backend() == "jax":
        from nbdist.worker.jax.keras import checkpoint as keras_checkpoint

        return keras_checkpoint.of_fit(model, worker.cell_state.names.bound(), namespace)
    from nbdist.worker.tensorflow import checkpoint as tensorflow_checkpoint

    names = worker.cell_state.names.bound() if worker.request.saving is not None else ()
    return tensorflow_checkpoint.of_fit(model, names, namespace)
