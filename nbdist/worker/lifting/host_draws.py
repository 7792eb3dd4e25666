"""Draws of random numbers on the host while nbdist compiles a step, which would draw only then."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable


class HostGenerators:
    """States of NumPy's generators: the global one, and those of the user.

    Python's global generator does not belong to them: Keras draws from it for new layers.

    Args:
        objects: objects of the user, some of which may be generators.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._global: Any = np.random.get_state()
        found = [value for value in objects if isinstance(value, np.random.Generator)]
        self._own = [(one.bit_generator, one.bit_generator.state) for one in found]

    def restore(self) -> bool:
        """Restore the states, and return True if one of them has changed."""
        before = [self._global, *(state for _, state in self._own)]
        now = [np.random.get_state(), *(generator.state for generator, _ in self._own)]
        np.random.set_state(self._global)
        for generator, state in self._own:
            generator.state = state
        return any(pickle.dumps(a) != pickle.dumps(b) for a, b in zip(before, now, strict=True))
