"""Locations of the arrays behind names, as far as one rank knows them.

Only metadata is read: no data are moved, nothing is computed, and the rank waits for no other rank.
If a JAX array spans several processes, the metadata of one rank describe all its blocks.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.records import Layout, MeshShape, PlacedArray, PlacedDevice, PlacementReport
from nbdist.worker.inspection.types import HOST, ArrayLocation, Found, Inside, Mesh, Reader, Table
from nbdist.worker.runtime.shell import engine_shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NOWHERE = object()
_DEEPEST = 64
"""Largest depth of a path; deeper parts are joined, because readers of the tree recurse."""


def describe(names: list[str]) -> bytes:
    """Return a `PlacementReport` of the arrays behind these names, as MessagePack.

    Args:
        names: names in the user's namespace; dots lead to attributes.
    """
    walk = _Walk(readers())
    missing, empty = [], {}
    for name in names:
        value = _look_up(name)
        if value is _NOWHERE:
            missing.append(name)
        elif not walk.take(name, value):
            empty[name] = type(value).__name__
    return msgspec.msgpack.encode(walk.report(tuple(missing), empty))


def _look_up(name: str) -> Any:
    first, *attributes = name.split(".")
    value = engine_shell().user_ns.get(first, _NOWHERE)
    for attribute in attributes:
        value = getattr(value, attribute, _NOWHERE)
    return value


def readers() -> list[Reader]:
    """Return the readers for the libraries that the user's program has imported."""
    readers: list[Reader] = [_containers]
    if "keras" in sys.modules:
        from nbdist.worker.inspection import keras as keras_objects

        readers.append(keras_objects.read)
    if "flax.nnx" in sys.modules:
        from nbdist.worker.inspection import nnx as nnx_objects

        readers.append(nnx_objects.read)
    if "tensorflow" in sys.modules:
        from nbdist.worker.inspection import tensorflow as tensorflow_variables

        readers.append(tensorflow_variables.read)
    if "jax" in sys.modules:
        from nbdist.worker.inspection import jax as jax_arrays

        readers.append(jax_arrays.JaxReader().read)
    return [*readers, _plain]


def _containers(value: Any) -> Inside | None:
    if isinstance(value, dict):
        return Inside([((f"[{key!r}]",), part) for key, part in value.items()])
    if isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        # only a named tuple has `_fields`
        return Inside([((f".{field}",), p) for field, p in zip(fields, value, strict=True)])
    if isinstance(value, (list, tuple)):
        return Inside([((f"[{i}]",), part) for i, part in enumerate(value)])
    return None


def _plain(value: Any) -> Found | Inside | None:
    import numpy as np  # local: the notebook's kernel imports this module too

    if isinstance(value, np.ndarray) and value.dtype != object:
        return Found(value.shape, str(value.dtype), value.nbytes, HOST)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return Inside([((f".{name}",), getattr(value, name, None)) for name in names])
    return None


class _Walk:
    """Search that finds each array once, in the order of the user's trees, despite cycles."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self._seen: dict[int, tuple[tuple[str, ...], Any]] = {}
        self._again: dict[str, tuple[str, ...]] = {}
        self._arrays: list[PlacedArray] = []
        self._paths: dict[tuple[str, ...], int] = {}
        self._tables = _Tables()

    def take(self, name: str, root: Any) -> bool:
        """Search from `root`; return whether it leads to an array, even one found before."""
        before = len(self._arrays), len(self._again)
        waiting = [((name,), root)]
        while waiting:
            path, value = waiting.pop()
            seen = self._look(path, value)
            if isinstance(seen, Inside):
                waiting.extend(((*path, *more), part) for more, part in reversed(seen.parts))
            elif seen is not None:
                self._keep(path, seen)
        return (len(self._arrays), len(self._again)) != before

    def _look(self, path: tuple[str, ...], value: Any) -> Found | Inside | None:
        for reader in self._readers:
            seen = reader(value)
            if seen is None:
                continue
            if isinstance(seen, Inside) and not seen.parts:
                return None
            first, _ = self._seen.setdefault(id(value), (path, value))  # stored: ids are not reused
            if first == path:
                return seen
            self._again["".join(path)] = first
            return None
        return None

    def _keep(self, path: tuple[str, ...], found: Found) -> None:
        times = self._paths[path] = self._paths.get(path, 0) + 1
        if times > 1:  # several layers with the same name
            path = (*path[:-1], f"{path[-1]} ({times})")
        if len(path) > _DEEPEST:
            path = (*path[:_DEEPEST], "".join(path[_DEEPEST:]))
        layout = self._tables.layout(found.where)
        self._arrays.append(PlacedArray(path, found.shape, found.dtype, found.nbytes, layout))

    def _notes(self) -> Iterator[str]:
        """Yield a note for each object with arrays that was reached twice."""
        if not self._again:
            return
        holders = {a.path[:n] for a in self._arrays for n in range(1, len(a.path) + 1)}
        for path, first in self._again.items():
            if first in holders:
                yield f"{path} is {''.join(first)}: counted once"

    def report(self, missing: tuple[str, ...], empty: dict[str, str]) -> PlacementReport:
        return PlacementReport(
            devices=tuple(self._tables.devices.items),
            meshes=tuple(self._tables.meshes.items),
            layouts=tuple(self._tables.layouts.items),
            arrays=tuple(self._arrays),
            notes=tuple(self._notes()),
            missing=missing,
            empty=empty,
        )


class _Tables:
    """Tables of the devices, meshes and layouts of a report."""

    def __init__(self) -> None:
        self.devices: Table[PlacedDevice] = Table()
        self.meshes: Table[MeshShape] = Table()
        self.layouts: Table[Layout] = Table()
        self._known: dict[int, tuple[int, ArrayLocation]] = {}

    def layout(self, where: ArrayLocation) -> int:
        if id(where) not in self._known:  # hashing a layout is slow with many devices
            self._known[id(where)] = self.layouts.index(self._layout(where)), where
        return self._known[id(where)][0]

    def _layout(self, where: ArrayLocation) -> Layout:
        return Layout(
            kind=where.kind,
            devices=tuple(map(self.devices.index, where.devices)),
            blocks=where.blocks,
            parts=where.parts,
            axes=where.axes,
            spec=where.spec,
            mesh=-1 if where.mesh is None else self._mesh(where.mesh),
            owners=where.owners,
        )

    def _mesh(self, mesh: Mesh) -> int:
        devices = tuple(map(self.devices.index, mesh.devices))
        return self.meshes.index(MeshShape(axes=mesh.axes, sizes=mesh.sizes, devices=devices))
