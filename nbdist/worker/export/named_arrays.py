"""Arrays of a model, a tree or a checkpoint, each with a name and a function that reads it.

Names are the paths of the arrays with dots, such as `encoder.layers.0.kernel`. All ranks read the
same arrays in the same order: reading an array that is sharded over ranks is a collective.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import UsageError
from nbdist.worker.checkpoint.folder import Checkpoint, steps_in
from nbdist.worker.inspection.placement import readers
from nbdist.worker.inspection.types import Inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

_WORD = re.compile(r"\w+")
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""End of the name of a variable's value in a checkpoint of TensorFlow."""


@dataclass(frozen=True)
class NamedArray:
    """An array to export.

    Attributes:
        name: path with dots.
        nbytes: size of the whole array.
        read: returns the whole array on the host. Collective if it is sharded over ranks.
    """

    name: str
    nbytes: int
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Contents:
    """Arrays of a value, and the paths of what is no array.

    Attributes:
        arrays: the arrays.
        keys: typed keys and counters of random generators.
        others: numbers, texts, functions and other objects. Code does not count.
    """

    arrays: list[NamedArray]
    keys: list[str]
    others: list[str]


@dataclass(frozen=True)
class _Stored:
    """An array of a checkpoint."""

    shape: Sequence[int]
    dtype: Any
    load: Callable[[], np.ndarray]


def is_keras_model(value: Any) -> bool:
    """Return True for a Keras model. This never imports Keras."""
    if "keras" not in sys.modules:
        return False
    import keras

    return isinstance(value, keras.Model)


def of_value(value: Any) -> Contents:
    """Return the arrays in a model, a module or a tree.

    Raises:
        UsageError: it contains no array.
    """
    if is_keras_model(value):  # its metrics and seeds are no weights
        own = f"{value.name}/"
        weights = (([w.path.removeprefix(own)], w.value) for w in value.weights)
        return Contents(_named(weights), [], [])
    contents = _leaves(value)
    if not contents.arrays:
        raise UsageError(f"{type(value).__name__} contains no arrays to export")
    return contents


def of_checkpoint(folder: Path) -> Contents:
    """Return the arrays of the newest checkpoint in a folder, or of one checkpoint.

    Raises:
        UsageError: the folder contains no checkpoint.
    """
    steps = steps_in(folder)
    if not steps and not (folder / "manifest.json").is_file():
        raise UsageError(f"{folder} contains no checkpoint of nbdist (step-00000050, ...)")
    path = Checkpoint(folder, steps[-1]).path if steps else folder
    if (path / "orbax").is_dir():
        return Contents(_named(_of_orbax(path / "orbax")), [], [])
    return Contents(_named(_of_tensorflow(path / "tensorflow" / "state")), [], [])


def _of_orbax(folder: Path) -> Iterator[tuple[Sequence[str], _Stored]]:
    from nbdist.worker.jax.arrays import checkpoint

    def load(name: str) -> np.ndarray:
        return checkpoint.read(folder, [name])[name]

    for name, array in sorted(checkpoint.metadata(folder).items()):
        yield [name], _Stored(array.shape, array.dtype, functools.partial(load, name))


def _of_tensorflow(path: Path) -> Iterator[tuple[Sequence[str], _Stored]]:
    import tensorflow as tf
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    reader = tf.train.load_checkpoint(str(path))
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    graph = TrackableObjectGraph.FromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    names = {a.checkpoint_key: a.full_name for node in graph.nodes for a in node.attributes}
    for key in sorted(names):
        load = functools.partial(reader.get_tensor, key)
        yield [_name(key, names[key])], _Stored(shapes[key], dtypes[key], load)


def _name(key: str, own: str) -> str:
    """Return a variable's own name, or the user's name for an object that contains it."""
    return key.removesuffix(_VALUE) if own == "Variable" else own


def _leaves(value: Any) -> Contents:
    """Return the leaves in the order of the tree, each object once."""
    known, waiting = readers(), [((), value)]
    seen: dict[int, Any] = {}
    arrays: list[tuple[Sequence[str], Any]] = []
    keys: list[str] = []
    others: list[str] = []
    while waiting:
        path, part = waiting.pop()
        if id(part) in seen or part is None:
            continue
        if _is_random_state(part):
            keys.append(_dotted(path))
            seen[id(part)] = part  # stored: ids are not reused
            continue
        found = next((f for reader in known if (f := reader(part)) is not None), None)
        if isinstance(found, Inside):
            waiting.extend(((*path, *more), inner) for more, inner in reversed(found.parts))
        elif found is not None:
            arrays.append((path, part))
        else:
            others.append(_dotted(path))  # small numbers are shared: each path counts
            continue
        seen[id(part)] = part
    return Contents(_named(arrays), keys, others)


def _dotted(path: Sequence[str]) -> str:
    return ".".join(word for part in path for word in _WORD.findall(part)) or "value"


def _is_random_state(part: Any) -> bool:
    """Return True for a random key of JAX, and for a key or a counter of Flax NNX."""
    if "flax.nnx" in sys.modules:
        from flax import nnx

        if isinstance(part, nnx.RngState):
            return True
    return "jax" in sys.modules and str(getattr(part, "dtype", "")).startswith("key<")


def _named(leaves: Iterable[tuple[Sequence[str], Any]]) -> list[NamedArray]:
    """Name each array by its path; later arrays with the name of an earlier one get a number."""
    counts: Counter[str] = Counter()
    named = []
    for path, array in leaves:
        name = _dotted(path)
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}.{counts[name]}"
        size = int(np.prod(array.shape)) * np.dtype(_dtype(array)).itemsize
        named.append(NamedArray(name, size, functools.partial(_on_host, array)))
    return named


def _dtype(array: Any) -> Any:
    return getattr(array.dtype, "as_numpy_dtype", array.dtype)  # TensorFlow's dtypes have it


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, _Stored):
        return np.asarray(array.load())  # TensorFlow reads scalars as NumPy's
    if "jax" in sys.modules:
        import jax

        from nbdist.worker.jax.arrays.checkpoint import on_host

        if isinstance(array, jax.Array):
            return on_host(array)
    return np.array(array.numpy() if hasattr(array, "numpy") else array)
