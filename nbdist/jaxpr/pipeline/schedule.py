"""Schedule of a pipeline in ticks: the rows and the layers of each stage in each tick.

Each of S stages has as many blocks of layers as there are rounds; stage s has the blocks s, S + s,
... Microbatches run in groups of S: through all first blocks, through all second blocks, and so on;
then the next group starts. Stage s processes item t - s in tick t. Item i is microbatch i % S of
its group, in round i // S. No microbatch waits for its next round (Narayanan et al., 2021,
arXiv:2104.04473, section 2.2.2).

Each microbatch is divided into as many parts as the data axis of the mesh has devices, in a
dimension of its own. So sums over rows stay separate for each part, and devices add them once at
the end and not in each tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.jaxpr.pipeline.interleaving import deinterleaved, interleaved
from nbdist.jaxpr.sharding_constraints import axes_of
from nbdist.planner.graph.pipeline_schedule import ticks
from nbdist.records import BATCH_AXES, DATA, STAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.jaxpr.microbatches import Rows

_OPEN = jax.P.UNCONSTRAINED


class Skewed(NamedTuple):
    """Rows of each layer, by the tick in which its stage processes them.

    Attributes:
        array: [ticks, stages, parts, layers of a block, ...].
    """

    array: Any


class Interleaved(NamedTuple):
    """Values of each layer without rows, in the order of `Schedule.interleaved`.

    Attributes:
        array: [layers of all stages, ...].
    """

    array: Any


class StageRows(NamedTuple):
    """Rows of all microbatches that one stage has; no other stage has received them.

    Attributes:
        array: [microbatches, stages, parts, ...]; the values of other stages are meaningless. With
            1 in place of the stages, all stages have the rows.
        stage: number of the stage.
    """

    array: Any
    stage: int


class StageItems(NamedTuple):
    """Items of all stages in a tick, each [stages], or of one stage.

    Attributes:
        micro: number of the microbatch.
        round: its round.
        is_working: True if there is an item; other results are discarded.
    """

    micro: Any
    round: Any
    is_working: Any


@dataclass(frozen=True)
class Schedule:
    """The ticks of a pipeline.

    Attributes:
        rows: rows of the step; its parts are those of all microbatches.
        stages: number of stages.
        parts: number of parts of a microbatch.
        rounds: passes of a microbatch through all stages; if more than one, the stages divide the
            microbatches.
        stacks_layers: True if the step stacks the parameters of layers, which are separate arrays;
            stages store a part of each of them.
    """

    rows: Rows
    stages: int
    parts: int
    rounds: int = 1
    stacks_layers: bool = False

    @property
    def micro(self) -> int:
        """Number of microbatches."""
        return self.rows.parts // self.parts

    @property
    def ticks(self) -> int:
        """Ticks of the pipeline in one direction."""
        return ticks(self.stages, self.micro, self.rounds)

    @property
    def items(self) -> int:
        """Items of each stage: one block of layers for one microbatch."""
        return self.rounds * self.micro

    @property
    def warmup_ticks(self) -> int:
        """Ticks before the first microbatch reaches its last round at the last stage."""
        return self.rounds * self.stages - 1

    def items_of_tick(
        self, tick: Any, *, stage: int | None = None, is_late: bool = False
    ) -> StageItems:
        """Return the items of stages in a tick.

        Args:
            tick: number of the tick.
            stage: a single stage; indexing the result of all stages would send a message.
            is_late: True if the last stage and the last round come first, as in a backward pass.
        """
        delay: Any = jnp.arange(self.stages) if stage is None else stage
        item = tick - (self.stages - 1 - delay if is_late else delay)
        micro, round_ = self._of(item)
        is_working = (item >= 0) & (item < self.items)
        return StageItems(micro, self.rounds - 1 - round_ if is_late else round_, is_working)

    def forward_ticks(self, items: StageItems) -> Any:
        """Return, for each stage, the tick of the forward pass that processed the same item."""
        item = items.micro // self.stages * self.rounds * self.stages
        item += items.round * self.stages + items.micro % self.stages
        return item + jnp.arange(self.stages)

    def _of(self, item: Any) -> tuple[Any, Any]:
        """Return the microbatch and the round of an item."""
        item = jnp.clip(item, 0, self.items - 1)
        group, own = jnp.divmod(item, self.rounds * self.stages)
        return group * self.stages + own % self.stages, own // self.stages

    def divided(self, array: Any, var: Any) -> Any:
        """Return rows as [microbatches, parts, ...], where the rows of a part are on one device.

        Args:
            array: the rows.
            var: the variable of the array.
        """
        (dim,) = self.rows.dims[var]
        head, tail = array.shape[:dim], array.shape[dim + 1 :]
        own, beside = self.rows.batch // self.rows.parts, array.shape[dim] // self.rows.batch
        apart = array.reshape(*head, self.parts, own, self.micro, beside, *tail)
        first = jnp.moveaxis(apart, (dim + 2, dim), (0, 1))
        return first.reshape(self.micro, self.parts, *head, own * beside, *tail)

    def joined(self, array: Any, var: Any) -> Any:
        """Undo `divided`."""
        (dim,) = self.rows.dims[var]
        head, tail = array.shape[2 : dim + 2], array.shape[dim + 3 :]
        own = self.rows.batch // self.rows.parts
        beside = array.shape[dim + 2] // own
        apart = array.reshape(self.micro, self.parts, *head, own, beside, *tail)
        last = jnp.moveaxis(apart, (0, 1), (dim + 2, dim))
        return last.reshape(*head, self.rows.batch * beside, *tail)

    def feed_by_tick(self, array: Any, var: Any, *, is_late: bool) -> Any:
        """Return rows that all layers read, as [ticks, stages, parts, ...].

        Args:
            array: the rows.
            var: the variable of the array.
            is_late: as in `items_of_tick`.
        """
        return self._by_ticks(self.divided(array, var), None, is_late=is_late)

    def skewed(self, array: Any, var: Any, *, is_late: bool) -> Skewed:
        """Return a stack of `interleaved` rows, [layers, ...], by ticks."""
        stack = self.by_stages(self.divided(array, var), 2)
        return Skewed(self._by_ticks(stack, 2, is_late=is_late))

    def unskewed(self, skewed: Skewed, var: Any, layers: int) -> Any:
        """Undo `skewed`, with layers in their original order.

        Args:
            skewed: the rows.
            var: the variable of the array.
            layers: number of layers.
        """

        def own(array: Any, stage: Any) -> Any:
            items = jax.lax.dynamic_slice_in_dim(array, stage, self.items)
            if self.rounds == 1:
                return items
            groups = items.reshape(-1, self.rounds, self.stages, *items.shape[1:])
            apart = jnp.moveaxis(groups, 1, 3)  # [groups, stages, parts, rounds, ...]
            shape = apart.shape
            return apart.reshape(self.micro, shape[2], shape[3] * shape[4], *shape[5:])

        run = jax.vmap(own, in_axes=(1, 0), out_axes=2)
        stack = run(skewed.array, jnp.arange(self.stages))
        shape = stack.shape
        apart = stack.reshape(*shape[:2], shape[2] * shape[3], *shape[4:])
        rows = self.outside(self.joined(apart, var), var)
        return self.deinterleaved(rows, layers, is_sharded=False)

    def entering(self, array: Any, var: Any) -> Any:
        """Return `divided` rows, gathered so that each stage has all rows of a part."""
        made, (dim,) = self.divided(array, var), self.rows.dims[var]
        sizes = _mesh().shape
        if STAGE not in sizes:
            return made
        own: Any = None
        if self.parts == 1 and made.shape[dim + 2] % sizes[DATA] == 0:
            own = DATA  # microbatches do not divide over the data axis
        rest: list[Any] = [_OPEN] * (made.ndim - 2)
        rest[dim] = own
        spec = jax.P(None, DATA if self.parts > 1 else None, *rest)
        return jax.lax.with_sharding_constraint(made, spec)

    def leaving(self, rows: StageRows, var: Any) -> Any:
        """Return `joined` rows, sharded over the stages, for operations outside of layers."""
        return self.outside(self.joined(of_stage(rows.array, rows.stage, 1), var), var)

    def on_all_stages(self, array: Any) -> Any:
        """Return an array of the batch, of which each stage has all rows of its part."""
        sizes = _mesh().shape
        if STAGE not in sizes or array.shape[:1] != (self.rows.batch,):
            return array
        axes = row_axes(self.rows.batch, {DATA: sizes[DATA]})
        rest = [_OPEN] * (array.ndim - 1)
        return jax.lax.with_sharding_constraint(array, jax.P(axes or None, *rest))

    def outside(self, made: Any, var: Any) -> Any:
        """Return rows of the whole batch, sharded over the stages too."""
        (dim,) = self.rows.dims[var]
        sizes = _mesh().shape
        if STAGE not in sizes:
            return made
        axes = row_axes(self.rows.batch, sizes) or _OPEN
        rest: list[Any] = [_OPEN] * made.ndim
        rest[dim] = axes
        return jax.lax.with_sharding_constraint(made, jax.P(*rest))

    def interleaved(self, array: Any, *, is_sharded: bool) -> Any:
        """Return [layers, ...] ordered by stage and round, with equal numbers for each stage."""
        return interleaved(
            array,
            self.stages,
            self.rounds,
            is_sharded=is_sharded,
            is_exchanged=self.stacks_layers and is_sharded,
        )

    def deinterleaved(self, array: Any, layers: int, *, is_sharded: bool) -> Any:
        """Undo `interleaved`."""
        return deinterleaved(
            array,
            layers,
            self.stages,
            self.rounds,
            is_sharded=is_sharded,
            is_exchanged=self.stacks_layers and is_sharded,
        )

    def by_stages(self, array: Any, dim: int = 0) -> Any:
        """Split a dimension of `interleaved` layers into stages and their layers."""
        shape = array.shape
        apart = (self.stages, shape[dim] // self.stages)
        return array.reshape(*shape[:dim], *apart, *shape[dim + 1 :])

    def sharded(self, array: Any, dim: int = 0, *, parts: bool = True) -> Any:
        """Constrain a dimension to be sharded over the stages of the mesh, if it has some.

        Args:
            array: array of any shape.
            dim: the dimension of the stages.
            parts: True if the next dimension is that of the parts of a microbatch.
        """
        if STAGE not in _mesh().shape:
            return array
        rest: list[Any] = [_OPEN] * (array.ndim - dim - 1)
        if parts and self.parts > 1:
            rest[0] = DATA
        return jax.lax.with_sharding_constraint(array, jax.P(*[_OPEN] * dim, STAGE, *rest))

    def _by_ticks(self, array: Any, dim: int | None, *, is_late: bool) -> Any:
        """Return the values of all stages by ticks, out of [microbatches, ...]."""

        def own(array: Any, micro: Any, round_: Any) -> Any:
            if dim is None or self.rounds == 1:
                return array[micro]
            shape = array.shape
            apart = (self.rounds, shape[2] // self.rounds)
            return array.reshape(*shape[:2], *apart, *shape[3:])[micro, :, round_]

        run = jax.vmap(own, in_axes=(dim, 1, 1), out_axes=1)
        items = self.items_of_tick(jnp.arange(self.ticks)[:, None], is_late=is_late)
        return self.sharded(run(array, items.micro, items.round), 1)


def constrains_axis(eqn: Any, axis: str) -> bool:
    """Return True if an equation constrains how an array is sharded over a mesh axis, or may."""
    if eqn.primitive.name != "sharding_constraint":
        return False
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, jax.NamedSharding):
        return True
    return any(axis in axes for axes in axes_of(sharding.spec))


def parts_of(batch: int, micro: int) -> int:
    """Return the parts of a microbatch: the size of the data axis, if rows divide over it."""
    places = _mesh().shape.get(DATA, 1)
    return places if batch % (micro * places) == 0 else 1


def row_axes(rows: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that shard rows outside of layers: those that divide them.

    Args:
        rows: number of rows.
        sizes: sizes of the mesh's axes.
    """
    axes: tuple[str, ...] = ()
    for axis in (*BATCH_AXES, STAGE):
        size = sizes.get(axis, 1)
        if rows % size:
            break
        rows //= size
        axes += (axis,) if axis in sizes else ()
    return axes


def chosen(flags: Any, those: Any, others: Any) -> Any:
    """Return, for each stage (the first dimension), one array or the other."""
    return jnp.where(flags.reshape(-1, *[1] * (others.ndim - 1)), those, others)


def of_stage(array: Any, stage: int, dim: int = 0) -> Any:
    """Return the part of one stage; of one part, which all stages have, this part.

    It is a sum over the stages with zeros for the others, so that XLA sends this part alone.

    Args:
        array: array of any shape.
        stage: its number.
        dim: the dimension of the stages.
    """
    if array.shape[dim] == 1:
        return jnp.squeeze(array, dim)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = of_stage(jax.random.key_data(array), stage, dim)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    is_stage = jnp.arange(array.shape[dim]) == stage
    flags = is_stage.reshape(-1, *[1] * (array.ndim - dim - 1))
    return jnp.where(flags, array, jnp.zeros_like(array)).sum(dim, dtype=array.dtype)


def _mesh() -> jax.sharding.AbstractMesh:
    return jax.sharding.get_abstract_mesh()
