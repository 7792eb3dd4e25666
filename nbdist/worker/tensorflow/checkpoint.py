"""Checkpoints of TensorFlow's variables in the format of `tf.train.Checkpoint`.

Objects are saved under the user's names for them, so they can be read without nbdist:

    folder = "FOLDER/step-00000050/tensorflow"
    tf.train.Checkpoint(model=model, optimizer=optimizer).read(f"{folder}/state")

nbdist copies the value of a mirrored variable into a local variable of this process. The copies
form a tree of `tf.train.Checkpoint` with the same structure as the user's objects. A thread can
write this tree while steps continue. Each rank writes the variables that may differ between
replicas, such as metrics.
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
from nbdist.worker.tensorflow.keras_objects import WITH_VARIABLES, tensorflow_variable
from nbdist.worker.tensorflow.replica.summed_variables import is_summed
from nbdist.worker.tensorflow.replica_state import EqualVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.checkpoint.folder import Own

_FILE = "state"


def of_fit(model: Any, names: Iterable[str], namespace: dict[str, Any]) -> TensorFlowState:
    """Return the state of the model, its optimizer and metrics, and further Keras objects."""
    roots = of_kinds(names, namespace, (*WITH_VARIABLES, tf.Variable, keras.Variable))
    if not any(root is model for root in roots.values()):
        roots = {"model of the fit": model, **roots}
    with model.distribute_strategy.scope():
        alike = {**roots, **optimizers_of(roots)}
    facts = flags(alike)
    extra = [variable for value in alike.values() for variable in _variables(value)]
    extra += model.metrics_variables
    return TensorFlowState(roots, extra, alike=EqualVariables(alike), facts=lambda: facts)


class TensorFlowState:
    """State of the variables that names refer to.

    Args:
        roots: variables, models, optimizers and similar objects by name.
        extra: further variables.
        alike: variables that should be equal on all ranks.
        facts: returns further values that should be equal on all ranks, by name.
    """

    kind = "tensorflow"
    is_empty = False

    def __init__(
        self,
        roots: Mapping[str, Any],
        extra: Iterable[Any],
        *,
        alike: EqualVariables,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        self.names = names_in(roots)
        self._roots = roots
        self._extra = extra
        self._equal_variables = alike
        self._facts = facts

    @functools.cached_property
    def _copies(self) -> _Copies:
        """Copies, created at first use because they take as much memory as the variables."""
        return _Copies(self._roots, self._extra, self._equal_variables)

    def size(self) -> int:
        return self._copies.size()

    def copy(self) -> Callable[[Path], None]:
        return self._copies.copy()

    def assist(self) -> None:
        """Do nothing: variables are not sharded."""

    def own(self) -> dict[str, np.ndarray]:
        return self._copies.own()

    def digests(self) -> list[Digest]:
        return [*of_facts(self._facts()), *self._equal_variables.digests()]

    def restore(self, folder: Path, own: Own) -> None:
        self._copies.restore(folder, own)


class _Copies:
    """Variables of a state, with a copy of each in a tree of the same structure."""

    def __init__(
        self, roots: Mapping[str, Any], extra: Iterable[Any], alike: EqualVariables
    ) -> None:
        self._equal_variables = alike
        self._nodes: dict[int, tuple[Any, Any]] = {}
        self._pairs: list[tuple[Any, tf.Variable]] = []
        self._own: list[Any] = []
        with tf.init_scope():
            self._root = self._node({name: self._shadow(value) for name, value in roots.items()})
            untracked = [*(v for root in roots.values() for v in _variables(root)), *extra]
            unwrapped = map(tensorflow_variable, untracked)
            others = {id(v): v for v in unwrapped if id(v) not in self._nodes}
            self._root.others = self._node(
                {str(i): self._shadow(value) for i, value in enumerate(others.values())}
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
                f"the checkpoint {folder.parent} does not match the objects of the cell: {first}"
            ) from None
        parts = {
            f"{i}/{j}": (part, is_summed(value))
            for i, value in enumerate(self._own)
            for j, part in _parts(value)
        }
        if parts.keys() != own.values.keys():
            raise StepError(
                f"the checkpoint {folder.parent} does not match the objects of the cell: it has "
                f"{len(own.values)} values of this rank, and the cell has {len(parts)}"
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
        """Write the tree in a graph. Eager code would visit all objects and delay the steps."""
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
        """Return the node that represents an object in the tree."""
        value = tensorflow_variable(value)
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
        if is_distributed and not self._equal_variables.holds(value):
            self._own.append(value)
        if is_distributed and value.synchronization == tf.VariableSynchronization.ON_READ:
            copy = tf.train.Checkpoint()  # an empty node in the tree
        else:
            zeros = tf.zeros(value.shape, value.dtype)
            copy = tf.Variable(zeros, trainable=False, name=value.name.partition(":")[0])
            self._pairs.append((value, copy))
        self._nodes[id(value)] = copy, value
        return copy


def _children(value: Any) -> dict[str, Any]:
    """Return children by name, or variables by number if TensorFlow does not track the object."""
    if isinstance(value, tf.__internal__.tracking.Trackable):
        tracked = tf.train.TrackableView.children(value).items()
        return {name: child for name, child in tracked if child is not None}
    return {str(i): variable for i, variable in enumerate(_variables(value))}


def _variables(value: Any) -> Iterable[Any]:
    """Return an object's variables. TensorFlow does not track all, such as a Dropout's seeds."""
    return getattr(value, "variables", ())


def _is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable) or (
        isinstance(value, tf.distribute.DistributedValues) and tf.is_tensor(value)
    )


def _parts(value: Any) -> Iterable[tuple[int, Any]]:
    return enumerate(value.values)


def _first(value: Any) -> Any:
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value
