"""Signals of training of a loop under JAX (`--watch`), recorded in some of its steps.

The step runs functions that the user has compiled. Steps with signals use programs with a callback
(`nbdist/worker/jax/runtime/gradient_marks.py`), other steps the user's own. The callback sends the
sums of squares of the arrays whose gradients are taken. The arrays of the loop's state with the
same shapes and sums are the parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.worker.jax.runtime.array_counts import counted, real, square
from nbdist.worker.jax.runtime.gradient_marks import received
from nbdist.worker.jax.runtime.step_signals import NAME
from nbdist.worker.jax.runtime.watched_step import RATE_PATH
from nbdist.worker.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.records import Histogram
    from nbdist.worker.jax.runtime.gradient_marks import Received

_TOLERANCE = 1e-5

Places = dict[tuple[int, int], str]
"""Path of an array by its call of `vjp` and its position there."""

_NO_GRADIENTS = "no array of the loop's state has a gradient, or the gradient is under jax.vmap"
_SEVERAL = "the step takes several gradients of the same values, as in an accumulation"

_squares = jax.jit(lambda arrays: [square(array) for array in arrays])
_rows = jax.jit(lambda arrays: [counted(array) for array in arrays])
_copies = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays])


def _difference(new: Sequence[Any], old: Sequence[Any]) -> Any:
    """Return the sum of the squares of the differences of arrays."""
    return sum(square(real(a) - real(b)) for a, b in zip(new, old, strict=True))


_update = jax.jit(_difference)


class Leaves(Protocol):
    """State of a loop."""

    def leaves(self) -> dict[str, Any]:
        """Return all arrays and numbers, by name and path."""
        ...


class LoopSignals:
    """Signals of the steps of a loop."""

    def __init__(self) -> None:
        self._shapes: list[Any] = []
        self._places: Places = {}

    @contextlib.contextmanager
    def recorded(self, state: Leaves) -> Iterator[dict[str, Any]]:
        """Provide a dict that contains the signals of the step in this context, as `NAME`.

        Args:
            state: state of the loop; changed by the step.
        """
        found: dict[str, Any] = {}
        if not signals.is_recorded():
            yield found
            return
        is_due = signals.is_due()
        before = _floats(state)
        if self._places:
            before = {path: before[path] for path in self._places.values() if path in before}
        before = dict(zip(before, _copies(list(before.values())), strict=True))  # donated ones end
        with received(histograms=is_due) as calls:
            yield found
        after = _floats(state)
        rates = _rates(after)
        if not rates:
            signals.note_missing("learning rate", "use optax.inject_hyperparams")
        found[NAME] = self._signals(calls, before, after, rates, is_due=is_due)

    def _signals(
        self,
        calls: Sequence[Received],
        before: dict[str, jax.Array],
        after: dict[str, jax.Array],
        rates: dict[str, float],
        *,
        is_due: bool,
    ) -> signals.Signals:
        shapes = [call.shapes for call in calls]
        if self._places and shapes != self._shapes:  # of another kind of step
            self._places = {}
            return signals.Signals(rates)
        places = self._places or _places(calls, before)
        why = _SEVERAL if len(set(places.values())) < len(places) else _NO_GRADIENTS
        if not places or why == _SEVERAL:
            signals.note_missing("gradient norm, parameter norm and update ratio", why)
            return signals.Signals(rates)
        self._shapes, self._places = shapes, places
        old, new = ([arrays[path] for path in places.values()] for arrays in (before, after))
        squares = [
            sum(float(calls[call].gradients[i]) for call, i in places),
            sum(float(calls[call].sources[i]) for call, i in places),
            float(_update(new, old)),
        ]
        histograms: dict[str, Histogram] = {}
        rows = _rows(old) if is_due else ()
        for ((call, i), path), row in zip(places.items(), rows, strict=False):
            pair = {"parameters": np.asarray(row), "gradients": calls[call].rows[i]}
            made = {f"{kind}/{path}": signals.histogram_of(values) for kind, values in pair.items()}
            histograms |= {name: one for name, one in made.items() if one is not None}
        return signals.Signals(signals.values_of(squares, rates), histograms)


class NoLoopSignals:
    """Signals of a loop without `--watch`."""

    def recorded(self, state: Leaves) -> contextlib.AbstractContextManager[dict[str, Any]]:
        del state
        return contextlib.nullcontext({})


def signals_of_loop() -> LoopSignals | NoLoopSignals:
    """Return the signals of a loop; none unless the cell has the option `--watch`."""
    return LoopSignals() if signals.is_watched() else NoLoopSignals()


def _floats(state: Leaves) -> dict[str, jax.Array]:
    """Return the arrays of floats in the state, by path."""
    return {
        path: leaf
        for path, leaf in state.leaves().items()
        if isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def _rates(state: dict[str, jax.Array]) -> dict[str, float]:
    """Return the learning rate in the state of `optax.inject_hyperparams`; empty without one."""
    found = [array for path, array in state.items() if RATE_PATH.search(path)]
    return {signals.RATE: float(found[0])} if found else {}


def _places(calls: Sequence[Received], before: dict[str, jax.Array]) -> Places:
    """Return the path of each array of the state that has a gradient.

    A call counts if all its arrays are in the state.
    """
    sums = dict(zip(before, map(float, _squares(list(before.values()))), strict=True))
    candidates = {
        (n, i): [
            path
            for path, array in before.items()
            if array.shape == shape and math.isclose(sums[path], own, rel_tol=_TOLERANCE)
        ]
        for n, call in enumerate(calls)
        for i, (shape, own) in enumerate(zip(call.shapes, map(float, call.sources), strict=True))
    }
    found = {place: paths[0] for place, paths in candidates.items() if len(paths) == 1}
    # Arrays of zeros are equal: the moments of an optimizer are so before the first step.
    letters = itertools.takewhile(lambda c: len(set(c)) == 1, zip(*found.values(), strict=False))
    common = "".join(letter for letter, *_ in letters)
    for place, paths in candidates.items():
        left = [p for p in paths if p.startswith(common) and p not in found.values()]
        if place not in found and left and common:
            found[place] = left[0]
    unknown = {call for call, i in candidates if (call, i) not in found}
    return {place: path for place, path in found.items() if place[0] not in unknown}
