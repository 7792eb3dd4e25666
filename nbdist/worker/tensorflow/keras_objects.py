"""Keras objects that a step under the mirrored strategy uses."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.private_api.keras import BaseOptimizer, is_default
from nbdist.worker.tensorflow.user_objects import objects_behind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Precision, StepRequest

WITH_VARIABLES = (keras.layers.Layer, BaseOptimizer, keras.metrics.Metric, tf.Module)


class KerasObjects:
    """Models, layers, optimizers, metrics and variables, by the user's names for them.

    Args:
        request: request for the step.
        namespace: namespace of the user.
        strategy: strategy in whose scope they must be created.
    """

    def __init__(
        self, request: StepRequest, namespace: dict[str, Any], strategy: tf.distribute.Strategy
    ) -> None:
        self._strategy = strategy
        self._lines = request.program.reads
        found = list(objects_behind(request.program.reads, namespace))
        self._owners = [(name, value) for name, value in found if isinstance(value, WITH_VARIABLES)]
        self._bare = [
            (name, value)
            for name, value in found
            if isinstance(value, (tf.Variable, keras.Variable)) or _is_distributed(value)
        ]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """Return all layers, nested ones included."""
        every = (layer for root in self._roots() for layer in root._flatten_layers())
        return list({id(layer): layer for layer in every}.values())

    @property
    def optimizers(self) -> list[tuple[str, BaseOptimizer]]:
        return [(name, value) for name, value in self._owners if isinstance(value, BaseOptimizer)]

    def variables(self) -> Iterator[tuple[str, tf.Variable]]:
        """Yield every TensorFlow variable with its path in the user's names."""
        for name, owner in self._owners:
            for variable in owner.variables:
                path = getattr(variable, "path", None) or variable.name.split(":")[0]
                yield f"{name}: {path}", tensorflow_variable(variable)
        for name, variable in self._bare:
            yield name, tensorflow_variable(variable)

    def roots(self) -> dict[str, Any]:
        """Return variables and objects with variables, by name."""
        return dict((*self._owners, *self._bare))

    def weights(self) -> list[keras.Variable]:
        """Return the variables of all layers."""
        return [v for layer in self._roots() for v in layer.variables]

    def replace(self, old: Any, new: Any) -> None:
        """Use another object in place of one."""
        self._owners = [(name, new if value is old else value) for name, value in self._owners]

    def optimized(self) -> Iterator[tuple[list[tf.Variable], list[tf.Variable]]]:
        """Yield the slot variables of each optimizer, and the variables that it trains."""
        for _, optimizer in self.optimizers:
            scalars = (optimizer.iterations, optimizer._learning_rate)
            slots = [v for v in optimizer.variables if not any(v is scalar for scalar in scalars)]
            trained = optimizer._trainable_variables
            yield [*map(tensorflow_variable, slots)], [*map(tensorflow_variable, trained)]

    def check_scope(self) -> None:
        """Check that all objects were created in the strategy's scope.

        Each worker would train other objects separately.

        Raises:
            StepError: an object was created outside of the scope.
        """
        made_here = self._strategy.extended.variable_created_in_scope
        wrong = {
            path.split(":")[0]: type(variable).__name__
            for path, variable in self.variables()
            if not made_here(variable)
        }
        for name, optimizer in self.optimizers:
            if optimizer._distribution_strategy is not self._strategy:
                wrong.setdefault(name, type(optimizer).__name__)
        if wrong:
            named = ", ".join(f"`{name}`{self._line(name)}" for name in wrong)
            raise StepError(
                f"made outside of strategy.scope(): {named}; each worker would train it "
                "separately. Create it in a %%dist_run cell on all ranks with --strategy mirrored"
            )

    def check_built(self) -> None:
        """Check that all models have variables, because a step cannot create them.

        Raises:
            StepError: a model has no variables yet.
        """
        unbuilt = [
            f"`{name}`{self._line(name)}"
            for name, value in self._owners
            if isinstance(value, keras.Model) and _is_unbuilt(value)
        ]
        if unbuilt:
            raise StepError(
                f"has no variables yet: {', '.join(unbuilt)}; begin the model with "
                "keras.Input(shape), or call it on a batch in the cell that creates it"
            )

    def build_optimizers(self) -> None:
        """Build an unbuilt optimizer, because a step cannot create variables."""
        trainable = [v for layer in self._roots() for v in layer.trainable_variables]
        unique = list({id(v): v for v in trainable}.values())
        for _, optimizer in self.optimizers:
            if not optimizer.built and len(self.optimizers) == 1 and unique:
                with self._strategy.scope():
                    optimizer.build(unique)

    def _roots(self) -> list[keras.layers.Layer]:
        return [value for _, value in self._owners if isinstance(value, keras.layers.Layer)]

    def _line(self, name: str) -> str:
        line = self._lines.get(name)
        return f" (line {line})" if line else ""

    @contextlib.contextmanager
    def computing_in(self, precision: Precision | None) -> Iterator[None]:
        """Compute layers in `precision` within this context. Their variables keep their type."""
        if precision is None:
            yield
            return
        before = [(layer, layer.dtype_policy) for layer in self.layers]
        try:
            for layer, policy in before:
                if policy.variable_dtype == "float32":
                    layer.dtype_policy = f"mixed_{precision}"
            yield
        finally:
            for layer, policy in before:
                layer.dtype_policy = policy

    def is_coarse(self) -> bool:
        """Return True if a layer computes in less than float32."""
        return any(layer.compute_dtype in ("float16", "bfloat16") for layer in self.layers)

    def scales_loss_itself(self) -> bool:
        """Return True if an optimizer of the user scales the loss."""
        kinds = (value for _, value in self.optimizers)
        return any(isinstance(value, keras.optimizers.LossScaleOptimizer) for value in kinds)


def tensorflow_variable(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable, and any other variable as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _is_unbuilt(model: keras.Model) -> bool:
    """Return True if a model has no variables, or its layers will create more.

    A model whose parts are called one by one, such as `model.encode(x)`, is never `built` itself.
    """
    return not model.built and (_creates_variables(model) or not model.variables)


def _creates_variables(layer: keras.layers.Layer) -> bool:
    """Return True if the first call of the layer creates variables in it."""
    if layer.built:
        return False
    return not is_default(layer.build) or any(map(_creates_variables, layer._layers))


def _is_distributed(value: object) -> bool:
    return isinstance(value, tf.distribute.DistributedValues) and tf.is_tensor(value)
