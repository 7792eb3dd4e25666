"""Tracers that a step leaves where no walk through the user's objects finds them.

An escaped tracer has no value: whatever reads it later fails far from its cause.
"""

from __future__ import annotations

import gc
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Iterable


def live_tracers() -> set[int]:
    """The identities of all tracers in the process that the garbage collector knows."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), jax.core.Tracer)}


def check_leaks(before: set[int], names: Iterable[str], namespace: dict[str, Any]) -> None:
    """Refuse a step that left tracers in what the user's names lead to.

    Args:
        before: the tracers before it was traced.
        names: those of the step; they are looked through first.
        namespace: the user's.

    Raises:
        StepError: which name leads to one.
    """
    left = live_tracers() - before
    if not left:
        return
    users = [name for name in namespace if not name.startswith("_")]
    for name in dict.fromkeys((*names, *users)):
        if _leads_to(namespace[name], left, namespace):
            raise StepError(
                f"`{name}` leads to a value of the step that was put where nothing is carried, "
                "and that exists only while the step is traced: keep it in an attribute, a list "
                "or a dict, or report it"
            )


def _leads_to(value: Any, tracers: set[int], namespace: dict[str, Any]) -> bool:
    waiting, seen = [value], {id(namespace)}
    while waiting:
        thing = waiting.pop()
        if id(thing) in tracers:
            return True
        if id(thing) in seen or isinstance(thing, (ModuleType, FrameType)):
            continue
        if isinstance(thing, dict) and "__spec__" in thing:  # what a library's function leads to
            continue
        seen.add(id(thing))
        waiting.extend(gc.get_referents(thing))
    return False
