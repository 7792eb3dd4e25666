"""Restore equal TensorFlow variables on all ranks after a cancelled collective.

Variables, models, datasets and traced functions stay valid, because `tensorflow_strategy.reopen`
keeps the context. A rank that waited in the collective may have completed part of a step, such as a
draw from a seed generator. It may also have left an optimizer partly built. `survey` describes the
variables that all ranks should share. `adopt` sets them to one rank's values.

This covers Keras variables, seeds, generators, and variables with an aggregation. Each rank keeps
its own metrics.
"""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from nbdist.private_api.keras import BaseOptimizer
from nbdist.records import Restored, SeenOptimizer, SeenVariable, Survey
from nbdist.worker.checkpoint.digest import of_array
from nbdist.worker.runtime import context as runtime_context
from nbdist.worker.runtime.reachable import reachable
from nbdist.worker.runtime.shell import engine_shell
from nbdist.worker.tensorflow import strategy as tensorflow_strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.records import Agreement, CopiedVariable

_WORD = 4
"""Size in bytes of the numbers in an all-reduce: values of every type are sent as int32."""

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)
_alone: dict[int, Any] = {}
"""Variables that are missing on some rank, by id. They are never compared again."""

_surveyed: tuple[list[Any], list[Any]] = ([], [])


def survey() -> Survey:
    """Describe the variables of this rank. A call of `adopt` must follow."""
    global _surveyed  # noqa: PLW0603 - from one request to the next
    gc.collect()
    variables, optimizers = _found()
    _surveyed = variables, optimizers
    position = {id(variable): number for number, variable in enumerate(variables)}
    ended = runtime_context.current().ended
    was_waiting = "mirrored" in runtime_context.current().broken or (
        ended is not None and ended.unfinished
    )
    return Survey(
        next_key=tensorflow_strategy.next_key(),
        is_between_steps=not was_waiting,
        variables=tuple(_seen(variable) for variable in variables),
        optimizers=tuple(
            SeenOptimizer(
                variable=position[id(_count(optimizer))],
                built=len(optimizer.variables) if optimizer.built else 0,
            )
            for optimizer in optimizers
        ),
    )


def adopt(agreement: Agreement) -> Restored:
    """Copy the values of the source rank. All ranks must call this at the same time.

    Returns:
        Effects on this rank that the user must know.
    """
    global _surveyed
    (variables, optimizers), _surveyed = _surveyed, ([], [])
    for number in agreement.unbuilt:
        _unbuild(optimizers[number])
    changed = [
        variables[copied.own]
        for copied in agreement.copied
        if _copy(copied, variables, is_source=runtime_context.current().rank == agreement.source)
    ]
    alone = [variables[number] for number in agreement.alone]
    _alone.update((id(variable), variable) for variable in alone)
    namespace = {
        name: value
        for name, value in engine_shell().user_ns.items()
        if not name.startswith("_") and name not in {"In", "Out"}
    }
    known = dict(_names(namespace, changed))
    return Restored(
        changed=tuple(dict.fromkeys(known.get(id(v), v.name.split(":")[0]) for v in changed)),
        alone=tuple(dict.fromkeys(name for _, name in _names(namespace, alone))),
        iterators=tuple(n for n, value in namespace.items() if isinstance(value, _ITERATORS)),
    )


def _found() -> tuple[list[Any], list[Any]]:
    """Find variables in order of creation, and the optimizers that own one of them."""
    variables: dict[int, Any] = {}
    optimizers = []
    relevant: dict[type, bool] = {}
    for value in gc.get_objects():
        kind = type(value)  # a proxy may report another `__class__`
        if kind not in relevant:
            relevant[kind] = issubclass(kind, _HOLDERS)
        if relevant[kind]:
            if issubclass(kind, BaseOptimizer):
                optimizers.append(value)
            owned = map(_unwrapped, _owned(value))
            variables.update((id(v), v) for v in owned if _is_compared(v))
    created = sorted(variables.values(), key=_creation)
    return created, sorted(
        (o for o in optimizers if id(_count(o)) in variables),
        key=lambda optimizer: _creation(_count(optimizer)),
    )


def _owned(value: Any) -> Iterable[Any]:
    """Return the variables of an object that should be equal on all ranks.

    Attributes may be missing if a rank was cancelled while it created the object.
    """
    fields = vars(value)
    if isinstance(value, keras.Variable):
        return [fields.get("_value")]
    if isinstance(value, BaseOptimizer):
        return [*fields.get("_variables", ()), *fields.get("_trainable_variables", ())]
    if isinstance(value, keras.random.SeedGenerator):
        return [fields.get("state")]
    if isinstance(value, tf.random.Generator):
        return [fields.get("_state_var")]
    none = tf.VariableAggregation.NONE
    return [value] if fields.get("_aggregation", none) != none else []


