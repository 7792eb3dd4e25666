"""Tracers that a step leaves where no walk through the user's objects finds them.

An escaped tracer has no value: whatever reads it later fails far from its cause. JAX keeps some in
caches of its own, where they do no harm.
"""

from __future__ import annotations

import gc
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError
from nbdist.worker.jax.step.object_graph import walk
from nbdist.worker.jax.step.object_slots import is_data

if TYPE_CHECKING:
    from collections.abc import Iterable

_LEVELS = 6
"""Of objects between a tracer and an object of the user's."""


def live_tracers() -> set[int]:
    """The identities of all tracers in the process that the garbage collector knows."""
    gc.collect()
    return set(map(id, _tracers()))


def check_leaks(before: set[int], names: Iterable[str], namespace: dict[str, Any]) -> None:
    """Refuse a step that left tracers in what the user's names lead to.

    Args:
        before: the tracers before it was traced.
        names: those of the step.
        namespace: the user's.

    Raises:
        StepError: which name leads to one.
    """
    gc.collect()
    left = [tracer for tracer in _tracers() if id(tracer) not in before]
    if not left:
        return
    paths = {
        id(item): f"{found.path}{found.container.word(key)}"
        for found in walk(names, namespace)
        for key, item in found.container.contents().items()
        if not is_data(item)
    }
    path = _path_to(left, paths)
    if path is not None:
        raise StepError(
            f"`{path}` holds a value of the step, which exists only while the step is traced, and "
            "cannot be carried there: keep it in an attribute, a list or a dict, or report it"
        )


def _tracers() -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), jax.core.Tracer)]


def _path_to(tracers: list[Any], paths: dict[int, str]) -> str | None:
    """Of the objects with a path, one that holds a tracer, by way of few others."""
    level, seen = tracers, {id(tracers), id(paths)}
    for _ in range(_LEVELS):
        seen |= {id(level), *map(id, level)}
        above = gc.get_referrers(*level)
        level = [thing for thing in above if id(thing) not in seen and not _is_far(thing)]
        seen.add(id(above))
        for thing in level:
            if id(thing) in paths:
                return paths[id(thing)]
        if not level:
            return None
    return None


def _is_far(thing: Any) -> bool:
    """Whether it leads to all of a module, or to code that runs."""
    is_names = type(thing) is dict and "__spec__" in thing
    return is_names or isinstance(thing, (FrameType, ModuleType))
