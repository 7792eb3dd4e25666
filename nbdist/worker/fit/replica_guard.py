"""What `fit` trains is compared between ranks while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from nbdist.worker.fit.checkpoint import gather_of, state_of
from nbdist.worker.fit.timing import is_of_all_ranks
from nbdist.worker.training.replica_guard import Unguarded, guard_of

if TYPE_CHECKING:
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.training.replica_guard import Guard


class FitGuard:
    """Compares the ranks of one `fit`; of one that a rank makes by itself, nothing.

    Args:
        worker: this rank.
        model: that is trained.
    """

    def __init__(self, worker: Worker, model: Any) -> None:
        self._worker = worker
        self._model = model
        self._guard: Guard = Unguarded()
        if _trains_on_all(worker, model):
            self._guard = guard_of(worker, lambda: gather_of(worker))

    def due(self, step: int) -> bool:
        """Whether the state after so many batches of the cell is to be compared."""
        return self._guard.due(step)

    def compare(self, step: int) -> None:
        """Raises StepError, as `Guard.compare` says."""
        self._guard.compare(step, lambda: state_of(self._worker, self._model))


def _trains_on_all(worker: Worker, model: Any) -> bool:
    if keras.backend.backend() == "jax":
        return is_of_all_ranks()
    strategy = worker.strategies.get("mirrored")
    return strategy is not None and model.distribute_strategy is strategy
