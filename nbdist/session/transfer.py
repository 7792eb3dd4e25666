"""Pickles of objects that the notebook copies to the workers."""

from __future__ import annotations

import hashlib
import pickle
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from nbdist.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np


class Sink(Protocol):
    """Receiver of a pickle."""

    def write(self, data: Any, /) -> object: ...


def write_objects(objects: Mapping[str, object], sink: Sink) -> tuple[str, ...]:
    """Write objects as a pickled dict.

    Args:
        objects: the objects by name.
        sink: receives the pickle.

    Returns:
        Modules at the top level that the pickle refers to.

    Raises:
        TransferError: objects cannot be pickled. The message contains all of them.
    """
    try:
        return _pickle(dict(objects), sink)
    except Exception:  # noqa: BLE001 - an object's own pickling raises anything: find the object
        faults = [fault for fault in map(_fault, objects.items()) if fault]
    text = "\n".join(faults)
    raise TransferError(f"{text}\nNothing was pushed")


def fingerprint(value: object) -> bytes:
    """Return a digest of the pickled value. It takes about a second for a gigabyte."""
    digest = _Digest()
    write_objects({"": value}, digest)
    return digest.found.digest()


class _Digest:
    """Sink that keeps only a digest."""

    def __init__(self) -> None:
        self.found = hashlib.blake2b(digest_size=16)

    def write(self, data: bytes | memoryview | pickle.PickleBuffer, /) -> None:
        self.found.update(data)


def _fault(item: tuple[str, object]) -> str:
    name, value = item
    try:
        _pickle(value, _Digest())
    except TransferError as error:
        return f"{name} ({type(value).__name__}) {error}"
    except Exception as error:  # noqa: BLE001 - an object's own pickling raises anything
        return (
            f"{name} ({type(value).__name__}) cannot be pickled ({error}): "
            "create it in a %%dist_run cell"
        )
    return ""


def _pickle(value: object, sink: Sink) -> tuple[str, ...]:
    """Write a value, and return the modules at the top level that it refers to."""
    pickler = _Pickler(sink)
    pickler.dump(value)
    return tuple(pickler.modules)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects of the notebook. It imports no framework.

    Attributes:
        modules: modules at the top level of the classes, functions and modules in the objects.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if _lacks_buffer(obj):
            return _reduced_array(obj)
        if isinstance(obj, (type, FunctionType, ModuleType)):
            name = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
            if name and name != "__main__":
                self.modules[name.partition(".")[0]] = None
        if "keras" in sys.modules:
            from nbdist.worker.remote import keras_transfer

            found = keras_transfer.reduced(obj)
            if found is not None:
                return found
        return super().reducer_override(obj)


def _lacks_buffer(value: Any) -> bool:
    """Return True for contiguous arrays of types without a buffer format.

    NumPy copies their elements to pickle them: bfloat16, float8, datetime64.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or not value.nbytes:
        return False
    kind, flags = value.dtype, value.flags
    return kind.kind in "VMm" and kind.names is None and (flags.c_contiguous or flags.f_contiguous)


def _reduced_array(array: np.ndarray) -> tuple[Any, ...]:
    """Return the pickle of such an array, as NumPy pickles others, without a copy."""
    elements: Any = array.ravel("K").view("u1")
    create, (buffer, *_) = elements.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    order = "C" if array.flags.c_contiguous else "F"
    return create, (buffer, array.dtype, array.shape, order)
