"""Signals of training of a loop under JAX (`--watch`), recorded in some of its steps.

The step runs functions that the user has compiled. Steps with signals use programs with a callback
(`nbdist/worker/jax/runtime/gradient_marks.py`), other steps the user's own. The callback sends the
sums of squares of the arrays whose gradients are taken. The arrays of the loop's state with the
same shapes and sums are the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.worker.jax.runtime.array_counts import counted, real, square
from nbdist.worker.jax.runtime.gradient_marks import receiving, take_received
from nbdist.worker.jax.runtime.step_signals import NAME
from nbdist.worker.jax.runtime.watched_step import RATE_PATH
from nbdist.worker.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


class _Compared(NamedTuple):
    """Parameters before and after a step, compared without waiting for the step.

    Attributes:
        update: sum of the squares of the update.
        rows: rows of the histograms of the parameters; empty if not requested.
    """

    update: jax.Array
    rows: Sequence[jax.Array]


class _Arrays(NamedTuple):
    """Arrays of floats of one step.

    Attributes:
        before: arrays of the state before the step, by path.
        after: those after it.
        rates: learning rates by name.
        is_due: True if the step has histograms.
    """

    before: dict[str, jax.Array]
    after: dict[str, jax.Array]
    rates: dict[str, jax.Array]
    is_due: bool

    def compared(self, places: Places) -> _Compared:
        """Compare the arrays at these places."""
        old, new = ([arrays[path] for path in places.values()] for arrays in self[:2])
        return _Compared(_update(new, old), _rows(old) if self.is_due else ())


class LoopSignals:
    """Signals of the steps of a loop."""

    def __init__(self) -> None:
        self._shapes: list[Any] = []
        self._places: Places = {}
        self._read_last: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def recorded(self, state: Leaves) -> Iterator[dict[str, Any]]:
        """Provide a dict that contains a function `NAME`, which returns the signals of the step.

        The function waits for the step. Without it, the next steps begin before this one has ended.

        Args:
            state: state of the loop; changed by the step.
        """
        found: dict[str, Any] = {}
        if not signals.is_recorded():
            yield found
            return
        self._read_last()  # the gradients of two steps must not mix
        is_due = signals.is_due()
        before = _floats(state)
        if self._places:
            before = {path: before[path] for path in self._places.values() if path in before}
        before = _copied(before)  # donated arrays end
        with receiving(histograms=is_due):
            yield found
        after = _floats(state)
        arrays = _Arrays(before, after, _rates(after), is_due)
        if not arrays.rates:
            signals.note_missing("learning rate", "use optax.inject_hyperparams")
        if not set(self._places.values()) <= before.keys() & arrays.after.keys():
            self._places = {}
        compared = arrays.compared(self._places) if self._places else None
        if compared is not None:
            arrays = arrays._replace(before={}, after={})
        read = functools.cache(functools.partial(self._signals, arrays, compared))
        found[NAME] = self._read_last = read
        if compared is None:
            read()  # the next step may change the arrays

    def _signals(self, arrays: _Arrays, compared: _Compared | None) -> signals.Signals:
        calls, rates = take_received(), {n: float(rate) for n, rate in arrays.rates.items()}
        shapes = [call.shapes for call in calls]
        if compared is not None and shapes != self._shapes:  # of another kind of step
            self._places = {}
            return signals.Signals(rates)
        places = self._places or _places(calls, arrays.before)
        why = _SEVERAL if len(set(places.values())) < len(places) else _NO_GRADIENTS
        if not places or why == _SEVERAL:
            signals.note_missing("gradient norm, parameter norm and update ratio", why)
            return signals.Signals(rates)
        self._shapes, self._places = shapes, places
        update, rows = compared or arrays.compared(places)
        squares = [
            sum(float(calls[call].gradients[i]) for call, i in places),
            sum(float(calls[call].sources[i]) for call, i in places),
            float(update),
        ]
        histograms: dict[str, Histogram] = {}
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


def _copied(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return dict(zip(arrays, _copies(list(arrays.values())), strict=True))


def _rates(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the learning rate in the state of `optax.inject_hyperparams`; empty without one."""
    found = [array for path, array in state.items() if RATE_PATH.search(path)]
    return _copied({signals.RATE: found[0]}) if found else {}


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
