"""Which rows of the batch are on which stage in which tick of a pipeline.

Of the layers each stage has as many blocks as there are rounds, and stage s the blocks s, S + s and
so on of S stages. The microbatches go there in turns of S: through the first blocks, around through
the second ones, and when these S are through, the next S. So stage s is at item t - s in tick t,
item i being microbatch i % S of its turn, in round i // S of it, and none ever waits for its next
round (Narayanan et al., 2021, arXiv:2104.04473, section 2.2.2).

Each microbatch is in turn in as many parts as the mesh has places along its data axis, in a
dimension of their own: so what is summed over rows stays apart for each part until all ticks are
over, and devices add it up once, not in each tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from nbdist.jaxpr.pipeline.interleaving import collected, dealt
from nbdist.records import DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.microbatches import Rows

_OPEN = jax.P.UNCONSTRAINED


class Skewed(NamedTuple):
    """What each layer has of the rows, by the ticks in which its stage has them.

    Attributes:
        array: [ticks, stages, parts, layers of a block, ...].
    """

    array: Any


class Dealt(NamedTuple):
    """What each layer has that is no rows, as `Schedule.dealt` has it.

    Attributes:
        array: [layers, ...].
    """

    array: Any


class Ticks(NamedTuple):
    """What stages are at in a tick, each [stages], or what one of them is at.

    Attributes:
        micro: the microbatch.
        round: in which round it is there.
        is_working: whether there is one; the others are of no use.
    """

    micro: Any
    round: Any
    is_working: Any


@dataclass(frozen=True)
class Schedule:
    """The ticks of a pipeline.

    Attributes:
        rows: where rows are; in how many parts of microbatches.
        stages: how many stages.
        parts: of a microbatch.
        rounds: how often a microbatch goes through all stages; if often, the microbatches are a
            multiple of the stages.
    """

    rows: Rows
    stages: int
    parts: int
    rounds: int = 1

    @property
    def micro(self) -> int:
        """How many microbatches."""
        return self.rows.parts // self.parts

    @property
    def ticks(self) -> int:
        """Until the last microbatch has left the last stage."""
        return self.items + self.stages - 1

    @property
    def items(self) -> int:
        """What each stage does: one block of layers for one microbatch."""
        return self.rounds * self.micro

    @property
    def wait(self) -> int:
        """Ticks before the first microbatch is in its last round, at the last stage."""
        return self.rounds * self.stages - 1

    def seats(self, tick: Any, *, stage: int | None = None, is_late: bool = False) -> Ticks:
        """What stages are at.

        Args:
            tick: which.
            stage: of one stage alone: to take that of what all are at would be a message.
            is_late: whether a microbatch is at the last stage first, and in the last round.
        """
        wait: Any = jnp.arange(self.stages) if stage is None else stage
        item = tick - (self.stages - 1 - wait if is_late else wait)
        micro, turn = self._of(item)
        is_working = (item >= 0) & (item < self.items)
        return Ticks(micro, self.rounds - 1 - turn if is_late else turn, is_working)

    def came(self, seats: Ticks) -> Any:
        """Of each stage, the tick in which it was on the way there at what it is at."""
        item = seats.micro // self.stages * self.rounds * self.stages
        item += seats.round * self.stages + seats.micro % self.stages
        return item + jnp.arange(self.stages)

    def _of(self, item: Any) -> tuple[Any, Any]:
        """The microbatch of an item, and its round."""
        item = jnp.clip(item, 0, self.items - 1)
        turn, own = jnp.divmod(item, self.rounds * self.stages)
        return turn * self.stages + own % self.stages, own // self.stages

    def divided(self, array: Any, var: Any) -> Any:
        """Rows as [microbatches, parts, ...]: a part has rows of one place, with gaps between them.

        Args:
            array: it.
            var: the variable that it is of.
        """
        (dim,) = self.rows.dims[var]
        head, tail = array.shape[:dim], array.shape[dim + 1 :]
        own, beside = self.rows.batch // self.rows.parts, array.shape[dim] // self.rows.batch
        apart = array.reshape(*head, self.parts, own, self.micro, beside, *tail)
        first = jnp.moveaxis(apart, (dim + 2, dim), (0, 1))
        return first.reshape(self.micro, self.parts, *head, own * beside, *tail)

    def joined(self, array: Any, var: Any) -> Any:
        """What `divided` has divided."""
        (dim,) = self.rows.dims[var]
        head, tail = array.shape[2 : dim + 2], array.shape[dim + 3 :]
        own = self.rows.batch // self.rows.parts
        beside = array.shape[dim + 2] // own
        apart = array.reshape(self.micro, self.parts, *head, own, beside, *tail)
        last = jnp.moveaxis(apart, (0, 1), (dim + 2, dim))
        return last.reshape(*head, self.rows.batch * beside, *tail)

    def fed(self, array: Any, var: Any, *, is_late: bool) -> Any:
        """Rows that all layers are given, as [ticks, stages, parts, ...].

        Args:
            array: it.
            var: the variable that it is of.
            is_late: whether a microbatch is at the last stage first.
        """
        return self._by_ticks(self.divided(array, var), None, is_late=is_late)

    def skewed(self, array: Any, var: Any, *, is_late: bool) -> Skewed:
        """Rows of a stack [layers, ...], likewise; the layers as stages have them (`dealt`)."""
        stack = self.by_stages(self.divided(array, var), 2)
        return Skewed(self._by_ticks(stack, 2, is_late=is_late))

    def whole(self, skewed: Skewed, var: Any) -> Any:
        """What `skewed` has skewed, its layers in their order."""

        def own(array: Any, stage: Any) -> Any:
            items = jax.lax.dynamic_slice_in_dim(array, stage, self.items)
            if self.rounds == 1:
                return items
            turns = items.reshape(-1, self.rounds, self.stages, *items.shape[1:])
            apart = jnp.moveaxis(turns, 1, 3)  # [turns, stages, parts, rounds, ...]
            shape = apart.shape
            return apart.reshape(self.micro, shape[2], shape[3] * shape[4], *shape[5:])

        run = jax.vmap(own, in_axes=(1, 0), out_axes=2)
        stack = run(skewed.array, jnp.arange(self.stages))
        shape = stack.shape
        rows = self.leaving(stack.reshape(*shape[:2], shape[2] * shape[3], *shape[4:]), var)
        return self.collected(rows, is_cut=False)

    def entering(self, array: Any, var: Any) -> Any:
        """As `divided`, with all rows of a part on every stage: what is cut is gathered once."""
        made, (dim,) = self.divided(array, var), self.rows.dims[var]
        sizes = _mesh().shape
        if STAGE not in sizes:
            return made
        own: Any = None
        if self.parts == 1 and made.shape[dim + 2] % sizes[DATA] == 0:
            own = DATA  # rows whose microbatches do not divide over the places
        rest: list[Any] = [_OPEN] * (made.ndim - 2)
        rest[dim] = own
        spec = jax.P(None, DATA if self.parts > 1 else None, *rest)
        return jax.lax.with_sharding_constraint(made, spec)

    def leaving(self, array: Any, var: Any) -> Any:
        """As `joined`, with each stage having rows of its own, for what is no layer."""
        made, (dim,) = self.joined(array, var), self.rows.dims[var]
        sizes = _mesh().shape
        if STAGE not in sizes:
            return made
        axes = row_axes(self.rows.batch, sizes) or _OPEN
        rest: list[Any] = [_OPEN] * made.ndim
        rest[dim] = axes
        return jax.lax.with_sharding_constraint(made, jax.P(*rest))

    def dealt(self, array: Any, *, is_cut: bool) -> Any:
        """Of [layers, ...], each stage's one after another."""
        return dealt(array, self.stages, self.rounds, is_cut=is_cut)

    def collected(self, array: Any, *, is_cut: bool) -> Any:
        """What `dealt` has dealt."""
        return collected(array, self.stages, self.rounds, is_cut=is_cut)

    def by_stages(self, array: Any, dim: int = 0) -> Any:
        """A dimension of layers, as `dealt` has them, as one of stages, and one of each one's."""
        shape = array.shape
        apart = (self.stages, shape[dim] // self.stages)
        return array.reshape(*shape[:dim], *apart, *shape[dim + 1 :])

    def sharded(self, array: Any, dim: int = 0, *, parts: bool = True) -> Any:
        """Cut over the mesh's stages, if it has some; other dimensions as they come.

        Args:
            array: it.
            dim: which dimension is that of the stages.
            parts: whether the next one is that of a microbatch's parts.
        """
        if STAGE not in _mesh().shape:
            return array
        rest: list[Any] = [_OPEN] * (array.ndim - dim - 1)
        if parts and self.parts > 1:
            rest[0] = DATA
        return jax.lax.with_sharding_constraint(array, jax.P(*[_OPEN] * dim, STAGE, *rest))

    def _by_ticks(self, array: Any, dim: int | None, *, is_late: bool) -> Any:
        """What stages have of [microbatches, ...], in which they may be a dimension."""

        def own(array: Any, micro: Any, turn: Any) -> Any:
            if dim is None or self.rounds == 1:
                return array[micro]
            shape = array.shape
            apart = (self.rounds, shape[2] // self.rounds)
            return array.reshape(*shape[:2], *apart, *shape[3:])[micro, :, turn]

        run = jax.vmap(own, in_axes=(dim, 1, 1), out_axes=1)
        seats = self.seats(jnp.arange(self.ticks)[:, None], is_late=is_late)
        return self.sharded(run(array, seats.micro, seats.round), 1)


def inner(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of what a program's equations hold."""
    for eqn in jaxpr.eqns:
        for body in jaxprs_in_params(eqn.params):
            yield from body.eqns
            yield from inner(body)


def names(eqn: Any, axis: str) -> bool:
    """Whether an equation says how an array is cut over an axis of the mesh, or may say so."""
    if eqn.primitive.name != "sharding_constraint":
        return False
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, jax.NamedSharding):
        return True
    return any(axes == axis or (isinstance(axes, tuple) and axis in axes) for axes in sharding.spec)


def parts_of(batch: int, micro: int) -> int:
    """Of a microbatch: the places of the mesh's data axis, where rows divide over them."""
    places = _mesh().shape.get(DATA, 1)
    return places if batch % (micro * places) == 0 else 1


def row_axes(rows: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that rows are cut over where they go through no layers: those that divide them.

    Args:
        rows: how many.
        sizes: of the mesh's axes.
    """
    axes: tuple[str, ...] = ()
    for axis in (DATA, STAGE):
        size = sizes.get(axis, 1)
        if rows % size:
            break
        rows //= size
        axes += (axis,) if axis in sizes else ()
    return axes


def _mesh() -> jax.sharding.AbstractMesh:
    return jax.sharding.get_abstract_mesh()
