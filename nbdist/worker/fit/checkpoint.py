"""Checkpoints of `fit`: saving during training, and resuming in the middle of an epoch.

If a cell runs again to resume, it skips each finished `fit` and the finished batches of the
unfinished one. Keras reads these batches in the same order, but does not train on them
(`passed_epochs.py`). Each `fit` returns the history of all its epochs. Keras's own
`BackupAndRestore` resumes only at an epoch, from a file that each rank would write.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import keras
from msgspec import structs

from nbdist.errors import StepError
from nbdist.private_api.keras import EpochIterator
from nbdist.worker.checkpoint.fit_records import FitRecord, encoded, pack, unpack
from nbdist.worker.checkpoint.folder import Position
from nbdist.worker.checkpoint.saver import Unsaved, checkpoints
from nbdist.worker.fit import passed_epochs
from nbdist.worker.runtime import rng_alignment
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
    passed = passed_epochs.current()
    if not _passing or passed is not None:
        calls = passed.share_of(self) if passed is not None else None
        yield from itertools.islice(_enumerate_upstream(self), calls)
        return
    saver = _passing.pop()
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
        records: their records.
        earlier: records of the fits that began in an earlier run of the cell.
        checkpoints: checkpoints of the run; `Unsaved` if the fits save nothing.
        position: position from which the run resumes; None if it begins.
        stops: True if all ranks have agreed to end the cell at the same step.
    """

    def __init__(self, worker: Worker, saving: Saving | None) -> None:
        self.records: list[FitRecord] = []
        self.earlier = unpack(worker.request.fits_of(worker.rank))
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
        if self.position is not None:
            self.earlier = unpack(self.position.fits)

    @property
    def fits(self) -> int:
        return len(self.records)

    def packed(self) -> bytes:
        """Return the records, encoded."""
        return pack(self.records)

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
        before: record of the epochs that an earlier run has trained.
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
        self._cell.records.append(FitRecord())
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
        self.before = FitRecord()
        if self.is_over:
            self.before = self._record = self._earlier()
            if not self.before.epochs:
                model._initial_epoch = epochs
        elif before is not None and before.fit == self._cell.fits:
            self.before = self._record = self._earlier()
            self._resume_at(before)
        else:
            self._open()

    def _earlier(self) -> FitRecord:
        """Return the record of this fit in an earlier run of the cell.

        Raises:
            StepError: that run has not begun as many fits, or its history cannot be restored.
        """
        number = self._cell.fits
        if number > len(self._cell.earlier):
            raise StepError(
                f"cannot repeat `fit` {number} of the cell without training: its first run has "
                "stored no record of it. Run the cell again"
            )
        record = self._cell.earlier[number - 1]
        if record.lacking and self._worker.request.replays:
            raise StepError(
                f"cannot repeat `fit` {number} of the cell without training: the values of "
                f"`{', '.join(record.lacking)}` in its history cannot be stored. Run the cell again"
            )
        return record

    @property
    def _record(self) -> FitRecord:
        return self._cell.records[self.at.fit - 1]

    @_record.setter
    def _record(self, record: FitRecord) -> None:
        self._cell.records[self.at.fit - 1] = record

    def _resume_at(self, position: Position) -> None:
        self.at = position
        self._restored = False
        self._generators = rng_alignment.States.now()
        progress = self._worker.progress
        progress.epochs = position.earlier + position.epoch
        progress.batches = progress.step = position.step
        self._order.seed = position.order

    def _open(self, *, keeps_generators: bool = False) -> None:
        if self._saving is not None:
            state = state_of(self._worker, self._model)
            self._cell.checkpoints.open(state, keeps_generators=keeps_generators)

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch; return the number of its batches that are skipped."""
        self._epoch = epoch
        if self._restored:
            return 0
        _passing.append(self)
        return self.at.batches

    def end_batch(self, batches: int) -> None:
        """Note the number of batches of the epoch if a callback ends the fit within it."""
        if self._model.stop_training:
            self._record = structs.replace(self._record, last_batches=batches)

    def end_epoch(self) -> None:
        """Note the end of an epoch."""
        self._record = structs.replace(self._record, epochs=self._record.epochs + 1)

    def pass_over(self, data: Iterator[Any], batches: int, trains: bool = True) -> int:
        """Skip `batches` batches; return the number of those that the data had."""
        passed = list(itertools.islice(data, batches))
        progress = self._worker.progress
        progress.tested += len(passed)  # so that the rank does not seem hung
        if trains and passed and keras.backend.backend() == "jax":
            rows = (leaf.shape[0] for leaf in keras.tree.flatten(passed[0]) if leaf.ndim)
            progress.passed_rows = max(progress.passed_rows, *rows)
        return len(passed)

    def restore(self) -> None:
        """Restore the values of the checkpoint, once.

        On TensorFlow, Keras reads ahead in Python generators, on a thread. If they draw from the
        global random generators, these are already further than in the checkpoint.
        """
        if not self._restored:
            self._restored = True
            before, now = self._generators, rng_alignment.States.now()
            drew = (before.python, before.numpy) != (now.python, now.numpy)
            self._open(keeps_generators=drew and keras.backend.backend() == "tensorflow")
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
        self._model._initial_epoch = None  # Keras would reuse it for the next fit
        if _passing and _passing[-1] is self:
            _passing.pop()
        if not self.is_over:
            self.restore()
            self._record = structs.replace(self._record, stopped=self._model.stop_training)
            self._save(step, self._epochs, 0)

    def close(self) -> None:
        """Store the history of the epochs that have ended."""
        history = getattr(self._model, "history", None)
        if self.is_over or history is None or not self._record.epochs:
            return
        stored, lacking = encoded(history)
        self._record = structs.replace(self._record, history=stored, lacking=lacking)
        if lacking and self._saving is not None:
            self._worker.reporter.note_once(
                "checkpoint",
                f"checkpoints lack `{', '.join(lacking)}` of the history of `fit`: values "
                "of these types cannot be saved",
            )

    def _save(self, step: int, epoch: int, batches: int) -> None:
        if self._saving is None:
            return
        if keras.backend.backend() == "jax":
            self._model.jax_state_sync()
        self.close()
        self._cell.checkpoints.save(
            Position(
                step=step,
                epoch=epoch,
                batches=batches,
                fit=self.at.fit,
                earlier=self.at.earlier,
                order=self._order.seed,
                fits=self._cell.packed(),
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
