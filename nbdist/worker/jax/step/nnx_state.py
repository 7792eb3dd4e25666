"""Functional state of Flax NNX: pytrees with `nnx.State`, as `nnx.split` and Optax return them.

A step carries such a value as a pytree, although its variables are NNX objects. Imported only if
the user's program has imported Flax.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from nbdist.errors import StepError
from nbdist.worker.jax.step.nnx import variables

if TYPE_CHECKING:
    from collections.abc import Iterable


class FunctionalState:
    """Names of a step with functional state; see `closures.FunctionalNames`.

    nbdist gives each name its own copy. If two names share variables, a change in place would not
    reach the other name, so it is refused.

    A name is not among them if it shares variables with an object that the step may change in
    place, or if the step only reads it and no assigned name shares its variables.

    Args:
        assigned: Values by name that the step assigns.
        read: Values by name that the step only reads.
        lines: First line of each name.
    """

    def __init__(
        self, assigned: dict[str, Any], read: dict[str, Any], lines: dict[str, int]
    ) -> None:
        values = {**assigned, **read}
        self.names = _functional(assigned, read)
        self._lines = lines
        found = {name: _identities([values[name]]) for name in sorted(self.names)}
        self._others = {
            one: other
            for one, other in itertools.permutations(found, 2)
            if found[one] & found[other]
        }

    def shared(self, values: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        return [
            (name, variable, variable.get_raw_value())
            for name in self._others
            if name in values
            for variable in variables((values[name],))
        ]

    def check(self, before: list[tuple[str, Any, Any]]) -> None:
        for name, variable, value in before:
            if variable.get_raw_value() is not value:
                raise StepError(
                    f"`{name}` (line {self._lines[name]}) shares variables with "
                    f"`{self._others[name]}`, and the step changes them in place: make `{name}` "
                    "separate with nnx.clone in an earlier cell"
                )


def is_functional(value: Any) -> bool:
    """Return True if all NNX objects in a pytree are variables of an `nnx.State`."""

    def is_end(part: Any) -> bool:
        return isinstance(part, nnx.State) or nnx.graph.is_graph_node(part)

    ends = [part for part in jax.tree.leaves(value, is_leaf=is_end) if is_end(part)]
    return all(isinstance(part, nnx.State) and _has_only_variables(part) for part in ends)


def _functional(assigned: dict[str, Any], read: dict[str, Any]) -> frozenset[str]:
    found = {name for name, value in assigned.items() if is_functional(value)}
    taken = _identities(assigned[name] for name in found)
    found |= {
        name
        for name, value in read.items()
        if is_functional(value) and _identities([value]) & taken
    }
    values = {**assigned, **read}
    while shared := _sharing(values, found):
        found -= shared
    return frozenset(found)


def _has_only_variables(state: nnx.State[Any, Any]) -> bool:
    nodes = jax.tree.leaves(state, is_leaf=nnx.graph.is_graph_node)
    return not any(
        nnx.graph.is_graph_node(part) and not isinstance(part, nnx.Variable) for part in nodes
    )


def _sharing(values: dict[str, Any], found: set[str]) -> set[str]:
    """Return the names in `found` that share variables with the other values."""
    others = _identities(value for name, value in values.items() if name not in found)
    return {name for name in found if _identities([values[name]]) & others}


def _identities(values: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables(tuple(values))}
