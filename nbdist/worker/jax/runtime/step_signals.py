"""Signals of training in a compiled step of JAX (`nbdist/worker/runtime/signals.py`).

The step is one program over the global view of its arrays, so sums over an array are global sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.worker.jax.runtime.array_counts import counted, real, square
from nbdist.worker.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.worker.jax.runtime.gradient_marks import Evaluated

NAME = "?signals"
"""Name of the signals among the values of a step. No value of the user can have it."""

_NO_GRADIENTS = "the step takes no gradient with jax.grad or jax.value_and_grad"
_INNER = "the step takes gradients in jax.lax.scan or lax.cond, in microbatches, or under jax.vmap"
_NO_PARAMETERS = "the step takes gradients of other arrays than those that it carries"


class State(NamedTuple):
    """An array that a step carries.

    Attributes:
        path: its path.
        before: its value before the step.
        after: its value after the step.
    """

    path: str
    before: Any
    after: Any


class JaxSignals:
    """Signals of the steps of one program."""

    def __init__(self) -> None:
        self._paths: tuple[str, ...] = ()
        self._rates: tuple[str, ...] = ()
        self._why = ""

    def values(
        self,
        step: Evaluated,
        state: Sequence[State],
        rates: Mapping[str, Any],
        due: Any,
        scale: Any = 1.0,
    ) -> Any:
        """Return the signals of a step, while it is traced.

        Args:
            step: the step with its gradients.
            state: arrays that the step carries.
            rates: learning rates by name.
            due: True if this step has histograms; None for a program without any.
            scale: scale of the loss whose gradients the step takes.

        Returns:
            Numbers, and a list of the rows of histograms.
        """
        known = {id(one.before): one for one in state}
        partial = {g.call for g in step.gradients if id(g.source) not in known}
        own = [] if step.has_inner else [g for g in step.gradients if g.call not in partial]
        gradients = {id(g.source): g for g in reversed(own)}  # the first one counts
        pairs = [(known[place], real(g.gradient) / scale) for place, g in gradients.items()]
        self._paths = tuple(one.path for one, _ in pairs)
        self._rates = tuple(rates)
        self._why = "" if pairs else _reason(step)
        squares: list[Any] = [math.nan] * 3
        if pairs:
            updates = [real(one.after) - real(one.before) for one, _ in pairs]
            squares = [
                sum(square(gradient) for _, gradient in pairs),
                sum(square(one.before) for one, _ in pairs),
                sum(map(square, updates)),
            ]
        numbers = jnp.stack([jnp.asarray(v, jnp.float32) for v in (*squares, *rates.values())])
        if due is None or not pairs:
            return numbers, []
        arrays = [array for one, gradient in pairs for array in (one.before, gradient)]
        empty = jnp.zeros(len(signals.MOMENTS) + signals.BINS, jnp.float32)
        rows = jax.lax.cond(
            due, lambda: [counted(array) for array in arrays], lambda: [empty] * len(arrays)
        )
        return numbers, rows

    def read(self, values: Any, rates: Mapping[str, float]) -> signals.Signals:
        """Return the signals of a step.

        Args:
            values: result of `values`; None without signals.
            rates: further learning rates.
        """
        if values is None:
            return signals.NO_SIGNALS
        numbers, rows = jax.device_get(values)
        if self._why:
            signals.note_missing("gradient norm, parameter norm and update ratio", self._why)
        every = {**rates, **dict(zip(self._rates, map(float, numbers[3:]), strict=True))}
        if not every:
            signals.note_missing("learning rate", "use optax.inject_hyperparams")
        names = [f"{kind}/{path}" for path in self._paths for kind in ("parameters", "gradients")]
        found = {n: signals.histogram_of(row) for n, row in zip(names, rows, strict=False)}
        histograms = {name: histogram for name, histogram in found.items() if histogram is not None}
        return signals.Signals(signals.values_of(list(map(float, numbers[:3])), every), histograms)


def _reason(step: Evaluated) -> str:
    """Return the reason why no gradient of a carried array is known."""
    if step.has_inner:
        return _INNER
    return _NO_PARAMETERS if step.gradients else _NO_GRADIENTS
