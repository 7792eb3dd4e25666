"""Objects that the notebook copied to the workers, read for an exported program.

The kernel imports no framework for them: arrays of JAX and TensorFlow are read as NumPy arrays, and
objects that no program can contain as `Opaque`.
"""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_READ = {
    *("numpy", "ml_dtypes", "pandas", "pyarrow", "polars", "datasets"),
    *("dateutil", "pytz", "fsspec"),
    *sys.stdlib_module_names,
}
"""Packages whose objects are created. Objects of others are opaque."""


@dataclass(frozen=True)
class FrameworkArray:
    """An array of JAX or TensorFlow.

    Attributes:
        framework: the package of its type.
        values: its elements. Texts of TensorFlow are bytes.
        is_weak: True if JAX promotes its type to that of the other operand.
    """

    framework: Literal["jax", "tensorflow"]
    values: np.ndarray
    is_weak: bool = False


class Opaque(type):
    """Type of the classes that stand for objects of other packages.

    Pickles call, index and extend such objects. Each operation returns the class itself.
    """

    def __call__(cls, *_: object, **__: object) -> Any:
        return cls

    def __setstate__(cls, _state: object) -> None:
        pass

    def __setitem__(cls, _key: object, _value: object) -> None:
        pass

    def append(cls, _value: object) -> None:
        """Ignore an element."""

    extend = add = append


def read(payload: bytes) -> Mapping[str, object]:
    """Return pushed objects by name.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        objects: dict[str, object] = _Reader(io.BytesIO(payload)).load()
    except Exception as error:  # noqa: BLE001 - an object's own pickle raises anything
        raise UsageError(
            f"cannot export an object that was copied from the notebook ({error}): create it in a "
            "%%dist_run cell"
        ) from None
    return objects


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package == "jax" and name == "_reconstruct_array":
            return _jax_array
        if package == "tensorflow" and name == "convert_to_tensor":
            return _tensor
        if package in _READ:
            return super().find_class(module, name)
        return _opaque(module, name)


def _tensor(values: object) -> FrameworkArray:
    """Return a tensor that `tf.Tensor.__reduce__` describes (TensorFlow 2.21.0)."""
    kind = object if isinstance(values, bytes) else None  # NumPy's own texts lose zeros at the end
    return FrameworkArray("tensorflow", np.asarray(values, kind))


def _jax_array(
    create: Callable[..., np.ndarray],
    arguments: tuple[object, ...],
    state: object,
    type_state: Mapping[str, object],
) -> FrameworkArray:
    """Return an array that `jax.Array.__reduce__` describes (JAX 0.10.2)."""
    values: Any = create(*arguments)
    values.__setstate__(state)
    return FrameworkArray("jax", values, bool(type_state.get("weak_type")))


def _opaque(module: str, name: str) -> Opaque:
    """Return the stand-in for an object; its name is for messages."""
    if module.startswith("cloudpickle"):
        kind = "function or class of the notebook"
    elif module.endswith(".keras_transfer"):
        kind = "object of Keras"
    else:
        kind = f"{module.partition('.')[0]}.{name.rpartition('.')[2]}"
    return Opaque(kind, (), {"__new__": lambda cls, *_, **__: cls})
