"""Preserve the user's arrays on the host while JAX's backend is rebuilt.

After aborted collectives, the backend is rebuilt in the same process, with the same rank and device
ids. Every `jax.Array` of the old backend becomes invalid.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.rebuild.arrays import Devices, SavedArray
from nbdist.worker.jax.rebuild.walk import LostValue, Walk

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Renew

_log = logging.getLogger(__name__)

_NOT_THE_USERS = {"In", "Out", "exit", "quit", "get_ipython", "strategy", "mesh"}
"""Names of IPython, and names that nbdist sets itself after a rebuild."""


class PreservedArrays:
    """Arrays of a namespace, saved on the host.

    Includes every value that `Walk` finds: arrays and random keys, meshes, shardings and devices.
    They may be in pytrees, dicts, lists, and objects of Flax NNX, Keras and the notebook's own
    classes. Containers and objects change in place, and shared values stay shared.

    Excludes arrays that functions capture (closures, defaults, `functools.partial`), functions
    compiled for old shardings, `jax.Ref`, and objects of other libraries. Also excludes names with
    a leading underscore and IPython's `Out`. The old arrays, and the memory of the old backend, are
    kept until this object is dropped.
    """

    def __init__(self) -> None:
        self._saved: dict[int, SavedArray] = {}
        self._names: list[str] = []
        self._lost: list[str] = []

    @classmethod
    def take(cls, namespace: dict[str, Any]) -> PreservedArrays:
        """Copy the arrays to the host; call it before the backend is cleared.

        Waits for running computations. A name is lost if an array cannot be read: its computation
        failed, or it was donated to a step that failed.
        """
        preserved = cls()
        for name, value in _of_the_user(namespace):
            try:
                Walk(preserved._save, _renewers())(value)
            except LostValue:
                preserved._lost.append(name)
            except Exception as error:  # noqa: BLE001 - the user's objects may raise anything
                _log.warning("`%s` cannot be inspected and is not changed: %s", name, error)
            else:
                preserved._names.append(name)
        for generator in _keras_seeds():
            with contextlib.suppress(LostValue):
                Walk(preserved._save, _renewers())(generator)
        return preserved

    def put_back(self, namespace: dict[str, Any]) -> tuple[str, ...]:
        """Restore the arrays on the devices of the new backend.

        Keeps values, dtypes, shardings, memory kinds and whether an array is committed. Meshes use
        the devices of the same ids. JAX has one object for equal meshes, so the strategy's mesh
        stays equal to the user's.

        Returns:
            The names that are lost; they are removed from the namespace.
        """
        devices = Devices()
        renew = Walk(lambda leaf: self._renewed(leaf, devices), _renewers())
        for name in self._names:
            if name not in namespace:
                continue
            try:
                namespace[name] = renew(namespace[name])
            except LostValue:
                self._lost.append(name)
            except Exception as error:  # noqa: BLE001 - out of memory, or an object that cannot be rebuilt
                _log.warning("`%s` cannot be restored: %s", name, error)
                self._lost.append(name)
        for name in self._lost:
            namespace.pop(name, None)
        for generator in _keras_seeds():
            with contextlib.suppress(LostValue):
                renew(generator)
        return tuple(self._lost)

    def _save(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) not in self._saved:
            self._saved[id(leaf)] = SavedArray.of(leaf)
        return leaf

    def _renewed(self, leaf: Any, devices: Devices) -> Any:
        if not isinstance(leaf, jax.Array):
            return devices.renewed(leaf)
        if id(leaf) not in self._saved:
            raise LostValue
        return self._saved[id(leaf)].made(devices)


def _of_the_user(namespace: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in namespace.items()
        if not name.startswith("_") and name not in _NOT_THE_USERS
    ]


def _keras_is_on_jax() -> bool:
    """Return True if the user's program has imported Keras with the JAX backend."""
    keras = sys.modules.get("keras")
    return keras is not None and keras.backend.backend() == "jax"


def _renewers() -> list[Renew]:
    """Return the renewers of the libraries that the user's program has imported."""
    renewers: list[Renew] = []
    if _keras_is_on_jax():
        from nbdist.worker.jax.rebuild import keras as keras_rebuild

        renewers.append(keras_rebuild.renew)
    if "flax.nnx" in sys.modules:
        from nbdist.worker.jax.rebuild import nnx as nnx_rebuild

        renewers.append(nnx_rebuild.renew)
    return renewers


def _keras_seeds() -> list[Any]:
    """Return Keras's global seed generator, which no name of the user refers to."""
    if not _keras_is_on_jax():
        return []
    from nbdist.worker.jax.rebuild import keras as keras_rebuild

    return [keras_rebuild.seeds()]
