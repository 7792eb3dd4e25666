"""Replacement of strategies that a user's cell constructs by the running one.

Under the mirrored strategy a worker uses the devices and collectives of the cluster's
MultiWorkerMirroredStrategy. A second strategy ends the process with a segmentation fault:
TensorFlow 2.21.0 reconfigures the devices and collectives while the first one uses them. Tutorials
construct a strategy in their first line. While a cell runs on all ranks, the constructors therefore
return the running strategy. `isinstance(strategy, tf.distribute.MirroredStrategy)` stays False for
it. TensorFlow has no setting for the class of strategy that a constructor returns.

A cell runs in the scope of the running strategy. `keras.backend.clear_session` resets the default
graph and with it TensorFlow's list of entered scopes. The end of the cell would then raise
IndexError, so nbdist skips the reset in a scope. The only cost: graphs that eager code never uses
stay in memory.

In that scope TensorFlow cannot take gradients with respect to mirrored variables. Its error names
an internal property, and nbdist raises one with a remedy.
`tests/worker/tensorflow/runtime/test_running_strategy.py` covers each constructor.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.errors import StepError, StrategyError
from nbdist.worker.runtime import context
from nbdist.worker.runtime.tested_versions import is_tested

if TYPE_CHECKING:
    from collections.abc import Callable

PATCHED_SERIES = "2.21."
_RETURNED: tuple[type, ...] = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.experimental.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
)
_OVER_WORKERS = _RETURNED[:3]
"""Strategies that end the process if they are constructed beside the running one."""

_TPU = (
    "the workers run TensorFlow on CPUs or GPUs, and nbdist supports TPUs on JAX: remove the line "
    "and use `strategy`, or start the workers with --framework jax"
)
_REFUSED: dict[type, str] = {
    tf.distribute.TPUStrategy: _TPU,
    tf.distribute.experimental.TPUStrategy: _TPU,
    tf.distribute.ParameterServerStrategy: (
        "the cluster has workers and no parameter servers, and updates variables in sync: remove "
        "the line and use `strategy`"
    ),
}


@functools.cache
def apply() -> None:
    """Patch TensorFlow 2.21. Leave other versions unchanged and log a warning."""
    if not is_tested("TensorFlow", tf.__version__, PATCHED_SERIES):
        return
    for kind in _RETURNED:
        _answer(kind, _return_running)
    for kind in _REFUSED:
        _answer(kind, _refuse)
    tf.GradientTape.gradient = _in_replicas(tf.GradientTape.gradient)
    tf.compat.v1.reset_default_graph = _reset_outside_of_scopes(tf.compat.v1.reset_default_graph)


def running() -> Any:
    """Return the mirrored strategy of a cell that runs on all ranks, else None."""
    strategy = context.cell_strategy()
    return strategy if isinstance(strategy, tf.distribute.Strategy) else None


def _in_replicas(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def gradient(*args: Any, **options: Any) -> Any:
        try:
            return upstream(*args, **options)
        except ValueError as error:
            if "DistributedVariable.handle is not available" not in str(error):
                raise
        raise StepError(
            "a plain cell cannot take gradients of mirrored variables outside of replicas: run the "
            "body of the loop as a step cell (%%dist_run --data NAME), or with strategy.run(step)"
        )

    return gradient


def _reset_outside_of_scopes(upstream: Callable[[], None]) -> Callable[[], None]:
    def reset_default_graph() -> None:
        if not tf.distribute.has_strategy():
            upstream()

    return reset_default_graph


def _answer(kind: type, answer: Callable[[type, Any], Any]) -> None:
    """Make the constructor return the result of `answer` while a cell runs."""
    initialise: Callable[..., None] = kind.__init__  # type: ignore[misc]

    def new(wanted: type, *_args: Any, **_options: Any) -> Any:
        if wanted is not kind or not context.in_cell():
            return object.__new__(wanted)
        strategy = running()
        if strategy is not None:
            return answer(kind, strategy)
        if kind in _OVER_WORKERS and "mirrored" in context.strategies():
            raise StrategyError(
                f"tf.distribute.{_name(kind)}() needs a cell that runs on all workers under the "
                "mirrored strategy: run the cell without --ranks and with --strategy mirrored"
            )
        return object.__new__(wanted)

    @functools.wraps(initialise)
    def initialise_new(self: Any, *args: Any, **options: Any) -> None:
        if self is not running():  # Python also calls `__init__` on a returned instance
            initialise(self, *args, **options)

    kind.__new__ = new  # type: ignore[method-assign,assignment]
    kind.__init__ = initialise_new  # type: ignore[misc]


def _return_running(kind: type, strategy: Any) -> Any:
    worker = context.current()
    text = (
        f"tf.distribute.{_name(kind)}() returns the running `strategy`, with "
        f"{strategy.num_replicas_in_sync} replicas on {worker.world_size} workers"
    )
    worker.reporter.note_once("strategy", text)
    return strategy


def _refuse(kind: type, _strategy: Any) -> Any:
    raise StrategyError(f"tf.distribute.{_name(kind)} cannot run in this cell: {_REFUSED[kind]}")


def _name(kind: type) -> str:
    """Return the public name of a strategy class."""
    public = (tf.distribute, tf.distribute.experimental)
    return next(name for module in public for name in dir(module) if getattr(module, name) is kind)
