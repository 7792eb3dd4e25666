"""Epochs of a `fit` that an earlier run has trained.

Data may have a state: the seeds of a shuffle, the position of a Python generator, the order that a
`PyDataset` draws in `on_epoch_end`. Keras's own loop therefore runs also for these epochs. It reads
their batches, and those of the validation, but it neither trains nor calls callbacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from nbdist.private_api.keras import ArrayDataAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.checkpoint.fit_records import FitRecord

_under_way: list[PassedEpochs] = []


class PassedEpochs:
    """Epochs of one `fit` that Keras repeats without training.

    Args:
        model: model of the `fit`.
        callbacks: Keras's list of its callbacks.
        kept: callback of the list that is still called.
        record: record of the epochs.
        reads_all: True to read arrays completely. Otherwise nbdist only draws their orders.
        read: reads a number of batches, to train or to validate; returns the number that it found.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Any,
        kept: Any,
        record: FitRecord,
        *,
        reads_all: bool,
        read: Callable[[Iterator[Any], int, bool], int],
    ) -> None:
        self._model = model
        self._list = callbacks
        self._callbacks = callbacks.callbacks
        self._record = record
        self._reads_all = reads_all
        self._read = read
        self._batches = 0
        self._ended = 0
        self._replaced = {
            "train_function": self._train,
            "test_function": self._test,
            "make_test_function": lambda force=False: self._test,
            "_get_metrics_result_or_logs": lambda logs: {},
        }
        own = vars(model)
        self._before = {name: own[name] for name in self._replaced if name in own}
        self.is_under_way = record.epochs > 0
        if self.is_under_way:
            callbacks.callbacks = [kept]
            own.update(self._replaced)
            _under_way.append(self)

    def end_epoch(self) -> bool:
        """Note the end of an epoch; return True if it was the last one."""
        self._ended += 1
        self._batches = 0
        if self._ended < self._record.epochs:
            return False
        self.close()
        self._record.restore(self._model)
        return True

    def close(self) -> None:
        """Let Keras train and call the callbacks again."""
        if self.is_under_way:
            self.is_under_way = False
            _under_way.remove(self)
            self._list.callbacks = self._callbacks
            own = vars(self._model)
            for name in self._replaced:
                del own[name]
            own.update(self._before)

    def _train(self, *arguments: Any) -> Any:
        """Read the batches of one call of the train function, and return no logs."""
        model = self._model
        outputs = self._passed(arguments, trains=True)
        self._batches += model.steps_per_execution
        is_last = self._ended + 1 == self._record.epochs
        if is_last and self._record.last_batches and self._batches >= self._record.last_batches:
            model.stop_training = True
        return outputs

    def _test(self, *arguments: Any) -> Any:
        return self._passed(arguments, trains=False)

    def _passed(self, arguments: Any, trains: bool) -> Any:
        *state, batches = arguments
        if not self._read(batches, self._model.steps_per_execution, trains):
            raise StopIteration
        return ({}, *state) if keras.backend.backend() == "jax" else {}

    def share_of(self, iterator: Any) -> int | None:
        """Return the number of calls that a pass through data needs; None for all.

        Keras's array adapter has no state but NumPy's global generator, from which it draws the
        order of a pass before the first batch. Arrays of the validation are not shuffled.
        """
        adapter = iterator.data_adapter
        if not isinstance(adapter, ArrayDataAdapter):
            return None
        if iterator is getattr(self._model, "_eval_epoch_iterator", None):
            return 0
        draws_once = iterator.steps_per_epoch is None and adapter._shuffle != "batch"
        return 1 if draws_once and not self._reads_all else None


def current() -> PassedEpochs | None:
    """Return the epochs that Keras repeats now; None if it trains."""
    return _under_way[-1] if _under_way else None
