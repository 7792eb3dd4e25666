"""Transfer of objects between the notebook and the workers: the notebook's side."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle

from nbdist.errors import TransferError
from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Apply = Callable[[Callable[..., Any], Any, Sequence[int]], list[Any]]

_FRAMEWORKS = frozenset({"tensorflow", "keras", "jax", "jaxlib", "flax"})


def pull(apply: Apply, names: Sequence[str], ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return objects by rank and name; see `Cluster.pull`.

    Args:
        apply: calls a function with an argument on ranks.
        names: names on the ranks.
        ranks: the ranks to copy from.
    """
    missing = apply(transfer.missing, list(names), ranks)
    lacking = {rank: lost for rank, lost in zip(ranks, missing, strict=True) if lost}
    if lacking:
        text = "; ".join(f"rank {rank}: {', '.join(lost)}" for rank, lost in lacking.items())
        raise TransferError(f"no such name on the workers ({text}): define it in a %%dist_run cell")
    payloads = apply(transfer.get, list(names), ranks)
    return {rank: read_objects(p) for rank, p in zip(ranks, payloads, strict=True)}


def write_objects(objects: Mapping[str, object]) -> bytes:
    """Return the objects as a pickled dict.

    Raises:
        TransferError: objects cannot be pickled. The message contains all of them.
    """
    try:
        return bytes(cloudpickle.dumps(dict(objects)))
    except Exception:  # noqa: BLE001 - an object's own pickling raises anything: find the object
        faults = [fault for fault in map(_fault, objects.items()) if fault]
    text = "\n".join(faults)
    raise TransferError(
        f"{text}\nNothing was pushed. Create such objects in a %%dist_run cell instead"
    )


def fingerprint(value: object) -> bytes:
    """Return a digest of the pickled value. It takes about a second for a gigabyte."""
    return hashlib.blake2b(write_objects({"": value}), digest_size=16).digest()


def _fault(item: tuple[str, object]) -> str:
    name, value = item
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - an object's own pickling raises anything
        return f"{name} ({type(value).__name__}) cannot be pickled: {error}"
    return ""


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
