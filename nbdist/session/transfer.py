"""Objects between the notebook and the workers, as the notebook reads and writes them."""

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
    """Objects by rank and name, as `Cluster.pull` says.

    Args:
        apply: calls a function on ranks.
        names: on the ranks.
        ranks: from which they come.
    """
    missing = apply(transfer.missing, list(names), ranks)
    lacking = {rank: lost for rank, lost in zip(ranks, missing, strict=True) if lost}
    if lacking:
        text = "; ".join(f"rank {rank}: {', '.join(lost)}" for rank, lost in lacking.items())
        raise TransferError(f"no such name on the workers ({text}): define it in a %%dist_run cell")
    payloads = apply(transfer.get, list(names), ranks)
    return {rank: read_objects(p) for rank, p in zip(ranks, payloads, strict=True)}


def write_objects(objects: Mapping[str, object]) -> bytes:
    """The objects as a pickled dict.

    Raises:
        TransferError: some cannot be pickled; all of them are named.
    """
    try:
        return bytes(cloudpickle.dumps(dict(objects)))
    except Exception:  # noqa: BLE001 - whatever an object's own pickling raises: find whose
        faults = [fault for fault in map(_fault, objects.items()) if fault]
    text = "\n".join(faults)
    raise TransferError(f"{text}\nNothing was pushed: create it in a %%dist_run cell instead")


def fingerprint(value: object) -> bytes:
    """Of the value as it is pickled, which takes a second for a gigabyte."""
    return hashlib.blake2b(write_objects({"": value}), digest_size=16).digest()


def _fault(item: tuple[str, object]) -> str:
    name, value = item
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever the object's own pickling raises
        return f"{name} ({type(value).__name__}) cannot be pickled: {error}"
    return ""


def read_objects(payload: bytes) -> dict[str, Any]:
    """The dict that a rank sent.

    Raises:
        TransferError: an object needs a framework, which the notebook does not load, or cannot be
            read here.
    """
    try:
        objects: dict[str, Any] = _WithoutFrameworks(io.BytesIO(payload)).load()
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"what the worker sent cannot be read here: {error}") from error
    return objects


class _WithoutFrameworks(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in _FRAMEWORKS:
            raise TransferError(
                f"{module}.{name} needs {module.split('.')[0]}, which the notebook does not load: "
                "pull the numbers in it (of a History, its .history)"
            )
        return super().find_class(module, name)
