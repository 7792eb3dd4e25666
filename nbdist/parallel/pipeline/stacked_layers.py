"""Equal layers in a pipeline over a mesh axis, as one program.

The inputs of all stages are one array, whose first dimension is sharded over the mesh axis. In
each tick all stages are one `vmap`, and a roll by one stage passes their outputs on. XLA compiles
it to a collective permute (the "shifted buffer" of GSPMD: Xu et al., 2021, arXiv:2105.04663,
section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nbdist.errors import UsageError
from nbdist.jaxpr.pipeline.schedule import chosen, of_stage
from nbdist.parallel.pipeline.stacked_layer_checks import (
    check_blocks,
    check_layer,
    check_layers,
    check_options,
    check_rows,
)
from nbdist.parallel.placement.leaves import leaves_of
from nbdist.parallel.placement.place import place
from nbdist.parallel.placement.target_tree import spread_of
from nbdist.parallel.placement.targets import spec_over
from nbdist.planner.graph.pipeline_schedule import ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh

_OPEN = PartitionSpec.UNCONSTRAINED
_WHOLE = PartitionSpec()
_SELECTING = {"dynamic_slice", "gather", "reshape", "squeeze"}
"""Primitives that select a round's parameters: to repeat them is as fast as to read results."""


def pipelined(
    layer: Callable[[Any, Any], Any],
    *,
    mesh: Mesh,
    axis: str = "stage",
    micro: int,
    rounds: int = 1,
    remat: bool = False,
) -> Pipelined:
    """Return a pipeline of equal layers over an axis of a mesh.

    The pipeline is one program. It runs within `jax.jit` and under `jax.grad`, on one process and
    on several. Other axes of the mesh may shard rows and weights.

    Args:
        layer: `(params of one layer, x) -> x`. x is an array, or a tree of them, of shape
            [rows, ...], and keeps its shape and type. The layer receives a microbatch: the result
            for a row must not depend on other rows.
        mesh: Mesh with automatic axes, such as `nbdist.meshes` returns.
        axis: Name of the axis whose positions are the stages.
        micro: Number of microbatches. Microbatch m contains rows m, m + micro, m + 2 micro, ..., so
            that rows which another axis shards stay on their devices.
        rounds: Number of times that a microbatch passes all stages. Each stage has this number of
            blocks of layers: the bubble is smaller by this factor, and more is sent. Needs
            `micro` >= stages if above 1.
        remat: Compute activations within a layer again for its gradient, and keep its input only.

    Returns:
        `Pipelined`: call it as `apply(params, x)`, with leaves of params of shape [layers, ...].

    Raises:
        UsageError: Options do not fit each other or the mesh; each fault is named.

    Examples:
        >>> mesh = nbdist.meshes({"stage": 4, "data": 2})
        >>> apply = nbdist.pipelined(lambda w, x: jnp.tanh(x @ w), mesh=mesh, micro=4)
        >>> params = apply.place(jnp.ones((8, 16, 16)))  # 8 layers, 2 on each stage
        >>> jax.jit(apply)(params, jnp.ones((8, 16))).shape
        (8, 16)
        >>> round(apply.bubble, 3)  # idle share of ticks: (4 - 1) / (4 + 4 - 1)
        0.429
    """
    check_options(mesh, axis, micro=micro, rounds=rounds)
    return Pipelined(layer, mesh, axis, micro, rounds, remat)


