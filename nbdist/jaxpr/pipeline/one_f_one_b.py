"""Layers in stages under 1F1B: a microbatch goes backward right after its forward pass.

In each tick each of S stages computes one forward pass, as in `scan_pipeline`, and one backward
pass. The last stage starts the backward pass of a microbatch in the tick in which it ends the last
of its v rounds. This is 1F1B, interleaved if v > 1 (arXiv:2104.04473, section 2.2). Here all stages
compute both passes in each tick; the time that they wait is the same. A stage stores the results of
a block of layers at most 2 v S - 1 times, for any number of microbatches. The first v S - 1 ticks
have no backward pass, and the last v S - 1 no forward pass.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from nbdist.jaxpr.flatten import inner_equations, variables
from nbdist.jaxpr.microbatches import Rows, accumulator_dtype
from nbdist.jaxpr.pipeline.schedule import StageRows, constrains_axis, of_stage
from nbdist.jaxpr.pipeline.stages import Stages
from nbdist.planner.graph.pipeline_schedule import room
from nbdist.records import DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.pipeline.loss_section import DividedStep
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.pipeline.schedule import Schedule
    from nbdist.jaxpr.pipeline.stages import LayerInputs

_OPEN = jax.P.UNCONSTRAINED


class LossSection:
    """The loss section of one microbatch.

    Each stage computes it for its own rows of the microbatch, or the last stage computes it alone.
    In the second case no rows leave this stage. The other stages compute at the same time, and
    their results are discarded.

    Attributes:
        inputs: inputs without rows.
        row_inputs: inputs with rows.
        sums: results that are sums over rows.
        rows: results with rows.
        last: other results, which are the same for each microbatch.

    Args:
        divided: the step, divided.
        jaxpr: the step.
        schedule: schedule of the pipeline.
        is_alone: True if the last stage computes it alone; also if rows do not divide over stages.
    """

    def __init__(
        self, divided: DividedStep, jaxpr: Jaxpr, schedule: Schedule, *, is_alone: bool
    ) -> None:
        self._schedule, eqns = schedule, divided.eqns["loss_section"]
        self._dims = schedule.rows.dims
        out = divided.forward.scan.eqn.outvars
        self._passed = {n: out[n] for n in divided.forward.carried("rows")}
        self._backward_inputs = divided.backward_inputs
        made = {var for eqn in eqns for var in eqn.outvars} | {*self._passed.values()}
        late = variables([v for eqn in divided.eqns["after"] for v in eqn.invars])
        left = [v for v in dict.fromkeys((*late, *variables(jaxpr.outvars))) if v in made]
        self.sums = [v for v in left if divided.kinds.get(v) == "sum"]
        self.rows = [v for v in left if v in self._dims]
        self.last = [v for v in left if divided.kinds.get(v) == "each"]
        outs = [*self._backward_inputs.values(), *self.sums, *self.rows, *self.last]
        used = dict.fromkeys(
            v for v in (*(v for e in eqns for v in variables(e.invars)), *outs) if v not in made
        )
        self.inputs = [var for var in used if var not in self._dims]
        self.row_inputs = [var for var in used if var in self._dims]
        own = schedule.rows.batch // schedule.rows.parts
        body = jaxpr.replace(constvars=[], eqns=eqns)
        is_constrained = any(
            constrains_axis(eqn, STAGE) for eqn in chain(eqns, inner_equations(body))
        )
        is_alone |= own % schedule.stages > 0
        self._is_alone = is_alone and not is_constrained
        self._shares = 1 if is_alone or is_constrained else schedule.stages
        few = Rows(self._dims, schedule.rows.batch, schedule.rows.parts * self._shares)
        ins = [*self.inputs, *self.row_inputs, *self._passed.values()]
        body = body.replace(invars=ins, outvars=outs)
        self._run = jaxpr_as_fun(ClosedJaxpr(few.fewer(body), []))

    def by_microbatch(self, array: Any, var: Var) -> Any:
        """Return an input with rows, by microbatches."""
        if self._is_alone:
            return self._schedule.entering(array, var)
        if self._shares == 1:
            return jnp.expand_dims(self._schedule.entering(array, var), 2)
        return jax.vmap(lambda part: self._shared(part, var))(self._schedule.divided(array, var))

    def zeros(self) -> list[Any]:
        """Return zeros for the sums, one for each group of rows."""
        places = (self._schedule.parts, self._places)
        return [
            self._sharded(jnp.zeros((*places, *var.aval.shape), accumulator_dtype(var.aval.dtype)))
            for var in self.sums
        ]

    def total(self, var: Any, total: Any) -> Any:
        """Return the sum over all microbatches."""
        if self._is_alone:
            total = jnp.expand_dims(self._of_last(total, 1), 1)
        return total.sum((0, 1)).astype(var.aval.dtype)

    def stage_rows(self, array: Any) -> StageRows:
        """Return one of its results with rows, of all microbatches."""
        return StageRows(array, self._schedule.stages - 1)

    def results(self, totals: Sequence[Any], others: Sequence[Any]) -> dict[Var, Any]:
        """Return its results for all microbatches.

        Args:
            totals: its sums.
            others: its other results by microbatch, for `rows` and `last`.
        """
        own, last = others[: len(self.rows)], others[len(self.rows) :]
        sums = zip(self.sums, map(self.total, self.sums, totals), strict=True)
        rows = zip(self.rows, map(self.stage_rows, own), strict=True)
        made = {v: array[-1] for v, array in zip(self.last, last, strict=True)}
        return made | dict(sums) | dict(rows)

    def __call__(
        self, inputs: Sequence[Any], totals: list[Any], row_inputs: Sequence[Any], passed: Arrays
    ) -> tuple[Arrays, list[Any], list[Any]]:
        """Run the section on one microbatch.

        Args:
            inputs: values of the inputs without rows.
            totals: sums so far.
            row_inputs: values of the inputs with rows, as one element of `by_microbatch`.
            passed: results of the layers: [stages, parts, ...].

        Returns:
            Inputs of the backward pass, [stages, parts, ...], or 1 in place of the stages; the new
            sums; the other results, those with rows as [stages, parts, ...] too.
        """
        given = [*row_inputs, *(self._received(passed[n], var) for n, var in self._passed.items())]
        outer: list[int | None] = [None] * len(inputs) + [0] * len(given)
        inner = list(outer)
        if self._is_alone:  # all stages have the same inputs
            inner[: len(inputs) + len(row_inputs)] = [None] * (len(inputs) + len(row_inputs))
        run = jax.vmap(self._run, inner, spmd_axis_name=self._axis(STAGE), axis_size=self._places)
        outs = jax.vmap(run, outer, spmd_axis_name=self._axis(DATA))(*inputs, *given)
        back, sums, rows, last = _split(
            outs, [len(self._backward_inputs), len(self.sums), len(self.rows), len(self.last)]
        )
        backward_inputs = {
            n: self._whole(array, var)
            for (n, var), array in zip(self._backward_inputs.items(), back, strict=True)
        }
        totals = [
            self._sharded(total + new.astype(total.dtype))
            for total, new in zip(totals, sums, strict=True)
        ]
        whole = [self._whole(array, var) for var, array in zip(self.rows, rows, strict=True)]
        return backward_inputs, totals, [*whole, *(array[0, 0] for array in last)]

    def _axis(self, name: str) -> str | None:
        size = self._schedule.parts if name == DATA else self._places
        return name if size > 1 else None

    @property
    def _places(self) -> int:
        """Number of stages that compute the section."""
        return self._schedule.stages if self._is_alone else self._shares

    def _of_last(self, array: Any, dim: int) -> Any:
        return of_stage(array, self._schedule.stages - 1, dim)

    def _received(self, array: Any, var: Var) -> Any:
        """Return results of the layers, [stages, parts, ...], where the section runs."""
        if self._is_alone:
            return jnp.moveaxis(array, 0, 1)
        return self._shared(self._of_last(array, 0), var)

    def _shared(self, array: Any, var: Var) -> Any:
        """Return [parts, ...] as [parts, shares, ...]."""
        (dim,) = self._dims[var]
        shape = array.shape
        split = (*shape[: dim + 1], self._shares, shape[dim + 1] // self._shares, *shape[dim + 2 :])
        return self._sharded(jnp.moveaxis(array.reshape(split), dim + 1, 1))

    def _whole(self, array: Any, var: Var) -> Any:
        """Undo `_received`; rows that were shared have 1 in place of the stages."""
        if self._is_alone:
            return self._schedule.sharded(jnp.moveaxis(array, 1, 0))
        (dim,) = self._dims[var]
        made = jnp.moveaxis(array, 1, dim + 1)
        shape = made.shape
        whole = (*shape[: dim + 1], shape[dim + 1] * shape[dim + 2], *shape[dim + 3 :])
        return made.reshape(1, *whole)

    def _sharded(self, array: Any) -> Any:
        if STAGE not in jax.sharding.get_abstract_mesh().shape:
            return array
        places = (self._axis(DATA) or _OPEN, self._axis(STAGE) or _OPEN)
        return jax.lax.with_sharding_constraint(array, jax.P(*places, *[_OPEN] * (array.ndim - 2)))


class _ForwardState(NamedTuple):
    """State of the forward pass.

    Attributes:
        state: values that stages pass on.
        totals: sums so far.
        kept: results for the backward pass, by output of the scan: [slots, stages, parts, layers of
            a block, ...].
    """

    state: Arrays
    totals: Arrays
    kept: Arrays


class _BackwardState(NamedTuple):
    """State of the backward pass: values that stages pass on, sums, and results."""

    state: Arrays
    totals: Arrays
    left: Arrays


class _AlternatingState(NamedTuple):
    """State of both passes, and the sums of the loss section."""

    forward: _ForwardState
    backward: _BackwardState
    totals: list[Any]


class _Inputs(NamedTuple):
    """Inputs of all microbatches: see `AlternatingPipeline.run`."""

    forward_work: LayerInputs
    backward_work: LayerInputs
    entering: Arrays
    given: Sequence[Any]
    over: Sequence[Any]


class Results(NamedTuple):
    """Results when all microbatches have ended.

    Attributes:
        forward_sums: sums of the forward pass.
        backward_sums: sums of the backward pass.
        backward_rows: rows that the backward pass leaves, by the number of the output.
        loss_sums: sums of the loss section, for `LossSection.sums`.
        loss_results: its other results by microbatch, for `LossSection.rows` and
            `LossSection.last`.
    """

    forward_sums: Arrays
    backward_sums: Arrays
    backward_rows: dict[int, StageRows]
    loss_sums: list[Any]
    loss_results: list[Any]


class AlternatingPipeline:
    """Layers in stages that run forward and backward in each tick.

    Attributes:
        forward: the stages in the forward pass.
        backward: the stages in the backward pass.

    Args:
        divided: the step, divided.
        loss_section: the loss section.
        schedule: schedule of the pipeline.
    """

    def __init__(self, divided: DividedStep, loss_section: LossSection, schedule: Schedule) -> None:
        self._schedule, self._loss_section = schedule, loss_section
        self.forward = Stages(divided.forward, schedule)
        self.backward = Stages(divided.backward, schedule)
        self._slots = room(schedule.stages, schedule.micro, schedule.rounds)
        outs = divided.forward.scan.eqn.outvars
        stacks = {outs[n]: n for n in self.forward.stacks}
        over = enumerate(divided.backward.scan.eqn.invars)
        self._held = {n: stacks[v] for n, v in over if isinstance(v, Var) and v in stacks}

    def run(
        self,
        forward_work: LayerInputs,
        backward_work: LayerInputs,
        entering: Arrays,
        given: Sequence[Any],
        over: Sequence[Any],
    ) -> Results:
        """Run all microbatches.

        Args:
            forward_work: inputs of the layers in the forward pass.
            backward_work: inputs of the layers in the backward pass.
            entering: rows that enter the layers, [microbatches, 1, parts, ...].
            given: inputs of `loss_section` without rows.
            over: inputs of `loss_section` with rows, as `by_microbatch` returns them.
        """
        schedule, warmup_ticks = self._schedule, self._schedule.warmup_ticks
        aval = jax.eval_shape(self._backward_inputs, given, over, entering)
        nothing = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), aval)

        def forward_tick(tick: Any, now: _ForwardState) -> _ForwardState:
            return self._forward_tick(forward_work, entering, now, tick)[0]

        first = jax.lax.fori_loop(
            0, warmup_ticks, forward_tick, self._start(forward_work, entering)
        )
        begin = _AlternatingState(first, self._begin(nothing), self._loss_section.zeros())
        inputs = _Inputs(forward_work, backward_work, entering, given, over)
        (last, going, totals), others = self._alternate(inputs, nothing, begin)

        def backward_tick(tick: Any, going: _BackwardState) -> _BackwardState:
            return self._backward_tick(backward_work, last.kept, nothing, going, tick)

        going = jax.lax.fori_loop(
            schedule.ticks, schedule.ticks + warmup_ticks, backward_tick, going
        )
        returned = {n: StageRows(a, self.backward.last) for n, a in going.left.items()}
        others = [array.reshape(schedule.micro, *array.shape[2:]) for array in others]
        return Results(last.totals, going.totals, returned, totals, others)

    def _alternate(
        self, inputs: _Inputs, nothing: Arrays, begin: _AlternatingState
    ) -> tuple[_AlternatingState, list[Any]]:
        """Run the ticks between the warm-up and the last forward pass.

        Args:
            inputs: inputs of all microbatches.
            nothing: inputs of the backward pass in a tick without loss section.
            begin: state after the warm-up.

        Returns:
            The last state; results of the loss section, [groups, microbatches of a group, ...].
        """
        schedule, warmup_ticks = self._schedule, self._schedule.warmup_ticks
        each = schedule.stages if schedule.rounds > 1 else schedule.micro
        apart = schedule.rounds * each

        def tick_without_loss(tick: Any, carry: _AlternatingState) -> _AlternatingState:
            now, _ = self._forward_tick(inputs.forward_work, inputs.entering, carry.forward, tick)
            going = self._backward_tick(
                inputs.backward_work, now.kept, nothing, carry.backward, tick
            )
            return _AlternatingState(now, going, carry.totals)

        def loss_tick(carry: _AlternatingState, tick: Any) -> tuple[_AlternatingState, list[Any]]:
            now, passed = self._forward_tick(
                inputs.forward_work, inputs.entering, carry.forward, tick
            )
            micro = schedule.items_of_tick(tick, stage=self.forward.last).micro
            own = _at(list(inputs.over), micro)
            back, totals, left = self._loss_section(inputs.given, carry.totals, own, passed)
            going = self._backward_tick(inputs.backward_work, now.kept, back, carry.backward, tick)
            return _AlternatingState(now, going, totals), left

        def group(carry: _AlternatingState, tick: Any) -> Any:
            """Run one microbatch for each stage, after the earlier rounds of these microbatches."""
            if apart > each:
                first = jnp.where(tick == warmup_ticks, tick, tick + each - apart)
                carry = jax.lax.fori_loop(first, tick, tick_without_loss, carry)
            return jax.lax.scan(loss_tick, carry, tick + jnp.arange(each))

        starts = warmup_ticks + apart * jnp.arange(schedule.micro // each)
        last, others = jax.lax.scan(group, begin, starts)
        return last, others

    def _start(self, forward_work: LayerInputs, entering: Arrays) -> _ForwardState:
        schedule, stages = self._schedule, self.forward
        state = stages.initial_state({n: array[0] for n, array in entering.items()})
        now = _at((forward_work.fed, forward_work.slices), 0)
        avals = jax.eval_shape(
            lambda: stages.run_tick(
                forward_work, state, stages.zeros(), now, schedule.items_of_tick(0)
            )[2]
        )
        kept = {
            n: schedule.sharded(jnp.zeros((self._slots, *avals[n].shape), avals[n].dtype), 1)
            for n in sorted(set(self._held.values()))
        }
        return _ForwardState(state, stages.zeros(), kept)

    def _begin(self, nothing: Arrays) -> _BackwardState:
        stages = self.backward
        return _BackwardState(
            stages.initial_state(nothing), stages.zeros(), stages.result_buffers(nothing)
        )

    def _forward_tick(
        self, work: LayerInputs, entering: Arrays, now: _ForwardState, tick: Any
    ) -> tuple[_ForwardState, Arrays]:
        """Run a tick of the forward pass; return the state and the results of all stages."""
        schedule, stages = self._schedule, self.forward
        items = schedule.items_of_tick(tick)
        coming = _at(entering, schedule.items_of_tick(tick, stage=stages.first).micro)
        state = stages.with_entering(now.state, coming, items)
        given = _at((work.fed, work.slices), tick)
        rows, totals, stacks = stages.run_tick(work, state, now.totals, given, items)
        kept = {
            n: jax.lax.dynamic_update_index_in_dim(slots, stacks[n], tick % self._slots, 0)
            for n, slots in now.kept.items()
        }
        return _ForwardState(stages.shifted(rows), totals, kept), rows

    def _backward_tick(
        self,
        work: LayerInputs,
        kept: Arrays,
        backward_inputs: Arrays,
        now: _BackwardState,
        tick: Any,
    ) -> _BackwardState:
        """Run a tick of the backward pass."""
        schedule, stages = self._schedule, self.backward
        since = tick - schedule.warmup_ticks
        items = schedule.items_of_tick(since, is_late=True)
        out = schedule.items_of_tick(since, stage=stages.last, is_late=True)
        forward_ticks = schedule.forward_ticks(items)
        stored = {n: self._stored(kept[m], forward_ticks) for n, m in self._held.items()}
        fed, slices = _at((work.fed, work.slices), since)
        state = stages.with_entering(now.state, backward_inputs, items)
        rows, totals, _ = stages.run_tick(work, state, now.totals, (fed, slices | stored), items)
        return _BackwardState(
            stages.shifted(rows), totals, stages.store_results(now.left, rows, out.micro)
        )

    def _stored(self, kept: Any, ticks: Any) -> Any:
        """Return the stored results of each stage from its own tick."""
        own = jax.vmap(
            lambda slots, tick: jax.lax.dynamic_index_in_dim(
                slots, tick % self._slots, keepdims=False
            ),
            in_axes=(1, 0),
        )
        return self._schedule.sharded(own(kept, ticks))

    def _backward_inputs(
        self, given: Sequence[Any], over: Sequence[Any], entering: Arrays
    ) -> Arrays:
        """Return the inputs of the backward pass of one microbatch, for their shapes."""
        first = self.forward.initial_state({n: array[0] for n, array in entering.items()})
        return self._loss_section(
            given, self._loss_section.zeros(), [array[0] for array in over], first
        )[0]


def _at(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False), tree)


def _split(all_: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Split a list into pieces of these lengths."""
    rest, found = list(all_), []
    for length in lengths:
        found.append(rest[:length])
        rest = rest[length:]
    return found
