"""Distribution of layers to stages in blocks, one block for each round.

Carried parameters keep the order of layers, and each stage stores consecutive layers, because a
sharding cannot express another order. So blocks are sent to the stage that computes them, and
gradients back, once in a step. This takes as many permutations of the stages as there are rounds.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nbdist.jaxpr.pipeline.uneven_stages import padded, unpadded
from nbdist.records import STAGE


def interleaved(
    array: Any, stages: int, rounds: int, *, is_sharded: bool, is_exchanged: bool = False
) -> Any:
    """Return layers ordered by stage, and for each stage by round.

    Stages that do not divide the layers get as many as the largest stage (`uneven_stages`).

    Args:
        array: [layers, ...], in order.
        stages: number of stages.
        rounds: blocks of each stage.
        is_sharded: True if each stage stores its own layers.
        is_exchanged: True if each stage stores a part of each layer instead; `rounds` is 1.
    """
    if array.shape[0] % stages or is_exchanged:
        return padded(array, stages, is_sent=is_sharded and _can_be_sent(array))
    return _moved(array, stages, rounds, is_sharded=is_sharded, is_back=False)


def deinterleaved(
    array: Any,
    layers: int,
    stages: int,
    rounds: int,
    *,
    is_sharded: bool,
    is_exchanged: bool = False,
) -> Any:
    """Undo `interleaved`.

    Args:
        array: layers, ordered by stage and round.
        layers: number of layers.
        stages: as in `interleaved`.
        rounds: as in `interleaved`.
        is_sharded: as in `interleaved`.
        is_exchanged: as in `interleaved`.
    """
    if layers % stages or is_exchanged:
        return unpadded(array, layers, stages, is_sent=is_sharded and _can_be_sent(array))
    return _moved(array, stages, rounds, is_sharded=is_sharded, is_back=True)


def _moved(array: Any, stages: int, rounds: int, *, is_sharded: bool, is_back: bool) -> Any:
    if rounds == 1:
        return array
    if is_sharded and _can_be_sent(array):
        spec = jax.P(STAGE)
        own = partial(_sent, stages=stages, rounds=rounds, is_back=is_back)
        names = {STAGE}
        run = jax.shard_map(own, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)
        return run(array)
    sizes = (stages, rounds) if is_back else (rounds, stages)
    blocks = array.reshape(*sizes, -1, *array.shape[1:])
    return jnp.swapaxes(blocks, 0, 1).reshape(array.shape)


def _can_be_sent(array: Any) -> bool:
    """Return True if a permutation can send the array: random keys need another way."""
    is_plain = not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return is_plain and STAGE in jax.sharding.get_abstract_mesh().shape


def _sent(own: Any, *, stages: int, rounds: int, is_back: bool) -> Any:
    """Send the layers of a stage block by block, to or from their positions in layer order."""
    blocks = own.reshape(rounds, -1, *own.shape[1:])
    received = jnp.zeros_like(blocks)
    stage = jax.lax.axis_index(STAGE)
    for permutation in _permutations(stages, rounds):
        moves = [move.reversed() for move in permutation] if is_back else permutation
        sources = jnp.array([move.source for move in sorted(moves)])
        targets = jnp.array([m.target for m in sorted(moves, key=lambda move: move.receiver)])
        block = jax.lax.dynamic_index_in_dim(blocks, sources[stage], keepdims=False)
        block = jax.lax.ppermute(block, STAGE, [(m.sender, m.receiver) for m in moves])
        received = jax.lax.dynamic_update_index_in_dim(received, block, targets[stage], 0)
    return received.reshape(own.shape)


class _Move(NamedTuple):
    """Transfer of a block from one stage to another.

    Attributes:
        sender: number of the stage that sends the block.
        source: position of the block there.
        receiver: number of the stage that receives it.
        target: position of the block at the receiver.
    """

    sender: int
    source: int
    receiver: int
    target: int

    def reversed(self) -> _Move:
        """Return the transfer of the block back."""
        return _Move(self.receiver, self.target, self.sender, self.source)


def _permutations(stages: int, rounds: int) -> list[list[_Move]]:
    """Return the permutations of stages in which each stage sends one block and receives one.

    Block b is stored at position b % rounds of stage b // rounds, and is computed in round b //
    stages of stage b % stages. Let g be the greatest common divisor of both numbers. The stages s,
    s + stages / g, ... would send their first blocks to the same stage, so they begin with their
    second, third, ... blocks. The starts of the other stages are a multiple of g apart, and
    positions modulo g differ.

    Returns:
        The moves of each permutation, in the order of the senders. A block's target is its round.
    """
    period = stages // gcd(stages, rounds)
    found = []
    for start in range(rounds):
        moves = []
        for sender in range(stages):
            source = (start + sender // period) % rounds
            target, receiver = divmod(sender * rounds + source, stages)
            moves.append(_Move(sender, source, receiver, target))
        found.append(moves)
    return found
