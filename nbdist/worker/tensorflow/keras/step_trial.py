"""Trials of a Keras step: parts of a few rows on all replicas, against all these rows on each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from nbdist.errors import StepError
from nbdist.private_api.keras import tree
from nbdist.private_api.tensorflow import gen_random_ops
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.keras.batches import Batch, rows_of
from nbdist.worker.tensorflow.replica import nested_merge
from nbdist.worker.tensorflow.replica.finite import FiniteWatch
from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRIED_ROWS = 64
"""Maximum number of rows of each replica in a trial."""

_TOLERANCE = {"float64": 1e-9, "float32": 2e-5}
"""Tolerance relative to the largest number of a value. float32 sums rows in another order."""

_COARSE_TOLERANCE = 5e-2

_FLOOR = 1e-2
"""Fraction of the largest gradient below which a gradient has its rounding, not its own."""

Results = dict[str, np.ndarray]
"""Gradients over all replicas, results and written variables of a step, by name."""

Trace = Callable[[Batch, bool], Callable[[Any], Results]]
"""Trace a step for a batch, split or whole. Returns a function of the batch's data."""

_REFUSED = (ValueError, TypeError, RuntimeError, tf.errors.InvalidArgumentError)
"""Errors of TensorFlow for shapes that an operation does not accept, and for `_IN_BRANCH`."""

_IN_BRANCH = "updates variables inside of a condition or loop of TensorFlow"


class Trials:
    """Comparison of a step on parts of a batch with the same step on the whole batch.

    Args:
        strategy: strategy of the model.
        trace: traces the step's functions. They leave the model's variables unchanged.
    """

    def __init__(self, strategy: tf.distribute.Strategy, trace: Trace) -> None:
        self._strategy = strategy
        self._trace = trace
        self._traced: dict[tuple[int, str], list[Callable[[Any], Results]]] = {}
        self._refusal = "does not accept a part of a batch"

    def difference(self, batch: Batch, order: np.ndarray | None = None) -> str:
        """Describe the first value that differs by more than rounding.

        Args:
            batch: batch to try. Up to `TRIED_ROWS` rows of each replica are used.
            order: order of its rows on this rank (default: the order of the batch). Rank 0's order
                is used.

        Returns:
            A predicate for the user. Empty if all values are equal.
        """
        few = self._few(batch, order)
        functions = self._functions(few)
        if not functions:
            return self._refusal
        parts, every = (function(few.data) for function in functions)
        names = list(every)
        found = first_difference(parts, every)
        number = self.agree(names.index(found) + 1 if found else 0)
        return (
            f"computes a different `{names[number - 1]}` for a part of a batch than for all of it"
            if number
            else ""
        )

    def agree(self, number: int) -> int:
        """Return the largest number of all ranks."""
        return int(gather_over(self._strategy)(np.array([number], np.int32)).max())

    def _whole(self, few: Batch) -> Callable[[Any], Results]:
        try:
            with repeatable():
                return self._trace(few, True)
        except RuntimeError as error:
            if not nested_merge.is_refused(error):
                raise
            raise StepError(
                f"the model {_IN_BRANCH}, where the replicas of one worker cannot synchronize: "
                "move the update out of it, or start workers with one device each"
            ) from error

    def _few(self, batch: Batch, order: np.ndarray | None) -> Batch:
        """Return the first rows of the order.

        If the batch has enough rows, their number is not divisible by the number of replicas.
        """
        replicas = int(self._strategy.num_replicas_in_sync)
        rows = min(TRIED_ROWS * replicas, batch.total)
        rows -= rows % replicas == 0 and rows > replicas
        if order is None:
            return Batch(rows_of(batch.data, 0, rows), rows, batch.spec)
        chosen = gather_over(self._strategy)(order[:rows].astype(np.int32))[0]
        data = tree.map_structure(
            lambda leaf: tf.gather(leaf, chosen) if tf.is_tensor(leaf) else leaf,
            batch.data,
            none_is_leaf=True,
        )
        return Batch(data, rows, batch.spec)

    def _functions(self, few: Batch) -> list[Callable[[Any], Results]]:
        """Trace the step on parts and as a whole. Empty if a rank cannot trace it on parts."""
        key = few.total, str(tree.map_structure(tf.type_spec_from_value, few.data))
        if key not in self._traced:
            every = self._whole(few)
            functions = []
            try:
                with repeatable():
                    functions = [self._trace(few, False), every]
            except _REFUSED as error:
                if nested_merge.is_refused(error):
                    self._refusal = _IN_BRANCH
                elif isinstance(error, RuntimeError):
                    raise
            self._traced[key] = [] if self.agree(not functions) else functions
        return self._traced[key]


class Recorder(FiniteWatch):
    """Record the gradients of a step in a trial.

    For IndexedSlices it also records the squares of their rows. Keras computes these squares before
    it adds up equal rows.
    """

    def __init__(self, *, is_traced: bool) -> None:
        super().__init__()
        self.is_traced = is_traced
        self.gradients: list[tf.Tensor] = []

    def after_mean(self, means: Sequence[Any]) -> list[Any]:
        rows = [mean for mean in means if isinstance(mean, tf.IndexedSlices)]
        squares = [tf.IndexedSlices(r.values**2, r.indices, r.dense_shape) for r in rows]
        self.gradients += [tf.convert_to_tensor(mean) for mean in (*means, *squares)]
        return list(means)


@contextlib.contextmanager
def unchanged(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Restore the current values of variables afterwards."""
    before = [(variable, variable.numpy()) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Make random operations without TensorFlow state draw the same numbers in each trial."""
    numbers = itertools.count()

    def normal(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_normal(shape, [next(numbers), 0], dtype=dtype)

    def uniform(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_uniform(shape, [next(numbers), 0], dtype=dtype)

    def integers(shape: Any, minval: Any, maxval: Any, **_: Any) -> Any:
        return tf.random.stateless_uniform(
            shape, [next(numbers), 0], minval, maxval, dtype=minval.dtype
        )

    def truncated(shape: Any, dtype: Any, **_: Any) -> Any:
        return tf.random.stateless_truncated_normal(shape, [next(numbers), 0], dtype=dtype)

    with contextlib.ExitStack() as changes:
        for name, ours in [
            ("random_standard_normal", normal),
            ("random_uniform", uniform),
            ("random_uniform_int", integers),
            ("truncated_normal", truncated),
        ]:
            changes.enter_context(replaced(gen_random_ops, name, ours))
        yield


def first_difference(parts: Results, every: Results) -> str:
    """Return the name of the first result with more than a rounding difference, or ""."""
    gradients = [_size(value) for name, value in every.items() if name.startswith("gradient")]
    floor = _FLOOR * max(gradients, default=0.0)
    for name, one in every.items():
        tolerance = _TOLERANCE.get(str(one.dtype), _COARSE_TOLERANCE)
        allowed = tolerance * max(_size(one), floor)
        other = parts[name]
        if one.shape != other.shape or not np.allclose(
            one.astype(np.float64), other.astype(np.float64), rtol=0, atol=allowed, equal_nan=True
        ):
            return name
    return ""


def _size(value: np.ndarray) -> float:
    return float(np.abs(value.astype(np.float64)).max(initial=0.0))
