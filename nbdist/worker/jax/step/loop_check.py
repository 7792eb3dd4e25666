"""Steps of a training loop under JAX that `--check` runs on trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.worker.jax.arrays.checkpoint import on_host
from nbdist.worker.jax.step.loop_state import Snapshot
from nbdist.worker.training.parity import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.data.batches import Batch, Tree
    from nbdist.worker.jax.step.loop_state import LoopState
    from nbdist.worker.training.parity import Values


class LoopSubject:
    """Trial steps that leave the state and the random generators unchanged.

    Args:
        state: state of the loop.
        namespace: names of the user.
        run: runs the step on these rows; without rows, on the split batch. Returns its outputs.
        report: returns the reported scalars among outputs.
    """

    def __init__(
        self,
        state: LoopState,
        namespace: dict[str, Any],
        run: Callable[[tuple[Tree, ...] | None], dict[str, Any]],
        report: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._state = state
        self._namespace = namespace
        self._run = run
        self._report = report

    def state(self) -> Values:
        return {path: on_host(array) for path, array in self._state.saved().items()}

    def alone(self, values: tuple[Tree, ...]) -> Outcome:
        return self._outcome(values)

    def together(self, batch: Batch) -> Outcome:
        del batch  # the step keeps its own batch
        return self._outcome(None)

    def _outcome(self, values: tuple[Tree, ...] | None) -> Outcome:
        before = Snapshot(self._state, self._namespace)
        try:
            outputs = self._run(values)
            self._state.carried = {name: outputs[name] for name in self._state.carried}
            report = {name: on_host(value) for name, value in self._report(outputs).items()}
            return Outcome(report, self.state())
        finally:
            before.restore()
