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


def is_keras_model(value: Any) -> bool:
    """Return True for a Keras model. This never imports Keras."""
    if "keras" not in sys.modules:
        return False
    import keras

    return isinstance(value, keras.Model)


def of_value(value: Any) -> list[NamedArray]:
    """Return the arrays in a model, a module or a tree, without keys of random generators.

    Raises:
        UsageError: it contains no array.
    """
    if is_keras_model(value):  # its metrics and seeds are no weights
        own = f"{value.name}/"
        return _named(([w.path.removeprefix(own)], w.value) for w in value.weights)
    found = _named(_leaves(value))
    if not found:
        raise UsageError(f"{type(value).__name__} contains no arrays to export")
    return found


def of_checkpoint(folder: Path) -> list[NamedArray]:
    """Return the arrays of the newest checkpoint in a folder, or of one checkpoint.

    Raises:
        UsageError: the folder contains no checkpoint.
    """
    steps = steps_in(folder)
    if not steps and not (folder / "manifest.json").is_file():
        raise UsageError(f"{folder} contains no checkpoint of nbdist (step-00000050, ...)")
    path = Checkpoint(folder, steps[-1]).path if steps else folder
    if (path / "orbax").is_dir():
        from nbdist.worker.jax.arrays.checkpoint import read

        return _named(([name], array) for name, array in sorted(read(path / "orbax").items()))
    import tensorflow as tf
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    reader = tf.train.load_checkpoint(str(path / "tensorflow" / "state"))
    graph = TrackableObjectGraph.FromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    names = {a.checkpoint_key: a.full_name for node in graph.nodes for a in node.attributes}
    return _named(([_name(key, names[key])], reader.get_tensor(key)) for key in sorted(names))


def _name(key: str, own: str) -> str:
    """Return a variable's own name, or the user's name for an object that contains it."""
    return key.removesuffix(_VALUE) if own == "Variable" else own


def _leaves(value: Any) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield the path and the array of each leaf, in the order of the tree, each object once."""
    known, waiting = readers(), [((), value)]
    seen: dict[int, Any] = {}
    while waiting:
        path, part = waiting.pop()
        found = next((f for reader in known if (f := reader(part)) is not None), None)
        if found is None or id(part) in seen or _is_random_state(part):
            continue
        seen[id(part)] = part  # stored: ids are not reused
        if isinstance(found, Inside):
            waiting.extend(((*path, *more), inner) for more, inner in reversed(found.parts))
        else:
            yield path, part


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
        name = ".".join(word for part in path for word in _WORD.findall(part)) or "value"
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name}.{counts[name]}"
        size = int(np.prod(array.shape)) * np.dtype(_dtype(array)).itemsize
        named.append(NamedArray(name, size, functools.partial(_on_host, array)))
    return named


def _dtype(array: Any) -> Any:
    return getattr(array.dtype, "as_numpy_dtype", array.dtype)  # TensorFlow's dtypes have it


def _on_host(array: Any) -> np.ndarray:
    if "jax" in sys.modules:
        import jax

        from nbdist.worker.jax.arrays.checkpoint import on_host

        if isinstance(array, jax.Array):
            return on_host(array)
    return np.array(array.numpy() if hasattr(array, "numpy") else array)
