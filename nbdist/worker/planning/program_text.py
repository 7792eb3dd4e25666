"""Text of a program, to compare programs: much faster than its printed form."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from nbdist.jaxpr.pallas_calls import NAME, index_maps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def program_text(closed: ClosedJaxpr) -> str:
    """Return a text that equal programs share; inner programs are written once.

    The text contains the shapes of constants, not their values.
    """
    return "\n".join(_Text().lines(closed.jaxpr))


class _Text:
    """Texts of the parts that a program repeats."""

    def __init__(self) -> None:
        self._programs: dict[int, int] = {}
        self._texts: dict[tuple[type, Any], str] = {}

    def lines(self, jaxpr: Jaxpr) -> Iterator[str]:
        names: dict[Any, int] = {}
        given = [*jaxpr.constvars, *jaxpr.invars]
        yield f"{len(jaxpr.constvars)} {self._new(given, names)}"
        for eqn in jaxpr.eqns:
            params, inner = [], []
            for name, value in sorted(eqn.params.items()):
                programs = _programs(value)
                inner += programs
                params.append(f"{name}={self._numbers(programs) or self._text(value)}")
            if eqn.primitive.name == NAME:
                maps = index_maps(eqn)
                inner += maps
                params.append(f"index_maps={self._numbers(maps)}")
            for program in inner:
                if self._programs[id(program)] < 0:
                    self._programs[id(program)] *= -1
                    yield f"program {self._programs[id(program)]}"
                    yield from self.lines(program)
            ins = self._old(eqn.invars, names)
            yield f"{eqn.primitive.name} {params} {ins} {self._new(eqn.outvars, names)}"
        yield self._old(jaxpr.outvars, names)

    def _numbers(self, programs: Sequence[Jaxpr]) -> str:
        """Return the numbers of programs; negative until their lines are written."""
        for program in programs:
            self._programs.setdefault(id(program), -1 - len(self._programs))
        return " ".join(str(abs(self._programs[id(program)])) for program in programs)

    def _new(self, variables: Sequence[Any], names: dict[Any, int]) -> str:
        for var in variables:
            names[var] = len(names)
        return " ".join([self._text(var.aval) for var in variables])

    def _old(self, atoms: Sequence[Any], names: dict[Any, int]) -> str:
        return " ".join(
            [str(atom) if isinstance(atom, Literal) else str(names[atom]) for atom in atoms]
        )

    def _text(self, value: Any) -> str:
        key = type(value), value
        try:
            found = self._texts.get(key)
        except TypeError:  # not hashable
            return _ADDRESS.sub("", str(value))
        if found is None:
            found = self._texts[key] = _ADDRESS.sub("", str(value))
        return found


def _programs(value: Any) -> list[Jaxpr]:
    """Return the programs in a parameter of an equation."""
    if isinstance(value, Jaxpr):
        return [value]
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, tuple):
        return [program for part in value for program in _programs(part)]
    return []
