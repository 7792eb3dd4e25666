"""Trial of a step under the mirrored strategy, for `--check`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from nbdist.private_api.tensorflow import distribute_lib
from nbdist.worker.data.batches import map_arrays
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.replica.summed_variables import is_summed
from nbdist.worker.training.parity import Outcome, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nbdist.worker.data.batches import Batch, Tree
    from nbdist.worker.training.parity import Findings, Values

HIDDEN = "?"
"""Prefix of the reported names that nbdist adds to the user's."""


class Optimized:
    """Names of the slots of optimizers, and of the variables that they train.

    Args:
        optimizers: both for each optimizer.

    Attributes:
        groups: groups of names whose changes have one scale, by name.
        amplified: names of the slots for each variable of an optimizer with slots. Such an
            optimizer amplifies the rounding of gradients that are almost zero, but not in its
            slots.
        linear: names of slots, and of variables of optimizers without slots.
    """

    def __init__(self, optimizers: Sequence[Sequence[Sequence[str]]]) -> None:
        self.groups: dict[str, str] = {}
        self.amplified: dict[str, frozenset[str]] = {}
        self.linear: set[str] = set()
        for i, (slots, trained) in enumerate(optimizers):
            self.groups |= dict.fromkeys(trained, f"variables of optimizer {i}")
            self.groups |= dict.fromkeys(slots, f"slots of optimizer {i}")
            self.amplified |= dict.fromkeys(trained, frozenset(slots)) if slots else {}
            self.linear |= {*slots} or {*trained}


