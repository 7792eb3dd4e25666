"""Context mesh of a plain cell: nbdist's mesh if the cell uses it, else the user's, else none.

Without a context mesh, each worker runs a cell like one process: a new array is on one device of
the worker. Arrays over several workers know their own mesh.
"""

from __future__ import annotations

import ast
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import jax

from nbdist.cells.names import Names
from nbdist.worker.runtime.reachable import code_names, reachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

_MAKERS = frozenset({"Mesh", "make_mesh", "set_mesh", "use_mesh", "meshes"})
"""Names and attributes in code that makes or sets a mesh."""

_SPECS = frozenset({"P", "PartitionSpec"})
_SHARDING = "NamedSharding"
_STRATEGY = "strategy"
_MOST = 100
"""Largest number of items of a container in which meshes are searched."""


class ContextMesh:
    """Choice of the context mesh, cell by cell.

    A cell needs nbdist's mesh if it reads `strategy`, an object of nbdist, nbdist's mesh or a
    sharding over it. It also needs it if it uses a `jax.P` without a mesh, or if an earlier cell
    did, because a compiled function may contain one. A cell that makes, sets or reads another mesh
    does not need it. Neither do specs if the user has another mesh.
    """

    def __init__(self) -> None:
        self._has_specs = False

    def is_needed(self, source: str, namespace: dict[str, Any], mesh: Mesh) -> bool:
        """Return True if a plain cell needs nbdist's mesh as context mesh.

        Args:
            source: Text of the cell, without magics.
            namespace: Namespace of the user.
            mesh: Mesh of the strategy; another one after collectives were restored.
        """
        try:
            tree = ast.parse(source)
        except SyntaxError:  # reported when the cell is compiled
            return False
        names = Names()
        names.scan(tree.body)
        words = {word for node in ast.walk(tree) for word in _words(node)}
        has_specs = any(_bare_specs(tree, namespace))
        is_ours = _STRATEGY in names.read or any(map(_imports_nbdist, ast.walk(tree)))
        for _, value in reachable(names.read, namespace, most=_MOST):
            if isinstance(value, FunctionType):
                inner = {*code_names(value.__code__)}
                words |= inner
                has_specs |= bool(inner & _SPECS) and _SHARDING not in inner
            found = _mesh_of(value)
            if found is not None and found != mesh:
                return False
            is_ours |= found is not None or _is_of_nbdist(value)
        if words & _MAKERS:
            return False
        if _has_other_mesh(namespace, mesh):
            return is_ours
        self._has_specs |= has_specs
        return is_ours or self._has_specs


def _words(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return [word]
    return []


def _bare_specs(node: ast.AST, namespace: dict[str, Any]) -> Iterator[bool]:
    """Yield True for each call of `jax.P` that is no argument of a sharding."""
    match node:
        case ast.Call(func=ast.Attribute(attr=word) | ast.Name(id=word)) if word == _SHARDING:
            return
        case ast.Call(func=ast.Attribute(attr=word)) if word in _SPECS:
            yield True
        case ast.Call(func=ast.Name(id=word)) if word in _SPECS or namespace.get(word) is jax.P:
            yield True
    for inner in ast.iter_child_nodes(node):
        yield from _bare_specs(inner, namespace)


def _imports_nbdist(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name.partition(".")[0] == "nbdist" for name in names)
        case ast.ImportFrom(module=str(module)):
            return module.partition(".")[0] == "nbdist"
    return False


def _is_of_nbdist(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == "nbdist"
    owner = value if isinstance(value, (FunctionType, type)) else type(value)
    return str(owner.__module__).partition(".")[0] == "nbdist"


def _mesh_of(value: Any) -> Mesh | None:
    """Return a mesh, or the mesh of a sharding; None for any other value."""
    found = value.mesh if isinstance(value, jax.NamedSharding) else value
    return found if isinstance(found, jax.sharding.Mesh) else None


def _has_other_mesh(namespace: dict[str, Any], mesh: Mesh) -> bool:
    """Return True if the user has set another mesh, or has one in the namespace."""
    found = (_mesh_of(value) for value in namespace.values())
    is_set = not jax.sharding.get_mesh().empty
    return is_set or any(other is not None and other != mesh for other in found)
