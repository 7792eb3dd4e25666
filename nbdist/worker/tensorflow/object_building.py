"""Creation of the variables that models and optimizers would create in the first step.

A step on replicas cannot create variables. nbdist traces the step once, outside of replicas:
layers create their variables, and each optimizer names the variables that it updates.
"""

from __future__ import annotations

import contextlib
import functools
import io
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.private_api.keras import BaseOptimizer, Layer, is_default
from nbdist.private_api.tensorflow import func_graph
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.replica.inlined_functions import inlined_functions
from nbdist.worker.tensorflow.user_objects import objects_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def build_objects(
    step: Callable[[], Any],
    names: Iterable[str],
    namespace: dict[str, Any],
    strategy: tf.distribute.Strategy,
) -> None:
    """Create the variables of unbuilt models and optimizers behind names.

    Args:
        step: calls the function of the step.
        names: names that the step reads.
        namespace: namespace of the user.
        strategy: strategy of all ranks.
    """
    found = [value for _, value in objects_behind(names, namespace)]
    optimizers = [value for value in found if isinstance(value, BaseOptimizer)]
    layers = [value for value in found if isinstance(value, keras.layers.Layer)]
    if all(optimizer.built for optimizer in optimizers) and all(layer.built for layer in layers):
        return
    updated: list[tuple[BaseOptimizer, list[Any]]] = []

    def traced() -> None:  # a step may return values that are no tensors
        step()

    def apply(optimizer: BaseOptimizer, grads: Any, trainable_variables: Any = None) -> None:
        updated.append((optimizer, list(trainable_variables or ())))

    def apply_pairs(optimizer: BaseOptimizer, grads_and_vars: Any, **_: Any) -> None:
        updated.append((optimizer, [variable for _, variable in grads_and_vars]))

    def gradient(_tape: Any, _target: Any, sources: Any, **_: Any) -> Any:
        return tf.nest.map_structure(lambda v: tf.zeros(v.shape, v.dtype), sources)

    with (
        strategy.scope(),
        inlined_functions(in_replicas=False),
        replaced(BaseOptimizer, "apply", apply),
        replaced(BaseOptimizer, "apply_gradients", apply_pairs),
        replaced(tf.GradientTape, "gradient", gradient),
        replaced(keras.Metric, "__getattribute__", _without_updates),
        replaced(Layer, "_maybe_build", functools.partialmethod(_built, Layer._maybe_build)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        # `tf.function` cannot create variables whose copies are initialised from one another.
        func_graph.func_graph_from_py_func("variables", traced, (), {})
    with strategy.scope():
        for optimizer, variables in updated:
            if not optimizer.built and variables:
                optimizer.build(variables)


def _built(layer: Layer, upstream: Callable[..., Any], call: Any) -> None:
    """Build a layer outside of the trace, whose assignments to variables would never run."""
    is_own = not layer.built and not is_default(layer.build)
    with tf.init_scope() if is_own else contextlib.nullcontext():
        upstream(layer, call)


def _without_updates(metric: keras.Metric, name: str) -> Any:
    if name == "update_state":
        return lambda *_args, **_options: None
    return object.__getattribute__(metric, name)
