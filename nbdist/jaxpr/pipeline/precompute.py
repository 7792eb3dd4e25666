"""What layers make of other things than rows: once for all microbatches.

Keys of generators that are split from layer to layer, parameters in a narrower type, dropouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from nbdist.jaxpr.pipeline.schedule import Dealt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.pipeline.layer_scans import Layers

    Arrays = dict[int, Any]
    """By the number of an input, or of an output, of the scan's body."""


class Round:
    """A layer, for some of what it leaves.

    Attributes:
        needed: the numbers of the inputs that it needs.

    Args:
        body: of the scan that it is of.
        wanted: the numbers of the outputs.
    """

    def __init__(self, body: Jaxpr, wanted: Collection[int]) -> None:
        self._wanted = sorted(wanted)
        is_wanted = [n in wanted for n in range(len(body.outvars))]
        jaxpr, is_needed = partial_eval.dce_jaxpr(body, is_wanted)
        self._needed = [n for n, needed in enumerate(is_needed) if needed]
        self.needed = frozenset(self._needed)
        self._run = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def __call__(self, given: Mapping[int, Any]) -> Arrays:
        """What is wanted."""
        outs = self._run(*(given[n] for n in self._needed))
        return dict(zip(self._wanted, outs, strict=True))


class Ahead(NamedTuple):
    """What is made before the rows come.

    Attributes:
        over: what layers are given of it, stacked: of what they go over, and what they pass on; as
            stages have them.
        left: what the scan leaves of it; of each layer as stages have them.
        drawn: what layers go over that has rows, stacked likewise.
    """

    over: Arrays
    left: Arrays
    drawn: Arrays


def ahead(
    layers: Layers, given: Arrays, deal: Callable[[Any], Any], collect: Callable[[Any], Any]
) -> Ahead:
    """What a scan over layers makes without rows.

    Args:
        layers: the scan.
        given: what it is given; of what it goes over something may be `Dealt`.
        deal: puts layers, stacked, in the order in which stages have them.
        collect: does the contrary.
    """
    first, second = layers.scan.constants, layers.scan.constants + layers.scan.carried
    alike = {n for n, kind in enumerate(layers.given) if kind == "same"}
    shared = {n: given[n] for n in alike if n < first}
    over = {n: given[n] for n in alike if n >= second}
    carry = {n: given[first + n] for n in layers.carried("same")}
    passing, left = _passing(layers, shared, over, carry, collect)
    over = {n: a.array if isinstance(a, Dealt) else deal(a) for n, a in over.items()}
    over |= {first + n: deal(array) for n, array in passing.items()}
    stacks = _each(layers, Round(layers.few, layers.stacked("same")), shared, over)
    left |= {n: Dealt(array) for n, array in stacks.items()}
    drawn = _each(layers, Round(layers.draws, range(len(layers.draws.outvars))), shared, over)
    return Ahead(over, left, {n + len(given): array for n, array in drawn.items()})


def _each(layers: Layers, made: Round, shared: Arrays, over: Arrays) -> Arrays:
    """What each layer makes, stacked."""
    own = {n: array for n, array in over.items() if n in made.needed}
    run = jax.vmap(lambda own, _: made(shared | own))
    outs: Arrays = run(own, jnp.arange(layers.length))
    return outs


def _passing(
    layers: Layers, shared: Arrays, over: Arrays, carry: Arrays, collect: Callable[[Any], Any]
) -> tuple[Arrays, Arrays]:
    """What goes from layer to layer: as each one is given it, and what the last one leaves."""
    if not carry:
        return {}, {}
    first = layers.scan.constants
    made = Round(layers.few, carry)

    def one(now: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        return made(shared | own | {first + n: array for n, array in now.items()}), now

    own = {
        n: collect(array.array) if isinstance(array, Dealt) else array
        for n, array in over.items()
        if n in made.needed
    }
    left, passing = jax.lax.scan(one, carry, own, layers.length, reverse=layers.reverse)
    return passing, left
