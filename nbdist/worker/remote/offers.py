"""Objects of a rank that the notebook pulls: a pickle, and parts of its large and sharded arrays.

Arrays of TensorFlow and JAX become NumPy arrays, so that the notebook needs neither framework. Of a
sharded array, each rank sends its own shards.
"""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from nbdist.worker.remote import relay
from nbdist.worker.runtime import context
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SLAB_BYTES = 4 << 20
_LARGE_BYTES = 1 << 20
"""Smallest array that is sent in parts. Smaller ones are in the pickle."""

_Box = tuple[slice, ...]


@dataclass(frozen=True)
class OfferedArray:
    """Array that is sent in parts.

    Attributes:
        dtype: type of its elements.
        shape: its shape.
        is_fortran: True if the first axis is contiguous.
        boxes: the parts of this rank.
        split: description of an array that is sharded over ranks; empty for others.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    boxes: tuple[_Box, ...]
    split: str = ""


@dataclass(frozen=True)
class Offer:
    """Objects of a rank.

    Attributes:
        content: pickled dict of the objects by name. `offered(i)` stands for array i.
        arrays: the arrays that are sent in parts.
    """

    content: bytes
    arrays: tuple[OfferedArray, ...]


@dataclass(frozen=True)
class Request:
    """Request for the parts of arrays.

    Attributes:
        pull: id of the pull.
        arrays: indices of the arrays.
        notebook: `host:port` or `unix:path` of the notebook.
        secret: key of the connection.
    """

    pull: str
    arrays: tuple[int, ...]
    notebook: str
    secret: bytes


_offers: dict[str, list[Any]] = {}


def offer(pull: str, names: list[str]) -> Offer:
    """Return the named objects. `send` sends the arrays in parts, and `release` ends the pull."""
    namespace = engine_shell().user_ns
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump({name: namespace[name] for name in names})
    if pickler.arrays:
        _offers[pull] = pickler.values
    return Offer(buffer.getvalue(), tuple(pickler.arrays))


def send(requests: dict[int, Request]) -> None:
    """Send the parts of arrays to the notebook, in the order of the request.

    Raises:
        OSError: the notebook does not receive them.
    """
    rank = context.current().rank
    request = requests[rank]
    values = _offers[request.pull]
    with relay.connected(request.notebook, request.secret, rank) as link:
        for index in request.arrays:
            for part in _parts(values[index]):
                for slab in slabs(part.shape, part.itemsize):
                    piece = np.ascontiguousarray(part[(*slab, ...)])
                    link.sendall(piece.reshape(-1).view("u1").data)
        if not link.recv(1):  # a close before would discard bytes under way
            raise ConnectionError("the notebook has not received all")


def release(pull: str) -> None:
    """Forget the arrays of a pull, if this rank has any."""
    _offers.pop(pull, None)


def offered(_index: int) -> None:
    """Stand for an array in a pickle. The notebook replaces it."""


def slabs(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield the indices of consecutive pieces of an array, in C order, each of bounded size."""
    if not shape or math.prod(shape) * itemsize <= SLAB_BYTES:
        if math.prod(shape):
            yield ()
        return
    rows = SLAB_BYTES // (math.prod(shape[1:]) * itemsize)
    for first in range(0, shape[0], max(1, rows)):
        if rows:
            yield (slice(first, first + rows),)
        else:
            yield from ((first, *rest) for rest in slabs(shape[1:], itemsize))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles arrays of all loaded frameworks as NumPy arrays, and offers large and sharded ones.

    Attributes:
        arrays: the offered arrays.
        values: their values.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.arrays: list[OfferedArray] = []
        self.values: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        found = _described(obj)
        if found is None:
            return super().reducer_override(obj)
        is_small = math.prod(found.shape) * found.dtype.itemsize < _LARGE_BYTES
        if found.dtype.hasobject or (is_small and not found.split):
            is_numpy = type(obj) is np.ndarray
            return super().reducer_override(obj) if is_numpy else np.asarray(obj).__reduce__()
        self.arrays.append(found)
        self.values.append(obj)
        return offered, (len(self.values) - 1,)


def _described(value: Any) -> OfferedArray | None:
    """Return the description of an array; None for other objects, and for texts and objects."""
    if type(value) is np.ndarray:
        flags = value.flags
        is_fortran = flags.f_contiguous and not flags.c_contiguous
        return replace(_whole(value.dtype, value.shape), is_fortran=is_fortran)
    if _is_of("jax", value, "Array"):
        return _of_jax(value)
    if _is_of("tensorflow", value, "Tensor", "Variable"):
        return _whole(np.dtype(value.dtype.as_numpy_dtype), tuple(value.shape))
    return None


def _is_of(framework: str, value: Any, *names: str) -> bool:
    """Return True if a value is an instance of a class of a framework that is loaded."""
    module = sys.modules.get(framework)
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in names))


def _whole(dtype: np.dtype[Any], shape: tuple[int, ...]) -> OfferedArray:
    """Describe an array that this rank has whole."""
    return OfferedArray(dtype, shape, is_fortran=False, boxes=(tuple(slice(0, n) for n in shape),))


def _of_jax(array: Any) -> OfferedArray:
    """Describe an array of JAX. The boxes are those of this rank's shards, each replica once."""
    import jax

    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        np.asarray(array)  # raises TypeError with JAX's advice for random keys
    dtype, shape = np.dtype(array.dtype), array.shape
    if array.is_fully_replicated:
        return _whole(dtype, shape)
    boxes = tuple(
        tuple(slice(*cut.indices(n)[:2]) for cut, n in zip(shard.index, shape, strict=True))
        for shard in _own_shards(array)
    )
    split = "" if array.is_fully_addressable else f"{dtype}{list(shape)} over {array.sharding}"
    return OfferedArray(dtype, shape, is_fortran=False, boxes=boxes, split=split)


def _own_shards(array: Any) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _parts(value: Any) -> Iterator[np.ndarray]:
    """Yield the parts of an offered array as NumPy arrays, in the order of its boxes."""
    if not _is_of("jax", value, "Array"):
        whole = np.asarray(value)
        flags = whole.flags
        yield whole.T if flags.f_contiguous and not flags.c_contiguous else whole
    elif value.is_fully_replicated:
        yield np.asarray(value.addressable_data(0))
    else:
        for shard in _own_shards(value):
            yield np.asarray(shard.data)
