"""Check for tracers that a step leaks to places outside the user's containers.

A leaked tracer has no value, and code that reads it later fails far from the cause. JAX keeps some
tracers in its own caches, where they are harmless.
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
"""Maximum number of references from a user's object to a leaked tracer."""


def live_tracers() -> set[int]:
    """Return the identities of all tracers that the garbage collector knows."""
    gc.collect()
    return set(map(id, _tracers()))


def check_leaks(before: set[int], names: Iterable[str], namespace: dict[str, Any]) -> None:
    """Refuse a step that leaked tracers into objects reachable from the user's names.

    Args:
        before: Identities of the tracers before the step was traced.
        names: Names of the step.
        namespace: Namespace of the user.

    Raises:
        StepError: A name leads to a leaked tracer.
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
            f"`{path}` contains a value of the step that exists only while the step is traced and "
            "cannot be carried: store it in an attribute, a list or a dict, or report it"
        )


def _tracers() -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), jax.core.Tracer)]


def _path_to(tracers: list[Any], paths: dict[int, str]) -> str | None:
    """Return the path of an object that leads to a tracer through few references.

    Returns None if it finds no such object.
    """
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
    """Return True if an object leads to a whole module or to running code."""
    is_names = type(thing) is dict and "__spec__" in thing
    return is_names or isinstance(thing, (FrameType, ModuleType))
