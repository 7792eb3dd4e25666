"""What `fit` trains is saved while it does, and goes on in the middle of an epoch.

A cell that is run again to go on passes over each `fit` that was over, and over the batches that
the one under way had had: they are read, in the same order, and not trained on. Keras's own
`BackupAndRestore` goes on at an epoch, from a file that each rank would write.
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

    from nbdist.worker.checkpoint.saver import Checkpoints, State
    from nbdist.worker.runtime.context import Worker

_enumerate_upstream = EpochIterator._enumerate_iterator
_passing: list[FitSaver] = []
"""The one whose next pass through the data begins where it stopped."""


def apply() -> None:
    """Make Keras's passes through data begin where they are told to."""
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
    """Those of all the fits of a cell; made by the first.

    Attributes:
        fits: how many have begun.
        checkpoints: where something is saved.
        position: how far the run is that goes on; None where one begins.
        stops: all ranks have agreed to end the cell where they are.
    """

    def __init__(self, worker: Worker) -> None:
        self.fits = 0
        self.stops = False
        self.checkpoints: Checkpoints = Unsaved()
        self.position: Position | None = None
        if worker.request.saving is None:
            return
        self.checkpoints = checkpoints(
            worker.request.saving,
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
    """Saves one `fit`.

    Args:
        worker: this rank.
        model: that is trained.
        epochs: that it is asked for.

    Attributes:
        at: how far it is; `epoch` counts from 0, as Keras's do.
    """

    def __init__(self, worker: Worker, model: Any, epochs: int) -> None:
        self._worker = worker
        self._model = model
        self._epochs = epochs
        state, progress = worker.cell_state, worker.progress
        fits = state.fits
        self._cell = fits if isinstance(fits, CellCheckpoints) else CellCheckpoints(worker)
        state.fits = self._cell
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
            self._go_on_at(before)
        else:
            self._open()

    def _go_on_at(self, position: Position) -> None:
        self.at = position
        self._restored = False
        self._model._initial_epoch = position.epoch
        progress = self._worker.progress
        progress.epochs = position.earlier + position.epoch
        progress.batches = progress.step = position.step
        self._order.seed = position.order
        _passing.append(self)

    def _open(self) -> None:
        if self._worker.request.saving is not None:
            self._cell.checkpoints.open(state_of(self._worker, self._model))

    def begin_epoch(self, epoch: int) -> int:
        """To be called as an epoch begins; returns how many of its batches are passed over."""
        self._model._initial_epoch = None  # Keras would begin the next fit there, too
        passed = self.at.batches if not self._restored else 0
        self._epoch = epoch
        return passed

    def pass_over(self, data: Iterator[Any], batches: int) -> bool:
        """Whether there were so many."""
        passed = list(itertools.islice(data, batches))
        progress = self._worker.progress
        progress.tested += len(passed)  # it is not standing still
        if passed and keras.backend.backend() == "jax":
            rows = (leaf.shape[0] for leaf in keras.tree.flatten(passed[0]) if leaf.ndim)
            progress.passed_rows = max(progress.passed_rows, *rows)
        return len(passed) == batches

    def restore(self) -> None:
        """Take the checkpoint's values, once."""
        if not self._restored:
            self._restored = True
            self._open()
            if not self.at.batches:
                self._model.reset_metrics()  # they may be those of the validation before

    def due(self, step: int) -> bool:
        """Whether the state after so many batches of the cell is to be saved."""
        return self._cell.checkpoints.due(step)

    def save(self, step: int, batches: int) -> None:
        """Save the state after `step`, the last of so many batches of the epoch."""
        self._save(step, self._epoch, batches)

    def stop(self, step: int, batches: int) -> None:
        """Save the state where all ranks have agreed to stop: as `save` does."""
        self._cell.stops = True
        self.save(step, batches)

    def end(self, step: int) -> None:
        """The fit is over."""
        self._model._initial_epoch = None
        if _passing and _passing[-1] is self:
            _passing.pop()
        if not self.is_over:
            self.restore()
            self._save(step, self._epochs, 0)

    def _save(self, step: int, epoch: int, batches: int) -> None:
        if self._worker.request.saving is None:
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


def gather_of(worker: Worker) -> Callable[[np.ndarray], np.ndarray]:
    """What gathers every rank's int32 numbers: from shape (n,) to shape (ranks, n)."""
    if keras.backend.backend() == "jax":
        from nbdist.worker.jax.runtime import processes

        return processes.gather
    from nbdist.worker.tensorflow.rank_gather import gather_over

    return gather_over(worker.strategies["mirrored"])


def state_of(worker: Worker, model: Any) -> State:
    """The state of a `fit`, and all else that the cell's names lead to.

    If nothing is saved, TensorFlow's state is the model's alone: to describe others builds their
    optimizers.
    """
    namespace = engine_shell().user_ns
    if keras.backend.backend() == "jax":
        from nbdist.worker.jax.keras import checkpoint as keras_checkpoint

        return keras_checkpoint.of_fit(model, worker.cell_state.names.bound(), namespace)
    from nbdist.worker.tensorflow import checkpoint as tensorflow_checkpoint

    names = worker.cell_state.names.bound() if worker.request.saving is not None else ()
    return tensorflow_checkpoint.of_fit(model, names, namespace)
