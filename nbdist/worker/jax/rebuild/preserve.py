"""The user's arrays across a rebuild of JAX's backend: on the host meanwhile.

When collectives were broken off, the backend is torn down and built again in the same process:
the same rank, devices of the same ids. Every `jax.Array` dies with the old one.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.jax.rebuild.arrays import Devices, SavedArray
from nbdist.worker.jax.rebuild.walk import Lost, Walk

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Renew

_log = logging.getLogger(__name__)

_NOT_THE_USERS = {"In", "Out", "exit", "quit", "get_ipython", "strategy", "mesh"}
"""IPython's names, and ours: who builds the backend again sets those."""


class PreservedArrays:
    """What of a namespace was in arrays of JAX, on the host.

    Covered is what `Walk` finds: arrays and random keys in pytrees, in dicts and lists (which stay
    the same objects), in objects of Flax NNX and of Keras and of the notebook's own classes (in
    place), and the meshes, shardings and devices among them. What several names share stays shared.

    Not covered are arrays that functions have captured (closures, defaults, `functools.partial`),
    functions compiled for shardings of the old devices, `jax.Ref`, objects of other libraries,
    names that begin with an underscore and IPython's `Out`. It keeps the old arrays, and so the old
    backend's memory, until it is dropped.
    """

    def __init__(self) -> None:
        self._saved: dict[int, SavedArray] = {}
        self._names: list[str] = []
        self._lost: list[str] = []

    @classmethod
    def take(cls, namespace: dict[str, Any]) -> PreservedArrays:
        """Copy the arrays to the host; to be called before the backend is cleared.

        Waits for computations that are under way. Names whose arrays cannot be read are lost: an
        array was donated to a step that failed, or its own computation failed.
        """
        preserved = cls()
        for name, value in _of_the_user(namespace):
            try:
                Walk(preserved._save, _renewers())(value)
            except Lost:
                preserved._lost.append(name)
            except Exception as error:  # noqa: BLE001 - whatever a strange object raises
                _log.warning("`%s` was not looked through and stays as it is: %s", name, error)
            else:
                preserved._names.append(name)
        for generator in _keras_seeds():
            with contextlib.suppress(Lost):
                Walk(preserved._save, _renewers())(generator)
        return preserved

    def put_back(self, namespace: dict[str, Any]) -> tuple[str, ...]:
        """Make the arrays again on the devices of the new backend.

        Values, types, shardings, memory kinds and whether an array is bound to its devices are
        what they were. Meshes are made of the devices of the same ids: JAX has one object for
        equal meshes, so that what was on the strategy's mesh is on the new strategy's.

        Returns:
            The names that are lost; they are no longer in the namespace.
        """
        devices = Devices()
        renew = Walk(lambda leaf: self._renewed(leaf, devices), _renewers())
        for name in self._names:
            if name not in namespace:
                continue
            try:
                namespace[name] = renew(namespace[name])
            except Lost:
                self._lost.append(name)
            except Exception as error:  # noqa: BLE001 - no memory, an object that cannot be made
                _log.warning("`%s` cannot be put back: %s", name, error)
                self._lost.append(name)
        for name in self._lost:
            namespace.pop(name, None)
        for generator in _keras_seeds():
            with contextlib.suppress(Lost):
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
            raise Lost
        return self._saved[id(leaf)].made(devices)


def _of_the_user(namespace: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in namespace.items()
        if not name.startswith("_") and name not in _NOT_THE_USERS
    ]


def _keras_is_on_jax() -> bool:
    """Return whether the user's program has imported Keras, on JAX."""
    keras = sys.modules.get("keras")
    return keras is not None and keras.backend.backend() == "jax"


def _renewers() -> list[Renew]:
    """Return those of the libraries that the user's program has imported."""
    renewers: list[Renew] = []
    if _keras_is_on_jax():
        from nbdist.worker.jax.rebuild import keras as keras_rebuild

        renewers.append(keras_rebuild.renew)
    if "flax.nnx" in sys.modules:
        from nbdist.worker.jax.rebuild import nnx as nnx_rebuild

        renewers.append(nnx_rebuild.renew)
    return renewers


def _keras_seeds() -> list[Any]:
    """What Keras draws from where no seed is given; it is nobody's by name."""
    if not _keras_is_on_jax():
        return []
    from nbdist.worker.jax.rebuild import keras as keras_rebuild

    return [keras_rebuild.seeds()]
