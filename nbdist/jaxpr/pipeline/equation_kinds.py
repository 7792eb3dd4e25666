"""Kinds of equations: equations of a kind differ in the names of their variables only."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


class Kinds:
    """Numbers of the kinds of equations."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._keys: dict[int, tuple[Any, Any]] = {}

    def number(self, eqn: Any) -> int:
        """Return the number of an equation's kind."""
        key = _equation_key(eqn, self._known(eqn.params), tuple(map(_type_of, eqn.invars)))
        return self._numbers.setdefault(key, len(self._numbers))

    def _known(self, params: dict[str, Any]) -> Any:
        found = self._keys.get(id(params))
        if found is None:  # the entry contains the parameters, so that no others get their id
            found = self._keys[id(params)] = params, _params_key(params)
        return found[1]


def _equation_key(eqn: Any, params: Any, ins: tuple[Any, ...]) -> Any:
    return eqn.primitive, params, ins, tuple(var.aval for var in eqn.outvars)


def _params_key(params: dict[str, Any]) -> Any:
    return tuple((name, _value_key(value)) for name, value in sorted(params.items()))


def _value_key(value: Any) -> Any:
    """Return a key of a parameter; values that cannot be compared are equal to themselves only."""
    if isinstance(value, ClosedJaxpr):
        return _program_key(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, Jaxpr):
        return _program_key(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value_key, value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _program_key(jaxpr: Jaxpr) -> Any:
    """Return a key of an inner program, in which variables are numbers."""
    places: dict[Any, int] = {}

    def own(atom: Any) -> Any:
        return _type_of(atom) if isinstance(atom, Literal) else places[atom]

    for var in (*jaxpr.constvars, *jaxpr.invars):
        places[var] = len(places)
    found = [tuple(var.aval for var in places)]
    for eqn in jaxpr.eqns:
        found.append(_equation_key(eqn, _params_key(eqn.params), tuple(map(own, eqn.invars))))
        for var in eqn.outvars:
            places[var] = len(places)
    return *found, tuple(map(own, jaxpr.outvars))


def _type_of(atom: Any) -> Any:
    """Return the type of an input, and the value of a literal."""
    if not isinstance(atom, Literal):
        return atom.aval
    value = atom.val
    return atom.aval, np.asarray(value).tobytes() if np.ndim(value) == 0 else id(value)
