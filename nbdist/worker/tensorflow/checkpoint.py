"""Checkpoints of TensorFlow's variables, as `tf.train.Checkpoint` has them.

What the user's names lead to is saved under the same names, so that it can be had without nbdist:

    folder = "FOLDER/step-00000050/tensorflow"
    tf.train.Checkpoint(model=model, optimizer=optimizer).read(f"{folder}/state")

A mirrored variable's value is copied into a variable of this process alone, in a tree of
`tf.train.Checkpoint` that looks as the user's objects do, and that a thread can write while steps
go on. Each rank writes the variables that may differ between replicas, such as metrics.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import of_facts
from nbdist.worker.keras.optimizer_config import flags
from nbdist.worker.keras.optimizers import optimizers_of
from nbdist.worker.runtime.reachable import names_in, of_kinds
from nbdist.worker.tensorflow.keras.objects import WITH_VARIABLES
from nbdist.worker.tensorflow.replica.summed_variables import is_summed
from nbdist.worker.tensorflow.replica_state import Alike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.checkpoint.folder import Own

_FILE = "state"


def of_fit(model: Any, names: Iterable[str], namespace: dict[str, Any]) -> TensorFlowState:
    """The model, its optimizer and metrics, and the Keras objects that a cell's names lead to."""
    roots = of_kinds(names, namespace, (*WITH_VARIABLES, tf.Variable, keras.Variable))
    if not any(root is model for root in roots.values()):
        roots = {"model of the fit": model, **roots}
    with model.distribute_strategy.scope():
        alike = {**roots, **optimizers_of(roots)}
    facts = flags(alike)
    extra = [variable for value in alike.values() for variable in _variables(value)]
    extra += model.metrics_variables
    return TensorFlowState(roots, extra, alike=Alike(alike), facts=lambda: facts)


class TensorFlowState:
    """The variables behind names.

    Args:
        roots: objects by the names that lead to them: variables, models, optimizers and the like.
        extra: further variables.
        alike: those of the variables that ranks should have alike.
        facts: numbers and the like that they should have alike, by name.
    """

    kind = "tensorflow"

    def __init__(
        self,
        roots: Mapping[str, Any],
        extra: Iterable[Any],
        *,
        alike: Alike,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self.names = names_in(roots)
        self._roots = roots
        self._extra = extra
        self._alike = alike
        self._facts = facts

    @functools.cached_property
    def _copies(self) -> _Copies:
        """They take as much memory as the variables: there are none before they are needed."""
        return _Copies(self._roots, self._extra, self._alike)

    def size(self) -> int:
        return self._copies.size()

    def copy(self) -> Callable[[Path], None]:
        return self._copies.copy()

    def assist(self) -> None:
        """Nothing is cut."""

    def own(self) -> dict[str, np.ndarray]:
        return self._copies.own()

    def digests(self) -> list[Digest]:
        return [*of_facts(self._facts()), *self._alike.digests()]

    def restore(self, folder: Path, own: Own) -> None:
        self._copies.restore(folder, own)


class _Copies:
    """The variables of a state, and a copy of each in a tree of the same form."""

    def __init__(self, roots: Mapping[str, Any], extra: Iterable[Any], alike: Alike) -> None:
        self._alike = alike
        self._nodes: dict[int, tuple[Any, Any]] = {}
        self._pairs: list[tuple[Any, tf.Variable]] = []
        self._own: list[Any] = []
        with tf.init_scope():
            self._root = self._node({name: self._shadow(value) for name, value in roots.items()})
            untracked = [*(v for root in roots.values() for v in _variables(root)), *extra]
            others = [v for v in map(_value, untracked) if id(v) not in self._nodes]
            self._root.others = self._node(
                {str(i): self._shadow(value) for i, value in enumerate(_unlike(others))}
            )
        self._copy = tf.function(self._copy_all, autograph=False)
        self._save = tf.function(self._save_all, autograph=False)

    def size(self) -> int:
        return sum(copy.shape.num_elements() * copy.dtype.size for _, copy in self._pairs)

    def copy(self) -> Callable[[Path], None]:
        self._copy()
        return self._write

    def own(self) -> dict[str, np.ndarray]:
        parts = ((i, j, part) for i, value in enumerate(self._own) for j, part in _parts(value))
        return {f"{i}/{j}": part.numpy() for i, j, part in parts}

    def restore(self, folder: Path, own: Own) -> None:
        try:
            self._root.read(str(folder / _FILE)).assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            first = str(error).splitlines()[0]
            raise StepError(
                f"the checkpoint {folder.parent} does not fit what the cell uses: {first}"
            ) from None
        parts = {
            f"{i}/{j}": (part, is_summed(value))
            for i, value in enumerate(self._own)
            for j, part in _parts(value)
        }
        if parts.keys() != own.values.keys():
            raise StepError(
                f"the checkpoint {folder.parent} does not fit what the cell uses: it has "
                f"{len(own.values)} values of this rank's own, and there are {len(parts)} here"
            )
        for value, copy in self._pairs:
            value.assign(copy)
        for name, (part, is_added_up) in parts.items():
            values = own.values[name]
            if is_added_up and own.is_new:
                values = np.zeros_like(values)
            for orphan in own.orphans if is_added_up else ():
                values = values + orphan[name]
            part.assign(values)

    def _copy_all(self) -> None:
        for value, copy in self._pairs:
            copy.assign(_first(value))

    def _save_all(self, path: tf.Tensor) -> None:
        """Outside a graph it would go through all objects each time, and hold up the steps."""
        self._root.write(path)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._save(tf.constant(str(folder / _FILE)))

    def _node(self, children: Mapping[str, Any]) -> tf.train.Checkpoint:
        node = tf.train.Checkpoint()
        for name, child in children.items():
            setattr(node, name, child)
        return node

    def _shadow(self, value: Any) -> Any:
        """What stands for it in the tree."""
        value = _value(value)
        if id(value) in self._nodes:
            return self._nodes[id(value)][0]
        if _is_variable(value):
            return self._shadow_of_variable(value)
        node = tf.train.Checkpoint()
        self._nodes[id(value)] = node, value
        for name, child in _children(value).items():
            setattr(node, name, self._shadow(child))
        return node

    def _shadow_of_variable(self, value: Any) -> Any:
        is_distributed = isinstance(value, tf.distribute.DistributedValues)
        if is_distributed and not self._alike.holds(value):
            self._own.append(value)
        if is_distributed and value.synchronization == tf.VariableSynchronization.ON_READ:
            copy = tf.train.Checkpoint()  # keeps its place in the tree
        else:
            zeros = tf.zeros(value.shape, value.dtype)
            copy = tf.Variable(zeros, trainable=False)
            self._pairs.append((value, copy))
        self._nodes[id(value)] = copy, value
        return copy


def _children(value: Any) -> dict[str, Any]:
    """By name; of what TensorFlow does not track, the variables by number."""
    if isinstance(value, tf.__internal__.tracking.Trackable):
        tracked = tf.train.TrackableView.children(value).items()
        return {name: child for name, child in tracked if child is not None}
    return {str(i): variable for i, variable in enumerate(_variables(value))}


def _variables(value: Any) -> Iterable[Any]:
    """TensorFlow does not track all that a Keras object has: not a Dropout's seeds, say."""
    return getattr(value, "variables", ())


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _unlike(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable) or (
        isinstance(value, tf.distribute.DistributedValues) and tf.is_tensor(value)
    )


def _parts(value: Any) -> Iterable[tuple[int, Any]]:
    return enumerate(value.values)


def _first(value: Any) -> Any:
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value
