"""`--scale-lr`: learning rates multiplied by the number of replicas, after a warm-up.

The linear scaling rule with gradual warm-up of Goyal et al., 2017 (arXiv:1706.02677).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.errors import StepError
from nbdist.records import Rate

if TYPE_CHECKING:
    from nbdist.records import StepRequest

RATE_NAMES = ("learning_rate", "lr")


def rates_by_name(request: StepRequest, namespace: dict[str, Any]) -> dict[str, float]:
    """Return the learning rates to scale: numbers that the step reads under such a name.

    Raises:
        StepError: the step has no such number.
    """
    if not request.options.scale_lr:
        return {}
    rates = learning_rates(request, namespace)
    if not rates:
        raise StepError(
            "--scale-lr found no learning rate in the step: read it from a number named "
            "`learning_rate`, as in optax.adam(learning_rate).update(grads, opt_state); scale a "
            "schedule, or a rate that the step assigns, by hand"
        )
    return rates


def learning_rates(request: StepRequest, namespace: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that the step reads under the name of a learning rate."""
    read = {name: namespace[name] for name in RATE_NAMES if name in request.program.reads}
    numbers = {name: value for name, value in read.items() if not callable(value)}
    return {name: float(value) for name, value in numbers.items() if np.ndim(value) == 0}


class Factor:
    """Factor that grows from 1 to `goal` over `steps` steps; `now` is its last value.

    The `made` steps of an earlier run count.
    """

    def __init__(self, goal: int, steps: int, made: int = 0) -> None:
        self._goal, self._steps, self._step = goal, steps, made
        self.now = 1.0

    def rates(self, before: dict[str, float]) -> tuple[Rate, ...]:
        """Return the learning rates before and after scaling."""
        return tuple(
            Rate(name=name, before=rate, after=rate * self._goal, warmup_steps=self._steps)
            for name, rate in before.items()
        )

    def next(self) -> float:
        """Advance by a step; return its factor."""
        self._step += 1
        part = min(1.0, self._step / self._steps) if self._steps else 1.0
        self.now = 1.0 + (self._goal - 1) * part
        return self.now


def warm_up_steps(steps: int, steps_in_epoch: int) -> int:
    """Return the number of steps of the warm-up.

    Five epochs (section 2.2 of the paper), but at most a tenth of the run; 100 steps if the length
    of the run is unknown.

    Args:
        steps: number of steps of the run; -1 if unknown.
        steps_in_epoch: number of steps of an epoch; -1 if unknown.
    """
    if steps < 0:
        return 100
    five = 5 * steps_in_epoch if steps_in_epoch >= 0 else steps
    return max(1, min(five, steps // 10))