class MirroredSubject:
    """Steps that leave the variables unchanged.

    Args:
        strategy: strategy of all ranks.
        variables: this rank's own parts of every variable that the step uses.
        names: variables with their user names.
        optimized: slot variables of each optimizer, and the variables that it trains. Slots begin
            at zero in a trial. A factor in a gradient is then a factor in them, even after earlier
            training.
        coarse: True if layers compute in less than float32.
        together: runs the step on all replicas.
        alone: step function, to be traced as on one replica.
        outputs: returns further values of a finished step that are compared, by name. Its option
            `together` is True for a step on all replicas.

    Attributes:
        optimized: names of the slots and variables of optimizers.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        variables: Iterable[tf.Variable],
        names: Iterable[tuple[str, tf.Variable]],
        optimized: Iterable[tuple[list[tf.Variable], list[tf.Variable]]],
        coarse: bool,
        together: Callable[[Batch], Any],
        alone: Callable[[tuple[Any, ...]], Any],
        outputs: Callable[..., dict[str, Any]],
    ) -> None:
        self._strategy = strategy
        local = strategy.experimental_local_results
        whole = {id(local(variable)[0]): (name, variable) for name, variable in names}
        parts = list(variables)
        optimizers = list(optimized)
        self._at_zero = {id(p) for slots, _ in optimizers for slot in slots for p in local(slot)}
        self._coarse = coarse
        self._parts = parts
        self._later = 0
        self._before: list[tuple[tf.Variable, np.ndarray, np.ndarray]] = []
        found = {id(part): part for part in parts if id(part) in whole}
        self._named = {whole[key][0]: part for key, part in found.items()}
        names_of = {key: name for key, (name, _) in whole.items()}
        self.optimized = Optimized(
            [
                [[n for v in group if (n := names_of.get(id(local(v)[0])))] for group in pair]
                for pair in optimizers
            ]
        )
        # Sort, as each is a collective and a graph's variables have another order on each rank.
        self._summed = dict(
            sorted((whole[k] for k in found if is_summed(whole[k][1])), key=lambda pair: pair[0])
        )
        self._together = together
        self._outputs = outputs
        self._alone = tf.function(alone, autograph=False)
        self._means = tf.function(self._all_means, autograph=False)
        self._totals = tf.function(self._all_totals, autograph=False)
        for function in (self._alone, self._means, self._totals):
            function._omit_frequent_tracing_warning = True  # each value has a shape of its own

    def try_part(self, batch: Batch) -> None:
        """Run the step on this rank's part of a batch, without communication."""
        self.state()
        self.alone(batch.values)

    def compare(self, batch: Batch, replicas: int) -> Findings:
        """Compare the step on parts of a batch with the step on all of it."""
        groups, amplified = self.optimized.groups, self.optimized.amplified
        return compare(
            self, batch, replicas, coarse=self._coarse, groups=groups, amplified=amplified
        )

    @contextlib.contextmanager
    def one_step_later(self) -> Iterator[None]:
        """Try the step that follows: optimizers have made one step more."""
        self._later = 1
        try:
            yield
        finally:
            self._later = 0

    def _begin(self, part: tf.Variable, value: np.ndarray) -> np.ndarray:
        """Return the value of a variable at the beginning of a trial."""
        if id(part) in self._at_zero:
            return 0 * value
        is_count = part.dtype == tf.int64 and part.name.split(":")[0].endswith("iteration")
        return value + self._later if is_count else value

    def state(self) -> Values:
        """Return the variables before the step, as they are now."""
        values = [(part, part.numpy()) for part in self._parts]
        self._before = [(part, value, self._begin(part, value)) for part, value in values]
        begin = {id(part): value for part, _, value in self._before}
        return {name: begin[id(variable)] for name, variable in self._named.items()}

    def alone(self, values: tuple[Tree, ...]) -> Outcome:
        with single_replica():
            tensors = map_arrays(tf.convert_to_tensor, values)
            step = self._alone.get_concrete_function(tensors)
            return self._tried(lambda: step(tensors), self._first, together=False)

    def together(self, batch: Batch) -> Outcome:
        """Run the step on all replicas.

        Variables with a share on each replica, such as metrics, change by the sum of the shares.
        """
        before = self._sums()
        after: Values = {}

        def step() -> Any:
            report = self._together(batch)
            after.update(self._sums())
            return report

        outcome = self._tried(step, self._mean, together=True)
        begin = self.state()
        changed = {name: begin[name] + (after[name] - before[name]) for name in after}
        return Outcome(outcome.report, outcome.state | changed)

    def _sums(self) -> Values:
        """Return the sums over all replicas."""
        return {name: self._first(total) for name, total in self._totals().items()}

    def _all_totals(self) -> Any:
        def totals() -> dict[str, tf.Tensor]:
            replica, add = tf.distribute.get_replica_context(), tf.distribute.ReduceOp.SUM
            return {n: replica.all_reduce(add, tf.identity(v)) for n, v in self._summed.items()}

        return self._strategy.run(totals)

    def _tried(
        self, step: Callable[[], Any], read: Callable[[Any], np.ndarray], *, together: bool
    ) -> Outcome:
        for variable, _, begin in self._before:
            variable.assign(begin)
        try:
            found = step()
            report = {name: read(value) for name, value in found.items() if name[0] != HIDDEN}
            outputs = self._outputs(found, together=together)
            report |= {n: self._first(v) for n, v in outputs.items() if n not in report}
            state = {name: variable.numpy() for name, variable in self._named.items()}
            return Outcome(report, state)
        finally:
            for variable, value, _ in self._before:
                variable.assign(value)

    def _first(self, value: Any) -> np.ndarray:
        return np.asarray(self._strategy.experimental_local_results(value)[0])

    def _mean(self, value: Any) -> np.ndarray:
        return self._first(self._means(value))

    def _all_means(self, value: Any) -> Any:
        def mean(own: tf.Tensor) -> tf.Tensor:
            replica = tf.distribute.get_replica_context()
            return replica.all_reduce(tf.distribute.ReduceOp.MEAN, _as_float(tf.identity(own)))

        return self._strategy.run(mean, args=(value,))


def _as_float(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype.is_floating else tf.cast(value, tf.float64)


@contextlib.contextmanager
def single_replica() -> Iterator[None]:
    """Trace a replica as if it were the only one, without communication."""
    with (
        replaced(distribute_lib.ReplicaContext, "all_reduce", lambda _s, _op, v, *_: v),
        replaced(distribute_lib.ReplicaContext, "all_gather", lambda _s, v, *_, **_o: v),
        replaced(distribute_lib.StrategyBase, "num_replicas_in_sync", 1),
    ):
        yield
