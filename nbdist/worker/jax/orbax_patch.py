"""Patch of Orbax for cells that run on several processes.

Orbax expects one folder on a shared file system, and arrays over all processes. A cell that was
written for one process has neither: `tempfile.mkdtemp()` returns another folder on each worker, and
arrays are on one device. Without this patch, Orbax refuses the arrays, or the ranks wait for each
other's folders for 5 minutes and more. With it, the folder is that of rank 0, and arrays of one
process count as replicated ones. `tests/worker/jax/test_orbax_patch.py` fails when Orbax does this
itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import zlib
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nbdist.private_api.jax import ArrayImpl
from nbdist.private_api.orbax import jax_array_handlers
from nbdist.worker.jax.arrays.leaves import placed
from nbdist.worker.jax.runtime import processes
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PATH_BYTES = 4096
_IN_FOLDER = (
    (ocp.Checkpointer, "save"),
    (ocp.Checkpointer, "restore"),
    (ocp.AsyncCheckpointer, "save"),
    (ocp.AsyncCheckpointer, "restore"),
)
"""Methods whose first argument is a folder."""

_init_upstream = ocp.CheckpointManager.__init__
_upstream = {(owner, name): getattr(owner, name) for owner, name in _IN_FOLDER}
_serialize_upstream = jax_array_handlers.ArrayHandler.serialize
_deserialize_upstream = jax_array_handlers.ArrayHandler.deserialize


@functools.cache
def apply() -> None:
    """Patch Orbax's checkpointers and its handler of arrays."""
    for (owner, name), method in _upstream.items():
        setattr(owner, name, _in_common_folder(method))
    ocp.CheckpointManager.__init__ = _init
    jax_array_handlers.ArrayHandler.serialize = _serialize
    jax_array_handlers.ArrayHandler.deserialize = _deserialize


def _in_common_folder(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpointer's method use rank 0's folder on every rank.

    Collective, unless the checkpointer is for some processes only, as nbdist's own is.
    """

    @functools.wraps(method)
    def wrapped(self: Any, directory: Any, *args: Any, **kwargs: Any) -> Any:
        common = _common(directory) if self._active_processes is None else directory
        return method(self, common, *args, **kwargs)

    return wrapped


@functools.wraps(_init_upstream)
def _init(self: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(_init_upstream).bind(self, directory, *args, **kwargs).arguments
    options = given.get("options") or ocp.CheckpointManagerOptions()
    is_of_all = options.multiprocessing_options.active_processes is None
    _init_upstream(self, _common(directory) if is_of_all else directory, *args, **kwargs)


def _common(directory: Any) -> Any:
    """Return rank 0's folder. Collective."""
    own = os.fspath(directory)
    text = own.encode()
    if jax.process_count() == 1 or len(text) > _PATH_BYTES:
        return directory
    if len(np.unique(processes.agree([zlib.crc32(text)]))) == 1:
        return directory
    padded = np.frombuffer(text.ljust(_PATH_BYTES, b"\0"), np.uint8)
    chiefs = bytes(np.asarray(processes.chiefs(padded))).rstrip(b"\0").decode()
    if context.current().rank == 0:
        _note_once()
    return type(directory)(chiefs)


@functools.cache
def _note_once() -> None:
    context.current().reporter.note(
        "checkpoint",
        "the ranks pass different folders to Orbax, such as those of tempfile.mkdtemp(): all use "
        "the folder of rank 0",
    )


async def _serialize(self: Any, values: Sequence[jax.Array], *args: Any, **kwargs: Any) -> Any:
    strategy = context.strategies().get("pjrt")
    if strategy is not None and jax.process_count() > 1:
        whole = jax.NamedSharding(strategy.mesh, jax.P())
        values = [placed(value, whole) if _is_local(value) else value for value in values]
    return await _serialize_upstream(self, values, *args, **kwargs)


async def _deserialize(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Restore arrays; those on one device are uncommitted, as all arrays of a plain cell are."""
    return [_uncommitted(value) for value in await _deserialize_upstream(self, *args, **kwargs)]


def _uncommitted(value: Any) -> Any:
    is_first = isinstance(value, jax.Array) and value.sharding.device_set == {
        jax.local_devices()[0]
    }
    is_key = is_first and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not is_first or is_key or jax.process_count() == 1:
        return value
    parts = [value.addressable_data(0)]  # no public call makes such an array of another one
    return ArrayImpl(value.aval, value.sharding, parts, committed=False)


def _is_local(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_fully_addressable
