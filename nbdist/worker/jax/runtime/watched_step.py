"""Signals of training of a step cell under JAX (`--watch`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nbdist.worker.jax.runtime.gradient_marks import evaluated
from nbdist.worker.jax.runtime.step_signals import NAME, JaxSignals, State
from nbdist.worker.runtime import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RATE_PATH = re.compile(r"hyperparams\W+learning_rate\W*$")
"""End of the path of a learning rate in the state of `optax.inject_hyperparams`."""


class WatchedStep:
    """Signals of a planned step.

    Args:
        named: returns the arrays of the step's state by path.
    """

    def __init__(self, named: Callable[[Any], dict[str, Any]]) -> None:
        self._named = named
        self._signals = JaxSignals()

    def over(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step with its signals among its values, as `NAME`."""

        def watched(state: Any, read: Any, factor: Any, batch: Any, due: Any = None) -> Any:
            arguments = (state, read, factor, batch)
            found = evaluated(step, *arguments)
            report, after = found.outputs
            pairs = zip(self._named(state).items(), self._named(after).values(), strict=True)
            carried = [State(path, old, new) for (path, old), new in pairs]
            rates = {
                signals.RATE if i == 0 else f"{signals.RATE} of {one.path}": one.after
                for i, one in enumerate(one for one in carried if RATE_PATH.search(one.path))
            }
            values = self._signals.values(found, carried, rates, due)
            return {**report, NAME: values}, after

        return watched

    def due(self) -> tuple[bool, ...]:
        """Return the last argument of the step: True if it has histograms."""
        return (signals.is_due(),) if signals.interval() else ()

    def read(self, values: Any, rates: Mapping[str, float]) -> signals.Signals:
        """Return the signals of a step. `rates` are those that the step reads."""
        return self._signals.read(values, rates)
