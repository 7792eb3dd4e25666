"""Automatic reports of the batches and epochs of `model.fit` to the notebook.

Keras has no public hook for a callback on every `fit`, so nbdist patches `CallbackList` to add one.
With `verbose="auto"` (Keras's default) it replaces the progress bar: several ranks cannot show
theirs in one display. An explicit `verbose` keeps Keras's own output too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nbdist.records import FitBegun
from nbdist.worker.fit import checkpoint as fit_checkpoint
from nbdist.worker.fit.checkpoint import FitSaver, gather_of, state_of
from nbdist.worker.fit.passed_epochs import PassedEpochs
from nbdist.worker.fit.timing import Pace, is_of_all_ranks
from nbdist.worker.keras import backend as keras_backend
from nbdist.worker.keras.optimizer_config import hyperparameters_of
from nbdist.worker.runtime import context
from nbdist.worker.training.replica_guard import NoGuard, guard_of

if TYPE_CHECKING:
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.runtime.stop_point import StopPoint
    from nbdist.worker.training.replica_guard import Guard

_STEP_COUNT = (
    "data of unknown length: in one process, Keras counts one optimizer step too many after each "
    "epoch; nbdist does not. Losses of Adam and schedules differ slightly from the second epoch "
    "on. With steps_per_epoch they are equal"
)

_list_init_upstream = keras.callbacks.CallbackList.__init__


def apply() -> None:
    """Add an `EpochReport` to every list of callbacks created from now on."""
    keras.callbacks.CallbackList.__init__ = _init_with_report
    fit_checkpoint.apply()
    if keras.backend.backend() == "jax":
        from nbdist.worker.jax.keras import layout as keras_layout
        from nbdist.worker.jax.keras import timing as keras_timing

        keras_layout.apply()
        keras_timing.apply()  # after the layout, which it times


def _init_with_report(
    self: Any,
    callbacks: Any = None,
    add_history: bool = False,
    add_progbar: bool = False,
    model: Any = None,
    **params: Any,
) -> None:
    _list_init_upstream(
        self,
        [*keras.tree.flatten(callbacks or []), EpochReport(self)],
        add_history=add_history,
        add_progbar=add_progbar and params.get("verbose") != "auto",
        model=model,
        **params,
    )


class EpochReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports each batch and each epoch, with this rank's own loss beside the reduced one.

    Epochs and steps are counted across all fits of a cell.

    An interrupt ends the fit on all ranks before the same batch. A rank that stopped elsewhere
    would leave the others in an all-reduce.

    Args:
        callbacks: Keras's list of callbacks with this one.
    """

    async_safe = True  # otherwise Keras would wait for the metrics of every batch

    def __init__(self, callbacks: Any) -> None:
        super().__init__()
        self._list = callbacks
        self._fitting = contextlib.ExitStack()
        self._stop: StopPoint | None = None
        self._own: dict[str, float] | None = None
        self._epoch = 0
        self._made = 0

    def on_train_begin(self, logs: Any = None) -> None:
        keras_backend.check_fit(self.model)
        worker = context.current()
        self._stop = self._fitting.enter_context(worker.cell_state.stop_point())
        self._before: int | None = None
        self._saver = FitSaver(worker, self.model, self.params["epochs"])
        self._guard = _FitGuard(worker, self.model)
        self._made = worker.progress.batches
        worker.progress.trained = False
        self._pace = Pace(worker, self.model)
        self._note_step_count(worker)
        self._passed = PassedEpochs(
            self.model,
            self._list,
            self,
            self._saver.before,
            reads_all=not self._saver.is_over,
            read=self._saver.pass_over,
        )
        worker.ending.callback(self._close)  # Keras calls no hook if a fit raises

    def _note_step_count(self, worker: Worker) -> None:
        """Note that the optimizer counts fewer steps than in one process (`docs/facts.md`)."""
        has_later_epoch = self.params["epochs"] > 1 and self.params["steps"] is None
        if has_later_epoch and keras.backend.backend() == "tensorflow":
            worker.reporter.note_once("strategy", _STEP_COUNT)

    def on_train_end(self, logs: Any = None) -> None:
        self._saver.end(context.current().progress.batches)
        self._close()

    def _close(self) -> None:
        state = context.current().cell_state
        state.unfinished |= self._stop is not None and self._pace.is_under_way
        self._pace.close(self._epoch)
        self._passed.close()
        if self._stop is not None:
            self._saver.close()
        self._fitting.close()
        self._stop = None
        context.current().progress.trained = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._stop is None or self._passed.is_under_way:
            return
        if self._stop.is_before(self._made + batch + 1):
            self._saver.stop(self._made + batch, batch)
            self._close()  # Keras calls no hook for this exception
            raise KeyboardInterrupt
        made = self._made + batch
        if self._guard.due(made):
            self._pace.settle()
            self._guard.compare(made)
            self._pace.restart()
        if self._saver.due(made):
            self._pace.settle()
            self._saver.save(made, batch)
            self._pace.restart()
        context.current().progress.step = made + 1
        self._pace.begin(batch, self._epoch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        context.current().progress.tested += 1

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        context.current().progress.tested += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the batch. Keras may call it on several threads; the metrics are computed."""
        if self._stop is None or self._passed.is_under_way:
            return
        steps = self.params["steps"]  # the last call may have fewer than `steps_per_execution`
        batches = batch + 1 if steps is None else min(batch + 1, steps)
        self._saver.end_batch(batches)
        worker = context.current()
        step = self._made + batches
        with self._pace.lock:
            progress = worker.progress
            made = max(1, step - progress.batches)  # several, with `steps_per_execution`
            progress.batches = max(progress.batches, step)
            measured, signals = self._pace.ended(batch, step, made)
            shared = {**_scalars(logs), **signals.values}
            worker.reporter.report_values(
                self._epoch, step, own={}, shared=shared, measured=measured
            )
            signals.send_histograms(worker.reporter, self._epoch, step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._passed.is_under_way:
            return
        worker = context.current()
        self._made = worker.progress.batches - self._saver.begin_epoch(epoch)
        if self._before is None:  # epochs before `initial_epoch` count
            self._before = max(0, worker.progress.epochs - epoch)
            worker.reporter.send(self._begun(epoch))
        self._own = None
        self._epoch = worker.progress.epochs = self._before + epoch + 1
        self._pace.restart()

    def _begun(self, first: int) -> FitBegun:
        """Return the totals at the end of this fit, including earlier fits of the cell."""
        epochs, steps = self.params["epochs"], self.params["steps"]
        total = -1 if steps is None else self._made + (epochs - first) * steps
        assert self._before is not None
        fields = context.current().reporter.record_fields()
        return FitBegun(
            epochs=self._before + epochs,
            steps=total,
            hyperparameters=hyperparameters_of({"": self.model.optimizer}),
            sharding=context.current().cell_state.order.sharding,
            **fields,
        )

    def on_test_begin(self, logs: Any = None) -> None:
        if self._stop is not None and not self._passed.is_under_way:
            # the validation will reset the metrics
            self._own = _own_loss(self.model)
            self._pace.stop_trace(self._epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._passed.is_under_way:
            if self._passed.end_epoch():
                ends_early = self._saver.is_over and epoch + 1 < self.params["epochs"]
                self.model.stop_training = ends_early or self._saver.before.stopped
            return
        self._saver.end_epoch()
        self._pace.stop_trace(self._epoch)
        own = _own_loss(self.model) if self._own is None else self._own
        context.current().reporter.report_values(self._epoch, -1, own=own, shared=_scalars(logs))

    def on_test_end(self, logs: Any = None) -> None:
        if self._stop is None and logs:
            context.current().reporter.report_values(-1, -1, own={}, shared=_scalars(logs))


class _FitGuard:
    """Compares the ranks of one `fit`, unless a rank trains by itself.

    Args:
        worker: this rank.
        model: model in training.
    """

    def __init__(self, worker: Worker, model: Any) -> None:
        self._worker = worker
        self._model = model
        self._guard: Guard = NoGuard()
        if _trains_on_all(worker, model):
            self._guard = guard_of(worker, lambda: gather_of(worker))

    def due(self, step: int) -> bool:
        """Return True if to compare the state after batch `step` of the cell."""
        return self._guard.due(step)

    def compare(self, step: int) -> None:
        """Compare the ranks. Raises the errors of `Guard.compare`."""
        self._guard.compare(step, lambda: state_of(self._worker, self._model))


def _trains_on_all(worker: Worker, model: Any) -> bool:
    if keras.backend.backend() == "jax":
        return is_of_all_ranks()
    strategy = worker.strategies.get("mirrored")
    return strategy is not None and model.distribute_strategy is strategy


def _scalars(logs: Any) -> dict[str, float]:
    """Return the values of one element. A metric such as F1Score has one value for each class."""
    return {
        name: float(np.asarray(value).reshape(()))
        for name, value in (logs or {}).items()
        if np.size(value) == 1
    }


def _own_loss(model: Any) -> dict[str, float]:
    """Return the mean loss over this rank's own samples: its part of a reduced mean.

    Keras stores a mean as `total` and `count`. Under a distribution strategy of TensorFlow each
    replica has its own pair, and reading the metric adds them up. Under JAX all ranks share one
    pair, so a rank's own part is unknown.
    """
    if is_of_all_ranks():
        return {}
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            total, count = _own_part(metric.total), _own_part(metric.count)
            return {"loss": total / count} if count else {}
    return {}


def _own_part(variable: Any) -> float:
    strategies = context.current().strategies
    if "mirrored" in strategies and keras.backend.backend() == "tensorflow":
        parts = strategies["mirrored"].experimental_local_results(variable.value)
        return float(sum(float(part) for part in parts))
    return float(variable)
