"""Traverse a value of the user and replace its arrays."""

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
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Renew = Callable[[Any, "Walk"], bool]

_PLACED = (jax.Array, jax.Device, jax.sharding.Sharding, jax.sharding.Mesh)
_NEVER = (
    *(str, bytes, int, float, complex, type(None), np.ndarray, np.generic, type, ModuleType),
    *(FunctionType, BuiltinFunctionType, MethodType, jax.core.Tracer),
)
_DICTS = (dict, OrderedDict, defaultdict)
_OURS = (PerReplica, DistributedDataset, GlobalSource, PartSource, Placement)


class LostValue(Exception):  # noqa: N818 - not an error: it ends the walk of a name
    """Signal that the values of an array are lost."""


class Walk:
    """Traversal of a value that replaces arrays, devices, meshes and shardings.

    Dicts, lists, and objects of NNX, Keras and the user's own classes change in place. Other
    pytrees are rebuilt if a part changes, and stay the same object otherwise. Each value is
    replaced once, so shared values stay shared.

    Args:
        replace: Returns the replacement of a leaf, or the leaf itself if nothing changes.
        renewers: Functions that each renew objects of one library in place, and return whether the
            value was such an object.
    """

    def __init__(self, replace: Callable[[Any], Any], renewers: Sequence[Renew]) -> None:
        self._replace = replace
        self._renewers = renewers
        self._done: dict[int, tuple[Any, Any]] = {}  # keeps values alive: ids stay unique
        self._open: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """Return the value with its leaves replaced.

        Raises:
            LostValue: The values of an array are lost.
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
        """Replace the values of a dict, such as the attributes of an object."""
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
        """Replace the parts of a pytree, one level at a time: each part is handled by its type."""
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
    """Return True if to change the attributes of an object whose class JAX does not know."""
    known = is_users(type(value).__module__) or isinstance(value, _OURS)
    return (known or dataclasses.is_dataclass(value)) and type(value).__dictoffset__ != 0