def _count(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's steps. None if it has none yet."""
    iterations = vars(optimizer).get("_iterations")
    return iterations._value if isinstance(iterations, keras.Variable) else None


def _is_compared(value: Any) -> bool:
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and isinstance(value, tf.Variable)
        and "_values" in vars(value)
        and value.synchronization != tf.VariableSynchronization.ON_READ
        and (value.dtype.is_numeric or value.dtype.is_bool)
        and id(value) not in _alone
        and bool(tf.raw_ops.VarIsInitializedOp(resource=value.values[0].handle))
    )


def _creation(variable: Any) -> int:
    """Return a number that grows with each creation. Only the order is the same on all ranks."""
    return int(variable.values[0]._unique_id.rpartition("_")[2])


def _seen(variable: Any) -> SeenVariable:
    value = _read(variable)
    return SeenVariable(kind=_kind(variable), shape=value.shape, digest=of_array(value))


def _kind(variable: Any) -> str:
    """Describe a variable without the counters that Keras adds to names: they differ by rank."""
    name = re.sub(r"_\d+|:\d+", "", variable.name)
    return f"{name} {variable.dtype.as_numpy_dtype.__name__}"


def _read(variable: Any) -> np.ndarray:
    own = variable.values[0]
    value: np.ndarray = tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype).numpy()
    return np.asarray(value)


def _copy(copied: CopiedVariable, variables: list[Any], *, is_source: bool) -> bool:
    """Copy the source's value of one variable. Returns True if this rank's value was different."""
    dtype = tf.as_dtype(copied.kind.rpartition(" ")[2]).as_numpy_dtype
    shape = copied.shape
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    sent = np.zeros(size + -size % _WORD, np.uint8)
    before = _read(variables[copied.own]) if copied.own >= 0 else None
    if is_source and before is not None:
        sent[:size] = np.ascontiguousarray(before).reshape(-1).view(np.uint8)
    received = _sum(sent.view(np.int32)).view(np.uint8)[:size]
    value = received.view(dtype).reshape(shape)
    if before is None or before.tobytes() == value.tobytes():
        return False
    for component in variables[copied.own].values:
        component.assign(value)
    return True


def _sum(words: np.ndarray) -> np.ndarray:
    """Add up the values of all ranks. Only the first replica of each rank contributes."""
    strategy = runtime_context.current().strategies["mirrored"]
    local = len(strategy.extended.worker_devices)

    def of_replica(context: Any) -> tf.Tensor:
        is_first = context.replica_id_in_sync_group % local == 0
        return tf.constant(words if is_first else np.zeros_like(words))

    values = strategy.experimental_distribute_values_from_function(of_replica)
    total: np.ndarray = strategy.reduce("SUM", values, axis=None).numpy()
    return total


def _unbuild(optimizer: Any) -> None:
    """Make Keras build the optimizer again, because one rank was cancelled while it built it.

    Keras marks an optimizer as built before it has created its variables.
    """
    inner = optimizer
    while isinstance(inner, keras.optimizers.LossScaleOptimizer):  # it does not count steps itself
        inner = inner.inner_optimizer
    if not optimizer.built or int(_read(_count(inner))):
        return
    for variable in optimizer.variables:
        if variable is not optimizer._iterations and variable is not optimizer._learning_rate:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables = []
    optimizer._trainable_variables_indices = {}
    optimizer.built = False


def _names(namespace: dict[str, Any], variables: list[Any]) -> Iterator[tuple[int, str]]:
    """Yield the ids of variables with the user's names for them."""
    wanted = {id(variable) for variable in variables}
    for path, value in reachable(namespace, namespace):
        for variable in _variables(value):
            if id(variable) in wanted:
                yield id(variable), path


def _variables(value: Any) -> Iterator[Any]:
    owned = value.variables if isinstance(value, _OWNERS) else (value,)
    if isinstance(value, (keras.random.SeedGenerator, tf.random.Generator)):
        owned = (value.state,)
    if isinstance(value, keras.Model) and getattr(value, "optimizer", None) is not None:
        owned = (*owned, *value.optimizer.variables)
    for variable in owned:
        yield _unwrapped(variable)


def _unwrapped(variable: Any) -> Any:
    """Return the value of a Keras variable as it is stored, which may be missing."""
    return variable._value if isinstance(variable, keras.Variable) else variable


_HOLDERS = (
    *(keras.Variable, BaseOptimizer, keras.random.SeedGenerator),
    *(tf.random.Generator, tf.distribute.DistributedValues),
)
_OWNERS = (keras.layers.Layer, BaseOptimizer, keras.metrics.Metric, tf.Module)
