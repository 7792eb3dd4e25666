"""Gradients that a step takes: the results of `jax.vjp`, inside of functions with `jax.jit` too.

A step cell is one program. Values of an inner trace cannot leave it, so a mark is an identity
operation with a name (`checkpoint_name`). `evaluated` traces the step
and runs its jaxpr, with the functions inlined that contain marks, and returns the marked values.

A training loop calls compiled functions of the user. `receiving` adds a callback to them, which
sends sums of squares to the host. Other calls of these functions are unchanged.

`value_and_grad` and `grad` call `vjp` of their module, which this module replaces (JAX 0.10.2;
https://github.com/jax-ml/jax/blob/main/jax/_src/api.py). JAX offers no hook.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from nbdist.jaxpr.core import jaxprs_in_params
from nbdist.private_api.jax import BatchTracer, UnspecifiedValue, api
from nbdist.worker.jax.runtime.array_counts import counted, square
from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MARK = "nbdist gradient "
_vjp_upstream = api.vjp
_mode = jax.make_user_context(default_value="")
"""Treatment of gradients. It is part of the key of JAX's caches: functions that were traced before
are traced again."""

_received: list[Received] = []

_numbers = itertools.count()


class _Depth(threading.local):
    """Number of `vjp` around the current trace."""

    now = 0


_depth = _Depth()


class Gradient(NamedTuple):
    """A gradient that a step takes.

    Attributes:
        source: the array with respect to which it is taken.
        gradient: the gradient.
        call: number of its call of `vjp`.
    """

    source: Any
    gradient: Any
    call: str


class Evaluated(NamedTuple):
    """Result of `evaluated`.

    Attributes:
        outputs: outputs of the step.
        gradients: gradients in the order of their computation.
        has_inner: further gradients are inside of a loop or a condition of JAX, or under `vmap`.
    """

    outputs: Any
    gradients: list[Gradient]
    has_inner: bool


class Received(NamedTuple):
    """Gradients of one call of `vjp`, by the array with respect to which they are taken.

    Attributes:
        shapes: shapes of the arrays.
        sources: sum of the squares of each array, shape (arrays,).
        gradients: sum of the squares of each gradient, shape (arrays,).
        rows: rows of the histograms of the gradients; empty if not requested.
    """

    shapes: tuple[tuple[int, ...], ...]
    sources: Any
    gradients: Any
    rows: Any


@contextlib.contextmanager
def receiving(*, histograms: bool) -> Iterator[None]:
    """Receive the gradients taken in this context, for `take_received`.

    The gradients of nested functions and of `vmap` are left out.
    """
    _received.clear()
    with _differentiating("histograms" if histograms else "numbers"):
        yield


def take_received() -> list[Received]:
    """Wait for the programs that ran in the last context of `receiving`; return its gradients."""
    jax.effects_barrier()
    found = _received.copy()
    _received.clear()
    return found


@contextlib.contextmanager
def _differentiating(mode: str) -> Iterator[None]:
    with replaced(api, "vjp", _vjp), replaced(jax, "vjp", _vjp), _mode(mode):
        yield


def _vjp(fun: Any, *primals: Any, **options: Any) -> Any:
    """Differentiate a function as upstream, and mark or send its gradient."""
    if _depth.now:
        return _vjp_upstream(fun, *primals, **options)
    number = next(_numbers)
    leaves, structure = jax.tree.flatten(primals)
    marks = _mode.value == "marks"
    if marks:
        leaves = [_marked(leaf, f"{number} {i} source") for i, leaf in enumerate(leaves)]
    _depth.now += 1
    try:
        output, pull, *rest = _vjp_upstream(fun, *jax.tree.unflatten(structure, leaves), **options)
    finally:
        _depth.now -= 1

    def pull_noted(*cotangents: Any) -> Any:
        gradients, form = jax.tree.flatten(pull(*cotangents))
        if not marks:
            _send(leaves, gradients)
            return jax.tree.unflatten(form, gradients)
        pairs = enumerate(gradients)
        return jax.tree.unflatten(form, [_marked(g, f"{number} {i} gradient") for i, g in pairs])

    return output, pull_noted, *rest


def _send(sources: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Send the sums of squares of gradients to `_received`, from a trace or at once."""
    pairs = [
        (source, gradient)
        for source, gradient in zip(sources, gradients, strict=True)
        if _is_inexact(source) and _is_inexact(gradient)
    ]
    if not pairs or any(isinstance(leaf, BatchTracer) for pair in pairs for leaf in pair):
        return
    own, found = zip(*pairs, strict=True)
    rows = [counted(gradient) for gradient in found] if _mode.value == "histograms" else []
    squares = [jnp.stack([square(leaf) for leaf in leaves]) for leaves in (own, found)]
    shapes = tuple(tuple(source.shape) for source in own)
    jax.debug.callback(functools.partial(_receive, shapes), *squares, rows)


def _receive(shapes: tuple[tuple[int, ...], ...], *values: Any) -> None:
    _received.append(Received(shapes, *values))


def _marked(leaf: Any, text: str) -> Any:
    return checkpoint_name(leaf, f"{_MARK}{text}") if _is_inexact(leaf) else leaf


def _is_inexact(leaf: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray))
    return is_array and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def evaluated(step: Callable[..., Any], *arguments: Any) -> Evaluated:
    """Call a step while it is traced, and return its outputs and its gradients."""
    with _differentiating("marks"):
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    marks: dict[str, Any] = {}
    leaves = jax.tree.leaves(arguments)
    outputs = jax.tree.unflatten(
        jax.tree.structure(shapes), _run(closed.jaxpr, closed.consts, leaves, marks)
    )
    gradients = []
    for name, value in marks.items():
        source = marks.get(name.replace("gradient", "source"))
        # `vmap` over rows of a batch takes a gradient for each row.
        if name.endswith("gradient") and source is not None and source.shape == value.shape:
            gradients.append(Gradient(source, value, name.split()[0]))
    return Evaluated(outputs, gradients, _count_gradients(closed.jaxpr) > len(gradients))


def _run(
    jaxpr: Any,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    marks: dict[str, Any],
    call: str = "",
) -> list[Any]:
    """Evaluate a jaxpr, and store its marked values by their text, after that of the call."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        name = _mark_of(eqn)
        if name:
            marks[f"{call}{name}"] = given[0]
            found = given
        elif _is_inlined(eqn):
            inner = eqn.params["jaxpr"]
            found = _run(inner.jaxpr, inner.consts, given, marks, f"{next(_numbers)}.{call}")
        else:
            with eqn.ctx.manager:
                found = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _mark_of(eqn: Any) -> str:
    """Return the text of a mark; empty for another operation."""
    name: str = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return name.removeprefix(_MARK) if name.startswith(_MARK) else ""


def _is_inlined(eqn: Any) -> bool:
    """Return True for a function with `jax.jit` that contains marks, and fixes no shardings."""
    if eqn.primitive.name not in ("jit", "pjit") or not _count_gradients(eqn.params["jaxpr"].jaxpr):
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(isinstance(sharding, UnspecifiedValue) for sharding in shardings)


def _count_gradients(jaxpr: Any) -> int:
    return sum(
        _mark_of(eqn).endswith("gradient")
        + sum(map(_count_gradients, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
