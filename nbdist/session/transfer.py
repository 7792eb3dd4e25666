"""Transfer of objects between the notebook and the workers: the notebook's side."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from types import FunctionType, ModuleType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from nbdist.errors import TransferError
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Apply = Callable[[Callable[..., Any], Any, Sequence[int]], list[Any]]

_FRAMEWORKS = frozenset({"tensorflow", "keras", "jax", "jaxlib", "flax"})


def pull(
    apply: Apply, names: Sequence[str], ranks: Sequence[int], every: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return objects by rank and name; see `Cluster.pull`.

    Args:
        apply: calls a function with an argument on ranks.
        names: names on the ranks.
        ranks: the ranks to copy from.
        every: all ranks, which gather the arrays that are split over them.
    """
    missing = apply(transfer.missing, list(names), ranks)
    lacking = {rank: lost for rank, lost in zip(ranks, missing, strict=True) if lost}
    if lacking:
        text = "; ".join(f"rank {rank}: {', '.join(lost)}" for rank, lost in lacking.items())
        raise TransferError(f"no such name on the workers ({text}): define it in a %%dist_run cell")
    payloads = apply(transfer.get, list(names), ranks)
    if not all(isinstance(payload, bytes) for payload in payloads):
        _require_equal(apply(transfer.get, list(names), every))
        gathered = dict(zip(every, apply(transfer.get_gathered, list(names), every), strict=True))
        payloads = [gathered[rank] for rank in ranks]
    return {rank: read_objects(p) for rank, p in zip(ranks, payloads, strict=True)}


def _require_equal(split: Sequence[bytes | tuple[str, ...]]) -> None:
    """Raise TransferError unless all ranks list the same split arrays, in the same order."""
    if len(set(split)) > 1:
        texts = ["; ".join(s) if isinstance(s, tuple) else "none" for s in split]
        listed = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise TransferError(
            f"the ranks have different arrays that are split over them:\n{listed}\n"
            "Gather each in a cell first: multihost_utils.process_allgather(x, tiled=True)"
        )


class PickledObjects(NamedTuple):
    """Pickled objects.

    Attributes:
        content: the pickle.
        modules: modules at the top level that it refers to.
    """

    content: bytes
    modules: tuple[str, ...]


def write_objects(objects: Mapping[str, object]) -> PickledObjects:
    """Return the objects as a pickled dict.

    Raises:
        TransferError: objects cannot be pickled. The message contains all of them.
    """
    try:
        return _pickled(dict(objects))
    except Exception:  # noqa: BLE001 - an object's own pickling raises anything: find the object
        faults = [fault for fault in map(_fault, objects.items()) if fault]
    text = "\n".join(faults)
    raise TransferError(f"{text}\nNothing was pushed")


def fingerprint(value: object) -> bytes:
    """Return a digest of the pickled value. It takes about a second for a gigabyte."""
    return hashlib.blake2b(write_objects({"": value}).content, digest_size=16).digest()


def _fault(item: tuple[str, object]) -> str:
    name, value = item
    try:
        _pickled(value)
    except TransferError as error:
        return f"{name} ({type(value).__name__}) {error}"
    except Exception as error:  # noqa: BLE001 - an object's own pickling raises anything
        return (
            f"{name} ({type(value).__name__}) cannot be pickled ({error}): "
            "create it in a %%dist_run cell"
        )
    return ""


def _pickled(value: object) -> PickledObjects:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return PickledObjects(buffer.getvalue(), tuple(pickler.modules))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects of the notebook. It imports no framework.

    Attributes:
        modules: modules at the top level of the classes, functions and modules in the objects.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
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


def read_objects(payload: bytes) -> dict[str, Any]:
    """Return the dict that a rank sent.

    Raises:
        TransferError: an object cannot be read here, or needs a framework. The notebook does not
            import frameworks.
    """
    try:
        objects: dict[str, Any] = _WithoutFrameworks(io.BytesIO(payload)).load()
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"the notebook cannot read the worker's object: {error}") from error
    return objects


class _WithoutFrameworks(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in _FRAMEWORKS:
            raise TransferError(
                f"{module}.{name} needs {module.split('.')[0]}, and the notebook does not import "
                "it: pull the values in the object instead, such as .history of a History"
            )
        return super().find_class(module, name)