@dataclass(frozen=True, eq=False)
class Pipelined:
    """Layers in a pipeline: `apply(params, x)` applies them one after another.

    Attributes:
        layer: the layer function.
        mesh: the mesh of its devices.
        axis: mesh axis of the stages.
        micro: number of microbatches.
        rounds: passes of each microbatch through all stages.
        remat: True if the insides of layers are recomputed.
    """

    layer: Callable[[Any, Any], Any]
    mesh: Mesh
    axis: str
    micro: int
    rounds: int
    remat: bool

    @property
    def stages(self) -> int:
        size: int = self.mesh.shape[self.axis]
        return size

    @property
    def bubble(self) -> float:
        """Share of a pass's ticks in which a stage is idle.

        (stages - 1) / (rounds micro + stages - 1). Narayanan et al., 2021, arXiv:2104.04473,
        section 2.2, divide by the busy ticks instead: (stages - 1) / (rounds micro).
        """
        return (self.stages - 1) / self._ticks

    def place(self, params: Any, specs: Any = _WHOLE) -> Any:
        """Place the layers of each stage on its devices, so that no step has to move them.

        Args:
            params: leaves of shape [layers, ...], in the order in which they are applied.
            specs: `PartitionSpec` or tuple over the other axes, for the dimensions of one layer's
                leaf; or a tree of them, with the structure of params or its beginning.

        Returns:
            With one round, leaves of the same shape, their first dimension sharded over the axis.
                With more, leaves of shape [rounds, stages, layers / (rounds stages), ...]; their
                second dimension is sharded, and `leaf.reshape(-1, *leaf.shape[3:])` restores
                [layers, ...].

        Raises:
            UsageError: the layers do not divide, leaves are not arrays, or specs do not fit.
        """
        leaves_of(params, "place")
        check_layers(params, self.stages, self.rounds)
        spread = jax.tree.unflatten(
            jax.tree.structure(params),
            spread_of(params, specs, lambda spec, _: self._sharding(spec), ("specs", "params")),
        )
        if self.rounds > 1:
            params = jax.tree.map(
                lambda leaf: jnp.reshape(leaf, self._block_shape(leaf.shape)), params
            )
        return place(params, spread)

    def __call__(self, params: Any, x: Any) -> Any:
        """Apply the layers to x.

        Args:
            params: leaves of shape [layers, ...], whose number is a multiple of the stages, best
                sharded over the axis. With several rounds, use the result of `place`.
            x: leaves of shape [rows, ...]; the rows are a multiple of `micro`.

        Returns:
            Leaves of the shapes of x.

        Raises:
            UsageError: sizes do not divide, or the layer changes shapes or types.
        """
        if self.rounds == 1:
            check_layers(params, self.stages, self.rounds)
        else:
            check_blocks(params, self.stages, self.rounds)
        check_rows(x, self.micro)
        check_layer(self.layer, params, x, lead=1 if self.rounds == 1 else 3, micro=self.micro)
        return self._compiled(params, x)

    @property
    def _ticks(self) -> int:
        return ticks(self.stages, self.micro, self.rounds)

    @cached_property
    def _compiled(self) -> Callable[[Any, Any], Any]:
        compiled: Callable[[Any, Any], Any] = jax.jit(self._pipeline)
        return compiled

    def _pipeline(self, params: Any, x: Any) -> Any:
        blocks = jax.tree.map(self._blocks, params)
        # One more slot stores results of ticks before the first microbatch leaves the last stage.
        kept = jax.tree.map(self._slots, x)
        state = jax.tree.map(lambda slots: slots[:, 0], kept)
        tick = partial(self._tick, blocks)
        (_, kept), _ = jax.lax.scan(tick, (state, kept), jnp.arange(self._ticks))
        return jax.tree.map(self._rows, kept)

    def _tick(self, blocks: Any, carry: tuple[Any, Any], t: jax.Array) -> tuple[Any, None]:
        """Run all stages; stage s has item t - s, which is microbatch item % micro of a round."""
        state, kept = carry
        stage = jnp.arange(self.stages)
        first = jax.tree.map(partial(_at, t % self.micro, dimension=1), kept)
        fed = jax.tree.map(partial(chosen, stage == 0), first, state)
        made = jax.vmap(self._stage, in_axes=(1, 0, 0), spmd_axis_name=self.axis)(
            blocks, fed, t - stage
        )
        moved = jax.tree.map(lambda leaf: self._sharded(jnp.roll(leaf, 1, 0)), made)
        done = t - (self.stages - 1)
        slot = jnp.where(done >= 0, done % self.micro, self.micro)
        kept = jax.tree.map(
            lambda slots, new: jax.lax.dynamic_update_index_in_dim(slots, new, slot, 1), kept, moved
        )
        return (moved, kept), None

    def _stage(self, blocks: Any, x: Any, item: jax.Array) -> Any:
        """Run the layers of a stage in one round; blocks have the shape [rounds, layers, ...]."""
        working = (item >= 0) & (item < self.rounds * self.micro)
        blocks, x = _gated((blocks, x), working)
        if self.rounds == 1:
            layer = jax.checkpoint(self.layer, prevent_cse=False) if self.remat else self.layer
            own = jax.tree.map(lambda leaf: leaf[0], blocks)
            return jax.lax.scan(lambda h, one: (layer(one, h), None), x, own)[0]
        round_index = jnp.clip(item // self.micro, 0, self.rounds - 1)
        for number in range(jax.tree.leaves(blocks)[0].shape[1]):
            x = self._picked(
                jax.tree.map(lambda leaf, n=number: leaf[:, n], blocks), x, round_index
            )
        return x

    @cached_property
    def _picked(self) -> Callable[[Any, Any, jax.Array], Any]:
        """Apply a layer, given its params of all rounds; no tick stores those of its round."""

        def apply(of_rounds: Any, x: Any, round_index: jax.Array) -> Any:
            return self.layer(jax.tree.map(partial(_at, round_index, dimension=0), of_rounds), x)

        policy = None if self.remat else _is_kept
        picked: Callable[[Any, Any, jax.Array], Any] = jax.checkpoint(
            apply, prevent_cse=False, policy=policy
        )
        return picked

    def _block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape [rounds, stages, layers of a block, ...] for [layers, ...]."""
        per = shape[0] // (self.rounds * self.stages)
        return (self.rounds, self.stages, per, *shape[1:])

    def _blocks(self, leaf: jax.Array) -> jax.Array:
        blocks = leaf.reshape(self._block_shape(leaf.shape)) if self.rounds == 1 else leaf
        spec = PartitionSpec(_OPEN, self.axis, *[_OPEN] * (blocks.ndim - 2))
        return jax.lax.with_sharding_constraint(blocks, NamedSharding(self.mesh, spec))

    def _slots(self, leaf: jax.Array) -> jax.Array:
        """Return rows as [stages, micro + 1, rows of a microbatch, ...]; only stage 0 uses them."""
        micro = leaf.reshape(-1, self.micro, *leaf.shape[1:]).swapaxes(0, 1)
        slots = jnp.concatenate([micro, micro[:1]])
        return self._sharded(jnp.broadcast_to(slots, (self.stages, *slots.shape)))

    def _rows(self, kept: jax.Array) -> jax.Array:
        """Return the final rows, which arrived at the first stage last."""
        own: jax.Array = of_stage(kept[:, : self.micro], 0)
        return own.swapaxes(0, 1).reshape(-1, *own.shape[2:])

    def _sharded(self, leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec(self.axis, *[_OPEN] * (leaf.ndim - 1))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        if not isinstance(spec, PartitionSpec):
            raise UsageError(f"specs contains {spec!r}: use a PartitionSpec over the other axes")
        lead = (self.axis,) if self.rounds == 1 else (None, self.axis, None)
        return spec_over(PartitionSpec(*lead, *spec), self.mesh)


def _same(tree: Any, working: jax.Array) -> Any:
    """Return the tree; its gradient is zero for an idle stage.

    The results of an idle stage may be infinite or NaN, and so would its gradients be, even if
    nothing uses the results.
    """
    return tree


def _gated_forward(tree: Any, working: jax.Array) -> tuple[Any, jax.Array]:
    return tree, working


def _gated_backward(working: jax.Array, gradient: Any) -> tuple[Any, None]:
    def gated(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:  # gradient of integers
            return leaf
        return jnp.where(working, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(gated, gradient), None


_gated = jax.custom_vjp(_same)
_gated.defvjp(_gated_forward, _gated_backward)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True if the backward pass keeps it: a policy of `jax.checkpoint`."""
    return primitive.name not in _SELECTING


def _at(number: jax.Array, leaf: jax.Array, *, dimension: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, number, dimension, keepdims=False)
