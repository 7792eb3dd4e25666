"""Checkpoints of JAX arrays in Orbax's format, each array under its name and path.

    orbax.checkpoint.StandardCheckpointer().restore("FOLDER/step-00000050/orbax")["params['w']"]

Arrays are replicated or gathered first, and rank 0 alone writes them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import Digest, of_array, of_facts
from nbdist.worker.jax.arrays.leaves import as_data, gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from nbdist.worker.checkpoint.folder import Own


class Holder(Protocol):
    """Owner of arrays that a checkpoint saves and restores."""

    def saved(self) -> dict[str, jax.Array]:
        """Return the arrays to save, by name and path."""
        ...

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace the arrays by values of the same names, shapes and dtypes."""
        ...

    def alike(self) -> Iterator[tuple[str, jax.Array]]:
        """Yield the arrays that must be equal on all ranks, under names that the user knows."""
        ...

    def facts(self) -> dict[str, object]:
        """Return the numbers and flags that must be equal on all ranks."""
        ...


class JaxState:
    """State of a holder's arrays in a checkpoint.

    Args:
        holder: Owner of the arrays.
        names: Names of the cell whose values the state contains.
    """

    kind = "orbax"

    def __init__(self, holder: Holder, names: tuple[str, ...]) -> None:
        self.names = names
        self._holder = holder

    @functools.cached_property
    def is_empty(self) -> bool:
        return not self._holder.saved()

    def size(self) -> int:
        return sum(array.nbytes for array in self._holder.saved().values())

    def copy(self) -> Callable[[Path], None]:
        arrays = {name: on_host(array) for name, array in self._holder.saved().items()}
        if not arrays:  # Orbax refuses them
            return lambda _folder: None
        return lambda folder: write(folder, arrays)

    def assist(self) -> None:
        for array in self._holder.saved().values():
            jax.block_until_ready(gathered(array))

    def own(self) -> dict[str, np.ndarray]:
        return {}

    def digests(self) -> list[Digest]:
        """Return digests of this rank's copies: replicas of one array may differ by mistake."""
        copies = (
            Digest(name, of_array(as_data(array.addressable_data(0))))
            for name, array in self._holder.alike()
            if array.is_fully_replicated and not array.is_fully_addressable
        )
        return [*of_facts(self._holder.facts()), *copies]

    def restore(self, folder: Path, own: Own) -> None:
        del own
        self._holder.take(read(folder) if folder.exists() else {})


def on_host(array: jax.Array) -> np.ndarray:
    """Copy a whole array to the host; for random keys, their data. Collective if it is sharded."""
    return np.array(as_data(gathered(array)), copy=True)


def placed_like(values: np.ndarray, array: jax.Array) -> jax.Array:
    """Place values with the sharding and the dtype of an array."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        return jax.random.wrap_key_data(placed_like(values, data), impl=jax.random.key_impl(array))
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: values[index])


def check_fits(values: Mapping[str, np.ndarray], arrays: Mapping[str, Any]) -> None:
    """Check that a checkpoint's values match the arrays.

    Raises:
        StepError: Names or shapes differ.
    """
    empty = {name for name, array in arrays.items() if not array.size}
    missing = sorted(arrays.keys() - values.keys() - empty)
    unknown = sorted(values.keys() - arrays.keys())
    faults = [f"missing: {', '.join(missing)}"] if missing else []
    faults += [f"not used by the cell: {', '.join(unknown)}"] if unknown else []
    for name in sorted(values.keys() & arrays.keys()):
        was, now = tuple(values[name].shape), _shape(arrays[name])
        if was != now:
            faults.append(f"{name} has shape {was} in the checkpoint and {now} in the cell")
    if faults:
        raise StepError(f"the checkpoint does not match the cell's arrays: {'; '.join(faults)}")


def _shape(array: Any) -> tuple[int, ...]:
    """Return the shape as it is saved; for random keys, the shape of their data."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return tuple(jax.random.key_data(array).shape if is_key else array.shape)


def write(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name, or nested dicts of them, as a checkpoint of Orbax. Not collective."""
    # Orbax refuses arrays without elements, and they contain nothing to save.
    filled = {name: array for name, array in arrays.items() if getattr(array, "size", 1)}
    with _checkpointer() as orbax:
        orbax.save(folder, args=_arguments().PyTreeSave(filled))


def metadata(folder: Path) -> dict[str, Any]:
    """Return the `shape` and the `dtype` of each array of a checkpoint by name."""
    with _checkpointer() as orbax:
        return dict(orbax.metadata(folder).item_metadata.tree)


def read(folder: Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return arrays of a checkpoint by name. Default: all."""
    from orbax.checkpoint import RestoreArgs

    names = metadata(folder) if names is None else names
    arguments = _arguments().PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args={name: RestoreArgs(restore_type=np.ndarray) for name in names},
        partial_restore=True,
    )
    with _checkpointer() as orbax:
        arrays: dict[str, np.ndarray] = orbax.restore(folder, args=arguments)
    return arrays


def _checkpointer() -> Any:
    """Return an Orbax checkpointer that waits for no other process."""
    from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler
    from orbax.checkpoint.options import MultiprocessingOptions

    rank = jax.process_index()
    alone = MultiprocessingOptions(
        primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"nbdist-{rank}"
    )
    handler = PyTreeCheckpointHandler(multiprocessing_options=alone)
    return Checkpointer(handler, multiprocessing_options=alone)


def _arguments() -> Any:
    from orbax.checkpoint import args

    return args
