"""Goes through a value of the user's and puts other arrays in the place of its own."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nbdist.worker.jax.arrays.distributed_dataset import (
    DistributedDataset,
    GlobalSource,
    PartSource,
    Placement,
)
from nbdist.worker.jax.arrays.replicas import PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Renew = Callable[[Any, "Walk"], bool]

_PLACED = (jax.Array, jax.Device, jax.sharding.Sharding, jax.sharding.Mesh)
_NEVER = (
    *(str, bytes, int, float, complex, type(None), np.ndarray, np.generic, type, ModuleType),
    *(FunctionType, BuiltinFunctionType, MethodType, jax.core.Tracer),
)
_DICTS = (dict, OrderedDict, defaultdict)
_USERS_MODULE = "__main__"
_OURS = (PerReplica, DistributedDataset, GlobalSource, PartSource, Placement)


class Lost(Exception):  # noqa: N818 - no error: it ends the walk of a name
    """An array whose values are gone."""


class Walk:
    """Replaces what JAX has placed: arrays, devices, meshes, shardings.

    What can be changed in place is: dicts, lists, objects of NNX, of Keras and of the notebook's
    own classes. Other pytrees are made anew if something in them is replaced, and else are the same
    objects. What is reached twice is replaced once, so that what was shared still is.

    Args:
        replace: returns the replacement of a leaf, or the leaf itself if nothing changes.
        renewers: each changes an object of one library in place, and returns whether it was one.
    """

    def __init__(self, replace: Callable[[Any], Any], renewers: Sequence[Renew]) -> None:
        self._replace = replace
        self._renewers = renewers
        self._done: dict[int, tuple[Any, Any]] = {}  # with the value, so that no id recurs
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """The value with other leaves.

        Raises:
            Lost: a value of an array is gone.
        """
        if isinstance(value, _NEVER) or id(value) in self._open:
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        self._open.add(id(value))
        try:
            new = self._replace(value) if isinstance(value, _PLACED) else self._inside(value)
        finally:
            self._open.discard(id(value))
        self._done[id(value)] = value, new
        return new

    def items(self, items: dict[Any, Any]) -> None:
        """Replace the values of a dict, also of an object's attributes."""
        for key, item in list(items.items()):
            new = self(item)
            if new is not item:
                items[key] = new

    def _inside(self, value: Any) -> Any:
        if type(value) in _DICTS:
            self.items(value)
        elif type(value) is list:
            for index, item in enumerate(value):
                value[index] = self(item)
        elif not any(renew(value, self) for renew in self._renewers):
            return self._tree(value)
        return value

    def _tree(self, value: Any) -> Any:
        """One level of a pytree at a time, for the parts are looked at by what they are."""
        parts, structure = jax.tree.flatten(value, is_leaf=lambda part: part is not value)
        if len(parts) == 1 and parts[0] is value:
            if _is_open(value):
                self.items(vars(value))
            return value
        news = [self(part) for part in parts]
        if all(new is part for new, part in zip(news, parts, strict=True)):
            return value
        return jax.tree.unflatten(structure, news)


def _is_open(value: Any) -> bool:
    """Whether its attributes are to be changed, as JAX does not know its class."""
    known = type(value).__module__ == _USERS_MODULE or isinstance(value, _OURS)
    return (known or dataclasses.is_dataclass(value)) and type(value).__dictoffset__ != 0
