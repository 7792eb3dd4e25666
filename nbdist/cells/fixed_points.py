"""Sets that depend on each other, such as the effects of functions that call each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Key = TypeVar("_Key")


class FixedPoints(Generic[_Key]):
    """The smallest sets that fulfil equations. No chain of functions is too long for them.

    Args:
        compute: right side of the equation of a key. It reads other sets with `of`.
    """

    def __init__(self, compute: Callable[[_Key], set[str]]) -> None:
        self._compute = compute
        self._sets: dict[_Key, set[str]] = {}
        self._users: dict[_Key, set[_Key]] = {}
        self._waiting: list[_Key] = []
        self._current: list[_Key] = []

    def of(self, key: _Key) -> set[str]:
        """Return the set of a key. Within `compute`, it may still grow."""
        if key not in self._sets:
            self._sets[key] = set()
            self._users[key] = set()
            self._waiting.append(key)
        if self._current:
            self._users[key].update(self._current)
        else:
            self._solve()
        return self._sets[key]

    def _solve(self) -> None:
        while self._waiting:
            key = self._waiting.pop()
            self._current = [key]
            try:
                found = self._compute(key)
            finally:
                self._current = []
            if not found <= self._sets[key]:
                self._sets[key] |= found
                self._waiting += self._users[key].difference(self._waiting)
