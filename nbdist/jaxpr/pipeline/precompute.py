"""Values of layers that do not depend on rows, computed once for all microbatches.

Examples are random keys that are split from layer to layer, parameters in a narrower type, and
dropout masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from nbdist.jaxpr.pipeline.schedule import Interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.pipeline.layer_scans import Layers

    Arrays = dict[int, Any]
    """Arrays by the number of an input or output of the scan's body."""


class PartialLayer:
    """A layer that computes some of its results.

    Attributes:
        needed: numbers of the inputs that it needs.

    Args:
        body: body of the scan.
        wanted: numbers of the results.
    """

    def __init__(self, body: Jaxpr, wanted: Collection[int]) -> None:
        self._wanted = sorted(wanted)
        is_wanted = [n in wanted for n in range(len(body.outvars))]
        jaxpr, is_needed = partial_eval.dce_jaxpr(body, is_wanted)
        self._needed = [n for n, needed in enumerate(is_needed) if needed]
        self.needed = frozenset(self._needed)
        self._run = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def __call__(self, given: Mapping[int, Any]) -> Arrays:
        """Return the results by number."""
        outs = self._run(*(given[n] for n in self._needed))
        return dict(zip(self._wanted, outs, strict=True))


class Precomputed(NamedTuple):
    """Values that are computed in advance.

    Attributes:
        inputs: inputs of layers, stacked and ordered by stage: scanned and carried values.
        results: results of the scan; stacked ones are ordered by stage.
        draws: scanned inputs with rows, stacked and ordered by stage.
    """

    inputs: Arrays
    results: Arrays
    draws: Arrays


def precompute(
    layers: Layers,
    given: Arrays,
    interleave: Callable[[Any], Any],
    deinterleave: Callable[[Any], Any],
    places: int,
) -> Precomputed:
    """Compute the values of a scan over layers that do not depend on rows.

    Args:
        layers: the scan.
        given: its inputs; scanned ones may be `Interleaved`.
        interleave: orders stacked layers by stage.
        deinterleave: undoes `interleave`.
        places: number of layers of all stages.
    """
    first, second = layers.scan.constants, layers.scan.constants + layers.scan.carried
    alike = {n for n, kind in enumerate(layers.input_kinds) if kind == "same"}
    shared = {n: given[n] for n in alike if n < first}
    scanned = {n: given[n] for n in alike if n >= second}
    carry = {n: given[first + n] for n in layers.carried("same")}
    carried, results = _carried_values(layers, shared, scanned, carry, deinterleave)
    inputs = {
        n: a.array if isinstance(a, Interleaved) else interleave(a) for n, a in scanned.items()
    }
    inputs |= {first + n: interleave(array) for n, array in carried.items()}
    stacks = _run_each_layer(
        PartialLayer(layers.microbatch_body, layers.stacked("same")), shared, inputs, places
    )
    results |= {n: Interleaved(array) for n, array in stacks.items()}
    draws = _run_each_layer(
        PartialLayer(layers.draws, range(len(layers.draws.outvars))), shared, inputs, places
    )
    return Precomputed(inputs, results, {n + len(given): array for n, array in draws.items()})


def _run_each_layer(layer: PartialLayer, shared: Arrays, inputs: Arrays, places: int) -> Arrays:
    """Return the results of each layer, stacked."""
    own = {n: array for n, array in inputs.items() if n in layer.needed}
    run = jax.vmap(lambda own, _: layer(shared | own))
    outs: Arrays = run(own, jnp.arange(places))
    return outs


def _carried_values(
    layers: Layers,
    shared: Arrays,
    scanned: Arrays,
    carry: Arrays,
    deinterleave: Callable[[Any], Any],
) -> tuple[Arrays, Arrays]:
    """Return carried values: the stack of each layer's input, and the final values."""
    if not carry:
        return {}, {}
    first = layers.scan.constants
    layer = PartialLayer(layers.microbatch_body, carry)

    def one(now: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        return layer(shared | own | {first + n: array for n, array in now.items()}), now

    own = {
        n: deinterleave(array.array) if isinstance(array, Interleaved) else array
        for n, array in scanned.items()
        if n in layer.needed
    }
    results, carried = jax.lax.scan(one, carry, own, layers.length, reverse=layers.reverse)
    return carried, results
