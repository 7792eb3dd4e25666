"""Digests of the values under a name, for the comparison of ranks."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nbdist.records import Replicated
from nbdist.worker.checkpoint.digest import of_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


Value = TypeVar("Value")


_log = logging.getLogger(__name__)


class KnownNumbers:
    """Numbers of objects; an entry is dropped when its object is freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def get(self, value: object) -> int | None:
        """Return the number of an object; None if it has none."""
        reference, number = self._known.get(id(value), (None, 0))
        return number if reference is not None and reference() is value else None

    def note(self, value: object, number: int) -> None:
        """Set the number of an object."""
        forget = functools.partial(self._forget, id(value))
        self._known[id(value)] = weakref.ref(value, forget), number

    def _forget(self, place: int, reference: weakref.ref[Any]) -> None:
        if place in self._known and self._known[place][0] is reference:
            del self._known[place]


def digest_of(name: str, numbers: Mapping[str, int], *, changed: bool) -> Replicated | None:
    """Return the record of a name.

    Args:
        name: name in the user's namespace.
        numbers: digest of each value, by its path.
        changed: True if the cell has changed one of them.

    Returns:
        The record; None if the name leads to no value.
    """
    if not numbers:
        return None
    whole = of_array(np.array(list(numbers.values()), np.int32))
    return Replicated(name=name, number=whole, changed=changed, parts=dict(numbers))


def found_under(name: str, values: Iterable[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """Return the values under a name; empty, with a warning, if the search raises."""
    try:
        return list(values)
    except Exception as error:  # noqa: BLE001 - any exception of a user's object
        _log.warning("`%s` is not compared over ranks: %s", name, error)
        return []
