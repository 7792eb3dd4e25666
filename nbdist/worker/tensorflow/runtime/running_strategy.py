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
stay in memory. `import tensorflow.compat.v1`, as in Keras's `TensorBoard`, replaces the module
`tf.compat.v1`, so nbdist patches the stack of graphs, not that module's function.

A plain cell computes the whole batch on every worker. In the scope, TensorFlow refuses gradients
with respect to mirrored variables, and Keras refuses updates. nbdist takes the gradients with
respect to the local component that the cell has read. It applies an update to all components of the
worker, without a reduction: all workers compute the same gradients.
`tests/worker/tensorflow/runtime/test_running_strategy.py` covers each constructor.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.errors import StrategyError
from nbdist.private_api.keras import LOSS_SCALES
from nbdist.private_api.tensorflow import DistributedVariable, ops
from nbdist.worker.runtime import context, import_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Patch the strategies of TensorFlow and its gradient tape."""
    for kind in _RETURNED:
        _answer(kind, _return_running)
    for kind in _REFUSED:
        _answer(kind, _refuse)
    tf.GradientTape.gradient = _of_components(tf.GradientTape.gradient)
    tf.GradientTape.watch = _watching_components(tf.GradientTape.watch)
    interim = tf.__internal__.distribute.interim
    interim.maybe_merge_call = _without_replicas(interim.maybe_merge_call)
    import_hooks.once_imported("keras", _patch_loss_scale)
    graphs = type(ops._default_graph_stack)
    graphs.reset = _outside_of_scopes(graphs.reset)


def running() -> Any:
    """Return the mirrored strategy of a cell that runs on all ranks, else None."""
    strategy = context.cell_strategy()
    return strategy if isinstance(strategy, tf.distribute.Strategy) else None


def _of_components(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mirrored variables among the sources of a gradient, outside of replicas."""

    @functools.wraps(upstream)
    def gradient(
        self: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any
    ) -> Any:
        if self._tape is not None and tf.distribute.in_cross_replica_context():
            watched = {id(variable) for variable in self.watched_variables()}

            def component(source: Any) -> Any:
                own = _components(source)
                return next((one for one in own if id(one) in watched), own[0])

            sources = tf.nest.map_structure(component, sources)
        return upstream(self, target, sources, *args, **options)

    return gradient


def _watching_components(upstream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upstream)
    def watch(self: tf.GradientTape, tensor: Any) -> None:
        if tf.distribute.in_cross_replica_context():
            tensor = tf.nest.map_structure(_components, tensor)
        upstream(self, tensor)

    return watch


def _components(value: Any) -> tuple[Any, ...]:
    """Return the components of a mirrored variable on this worker, and `(value,)` otherwise."""
    if not isinstance(value, DistributedVariable):
        variable = getattr(value, "value", None)  # a Keras variable
        if not isinstance(variable, DistributedVariable):
            return (value,)
        value = variable
    components: tuple[Any, ...] = value.values
    return components


def _without_replicas(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function of a merge at once where no replica runs, as TensorFlow does after one."""

    @functools.wraps(upstream)
    def maybe_merge_call(
        function: Callable[..., Any], strategy: Any, *args: Any, **options: Any
    ) -> Any:
        if tf.distribute.in_cross_replica_context():
            return function(strategy, *args, **options)
        return upstream(function, strategy, *args, **options)

    return maybe_merge_call


def _patch_loss_scale() -> None:
    """Let optimizers that scale the loss update outside of replicas. Keras refuses it."""
    keras = sys.modules["keras"]
    if not LOSS_SCALES.is_supported("LossScaleOptimizer refuses own loops"):
        return
    kind: Any = keras.optimizers.LossScaleOptimizer
    upstream = kind._tf_apply

    @functools.wraps(upstream)
    def apply_scaled(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        in_replica = not tf.distribute.in_cross_replica_context()
        update = functools.partial(upstream, self) if in_replica else self._common_apply
        update(grads, trainable_variables)

    kind._tf_apply = apply_scaled


def _outside_of_scopes(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
    def reset(self: Any) -> None:
        if not tf.distribute.has_strategy():
            upstream(self)

    return reset


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
