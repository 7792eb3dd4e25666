"""Layers in stages through which a microbatch goes back as soon as it has come through.

Each of S stages goes forward with what it has in a tick, as in `pipeline_ticks`, and back with what
it had before, so that the last one turns a microbatch around at once when that is in the last of
its v rounds (1F1B, interleaved if v > 1: arXiv:2104.04473, section 2.2; here all stages go forward
and back in each tick, and what they wait for together is the same). So a stage keeps what a block
of its layers left 2 v S - 1 times at most, however many microbatches there are. In the first
v S - 1 ticks none goes back yet, in the last v S - 1 none comes any more.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from nbdist.jaxpr.flatten import variables
from nbdist.jaxpr.microbatches import Rows, wide
from nbdist.jaxpr.pipeline.schedule import inner, names
from nbdist.jaxpr.pipeline.stages import Stages
from nbdist.planner.graph.pipeline_schedule import room
from nbdist.records import DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.pipeline.loss_section import Halves
    from nbdist.jaxpr.pipeline.precompute import Arrays
    from nbdist.jaxpr.pipeline.schedule import Schedule
    from nbdist.jaxpr.pipeline.stages import Work

_OPEN = jax.P.UNCONSTRAINED


class Turn:
    """What is made of a microbatch between its way there and its way back.

    Each stage makes it of rows of its own, where they can be shared out.

    Attributes:
        given: what it needs that is there before, and has no rows.
        over: the same that has.
        sums: what it adds to, and is needed later.
        rows: what it makes of each row, likewise.
        last: what it makes beside them that is the same each time.

    Args:
        halves: the step around its layers.
        jaxpr: the step.
        schedule: of the ticks.
    """

    def __init__(self, halves: Halves, jaxpr: Jaxpr, schedule: Schedule) -> None:
        self._schedule, eqns = schedule, halves.eqns["between"]
        self._dims = schedule.rows.dims
        out = halves.forward.scan.eqn.outvars
        self._passed = {n: out[n] for n in halves.forward.carried("rows")}
        self._turning = halves.turning
        made = {var for eqn in eqns for var in eqn.outvars} | {*self._passed.values()}
        late = variables([v for eqn in halves.eqns["after"] for v in eqn.invars])
        left = [v for v in dict.fromkeys((*late, *variables(jaxpr.outvars))) if v in made]
        self.sums = [v for v in left if halves.kinds.get(v) == "sum"]
        self.rows = [v for v in left if v in self._dims]
        self.last = [v for v in left if halves.kinds.get(v) == "each"]
        outs = [*self._turning.values(), *self.sums, *self.rows, *self.last]
        used = dict.fromkeys(
            v for v in (*(v for e in eqns for v in variables(e.invars)), *outs) if v not in made
        )
        self.given = [var for var in used if var not in self._dims]
        self.over = [var for var in used if var in self._dims]
        own = schedule.rows.batch // schedule.rows.parts
        body = jaxpr.replace(constvars=[], eqns=eqns)
        is_said = any(names(eqn, STAGE) for eqn in chain(eqns, inner(body)))
        self._shares = 1 if own % schedule.stages or is_said else schedule.stages
        few = Rows(self._dims, schedule.rows.batch, schedule.rows.parts * self._shares)
        ins = [*self.given, *self.over, *self._passed.values()]
        body = body.replace(invars=ins, outvars=outs)
        self._run = jaxpr_as_fun(ClosedJaxpr(few.fewer(body), []))

    def fed(self, array: Any, var: Var) -> Any:
        """Rows by microbatches, as they are given to it."""
        if self._shares == 1:
            return jnp.expand_dims(self._schedule.entering(array, var), 2)
        return jax.vmap(lambda part: self._shared(part, var))(self._schedule.divided(array, var))

    def zeros(self) -> list[Any]:
        """What is added to: of each place that rows are shared out over."""
        places = (self._schedule.parts, self._shares)
        return [
            self._sharded(jnp.zeros((*places, *var.aval.shape), wide(var.aval.dtype)))
            for var in self.sums
        ]

    def total(self, var: Any, total: Any) -> Any:
        """What all microbatches come to."""
        return total.sum((0, 1)).astype(var.aval.dtype)

    def __call__(
        self, given: Sequence[Any], totals: list[Any], over: Sequence[Any], passed: Arrays
    ) -> tuple[Arrays, list[Any], list[Any]]:
        """A microbatch.

        Args:
            given: of `given`.
            totals: what is added to.
            over: of `over`: [parts, shares, ...].
            passed: what has come through the layers: [parts, ...].

        Returns:
            What goes back, [parts, ...]; the totals; what else is left of its rows, and of all.
        """
        shared = [*over, *(self._shared(passed[n], var) for n, var in self._passed.items())]
        axes = [None] * len(given) + [0] * len(shared)
        run = jax.vmap(self._run, axes, spmd_axis_name=self._axis(STAGE))
        outs = jax.vmap(run, axes, spmd_axis_name=self._axis(DATA))(*given, *shared)
        back, sums, rows, last = _cut(
            outs, [len(self._turning), len(self.sums), len(self.rows), len(self.last)]
        )
        turned = {
            n: self._whole(array, var)
            for (n, var), array in zip(self._turning.items(), back, strict=True)
        }
        totals = [
            self._sharded(total + new.astype(total.dtype))
            for total, new in zip(totals, sums, strict=True)
        ]
        whole = [self._whole(array, var) for var, array in zip(self.rows, rows, strict=True)]
        return turned, totals, [*whole, *(array[0, 0] for array in last)]

    def _axis(self, name: str) -> str | None:
        size = self._schedule.parts if name == DATA else self._shares
        return name if size > 1 else None

    def _shared(self, array: Any, var: Var) -> Any:
        """[parts, ...] as [parts, shares, ...]."""
        (dim,) = self._dims[var]
        shape = array.shape
        cut = (*shape[: dim + 1], self._shares, shape[dim + 1] // self._shares, *shape[dim + 2 :])
        return self._sharded(jnp.moveaxis(array.reshape(cut), dim + 1, 1))

    def _whole(self, array: Any, var: Var) -> Any:
        """What `_shared` has shared out."""
        (dim,) = self._dims[var]
        made = jnp.moveaxis(array, 1, dim + 1)
        shape = made.shape
        return made.reshape(*shape[: dim + 1], shape[dim + 1] * shape[dim + 2], *shape[dim + 3 :])

    def _sharded(self, array: Any) -> Any:
        if STAGE not in jax.sharding.get_abstract_mesh().shape:
            return array
        places = (self._axis(DATA) or _OPEN, self._axis(STAGE) or _OPEN)
        return jax.lax.with_sharding_constraint(array, jax.P(*places, *[_OPEN] * (array.ndim - 2)))


class _There(NamedTuple):
    """The way there: what stages have, what is added to, and what is kept for the way back.

    Attributes:
        kept: by the numbers of the scan's outputs, [slots, stages, parts, layers of a block, ...].
    """

    state: Arrays
    totals: Arrays
    kept: Arrays


class _Back(NamedTuple):
    """The way back: what stages have, what is added to, and what has come back (`Stages.left`)."""

    state: Arrays
    totals: Arrays
    left: Arrays


class Left(NamedTuple):
    """What is left when all microbatches have come back.

    Attributes:
        there: what was added to on the way there.
        back: what was added to on the way back.
        returned: the rows that have come back, [microbatches, parts, ...].
        sums: what was added to between, of `Turn.sums`.
        others: what else is left of it, of `Turn.rows` and `Turn.last`, by microbatches.
    """

    there: Arrays
    back: Arrays
    returned: Arrays
    sums: list[Any]
    others: list[Any]


class Alternating:
    """Layers in stages, forward and back in turn.

    Attributes:
        there: the layers' stages, on the way there.
        back: the same, on the way back.

    Args:
        halves: the step around its layers.
        turn: what is between.
        schedule: of the ticks.
    """

    def __init__(self, halves: Halves, turn: Turn, schedule: Schedule) -> None:
        self._schedule, self._turn = schedule, turn
        self.there = Stages(halves.forward, schedule)
        self.back = Stages(halves.backward, schedule)
        self._slots = room(schedule.stages, schedule.micro, schedule.rounds)
        outs = halves.forward.scan.eqn.outvars
        stacks = {outs[n]: n for n in self.there.stacks}
        over = enumerate(halves.backward.scan.eqn.invars)
        self._held = {n: stacks[v] for n, v in over if isinstance(v, Var) and v in stacks}

    def run(
        self, there: Work, back: Work, entering: Arrays, given: Sequence[Any], over: Sequence[Any]
    ) -> Left:
        """All microbatches.

        Args:
            there: what the layers are given on the way there.
            back: the same, on the way back.
            entering: the rows that go through them, [microbatches, parts, ...].
            given: what `turn` needs.
            over: the same that has rows, as `Turn.fed` makes it.
        """
        schedule, wait = self._schedule, self._schedule.wait
        aval = jax.eval_shape(self._turned, given, over, entering)
        nothing = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), aval)

        def come(tick: Any, now: _There) -> _There:
            return self._come(there, entering, now, tick)[0]

        def both(tick: Any, carry: tuple[_There, _Back, list[Any]]) -> Any:
            now, going, totals = carry
            now, _ = self._come(there, entering, now, tick)
            return now, self._go(back, now.kept, nothing, going, tick), totals

        def turning(carry: tuple[_There, _Back, list[Any]], tick: Any) -> Any:
            now, going, totals = carry
            now, passed = self._come(there, entering, now, tick)
            own = _at(list(over), schedule.seats(tick, stage=self.there.last).micro)
            turned, totals, left = self._turn(given, totals, own, passed)
            return (now, self._go(back, now.kept, turned, going, tick), totals), left

        each = schedule.stages if schedule.rounds > 1 else schedule.micro
        apart = schedule.rounds * each

        def lap(carry: tuple[_There, _Back, list[Any]], tick: Any) -> Any:
            """As many microbatches as there are stages; before them, the rounds until then."""
            if apart > each:
                first = jnp.where(tick == wait, tick, tick + each - apart)
                carry = jax.lax.fori_loop(first, tick, both, carry)
            return jax.lax.scan(turning, carry, tick + jnp.arange(each))

        first = jax.lax.fori_loop(0, wait, come, self._start(there, entering))
        begin = first, self._begin(nothing), self._turn.zeros()
        starts = wait + apart * jnp.arange(schedule.micro // each)
        (last, going, totals), others = jax.lax.scan(lap, begin, starts)

        def go(tick: Any, going: _Back) -> _Back:
            return self._go(back, last.kept, nothing, going, tick)

        going = jax.lax.fori_loop(schedule.ticks, schedule.ticks + wait, go, going)
        returned = {n: self.back.leaving(array) for n, array in going.left.items()}
        others = [array.reshape(schedule.micro, *array.shape[2:]) for array in others]
        return Left(last.totals, going.totals, returned, totals, others)

    def _start(self, there: Work, entering: Arrays) -> _There:
        schedule, stages = self._schedule, self.there
        state = stages.begun({n: array[0] for n, array in entering.items()})
        now = _at((there.fed, there.slices), 0)
        avals = jax.eval_shape(
            lambda: stages.advanced(there, state, stages.zeros(), now, schedule.seats(0))[2]
        )
        kept = {
            n: schedule.sharded(jnp.zeros((self._slots, *avals[n].shape), avals[n].dtype), 1)
            for n in sorted(set(self._held.values()))
        }
        return _There(state, stages.zeros(), kept)

    def _begin(self, nothing: Arrays) -> _Back:
        stages = self.back
        return _Back(stages.begun(nothing), stages.zeros(), stages.leaves(nothing))

    def _come(self, work: Work, entering: Arrays, now: _There, tick: Any) -> tuple[_There, Arrays]:
        """A tick of the way there; what has come through, [parts, ...]."""
        schedule, stages = self._schedule, self.there
        seats = schedule.seats(tick)
        coming = _at(entering, schedule.seats(tick, stage=stages.first).micro)
        state = stages.entered(now.state, coming, seats)
        given = _at((work.fed, work.slices), tick)
        rows, totals, stacks = stages.advanced(work, state, now.totals, given, seats)
        kept = {
            n: jax.lax.dynamic_update_index_in_dim(slots, stacks[n], tick % self._slots, 0)
            for n, slots in now.kept.items()
        }
        passed = {n: stages.leaving(array[None])[0] for n, array in rows.items()}
        return _There(stages.moved(rows), totals, kept), passed

    def _go(self, work: Work, kept: Arrays, turned: Arrays, now: _Back, tick: Any) -> _Back:
        """A tick of the way back."""
        schedule, stages = self._schedule, self.back
        since = tick - schedule.wait
        seats = schedule.seats(since, is_late=True)
        out = schedule.seats(since, stage=stages.last, is_late=True)
        came = schedule.came(seats)
        held = {n: self._picked(kept[m], came) for n, m in self._held.items()}
        fed, slices = _at((work.fed, work.slices), since)
        state = stages.entered(now.state, turned, seats)
        rows, totals, _ = stages.advanced(work, state, now.totals, (fed, slices | held), seats)
        return _Back(stages.moved(rows), totals, stages.left(now.left, rows, out.micro))

    def _picked(self, kept: Any, ticks: Any) -> Any:
        """Of each stage, what its layers left in its tick."""
        own = jax.vmap(
            lambda slots, tick: jax.lax.dynamic_index_in_dim(
                slots, tick % self._slots, keepdims=False
            ),
            in_axes=(1, 0),
        )
        return self._schedule.sharded(own(kept, ticks))

    def _turned(self, given: Sequence[Any], over: Sequence[Any], entering: Arrays) -> Arrays:
        """What goes back of one microbatch, for its shapes."""
        first = {n: array[0] for n, array in entering.items()}
        return self._turn(given, self._turn.zeros(), [array[0] for array in over], first)[0]


def _at(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False), tree)


def _cut(all_: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """In pieces of such lengths."""
    rest, found = list(all_), []
    for length in lengths:
        found.append(rest[:length])
        rest = rest[length:]
    return found
