"""Gradients of a traced step: marks on the results of `jax.vjp`, found in the step's jaxpr.

The step may take its gradients in functions with `jax.jit`. Values of an inner trace cannot leave
it, so a mark is an identity operation with a name (`checkpoint_name`). `evaluated` traces the step
and runs its jaxpr, with the functions inlined that contain marks, and returns the marked values.

`value_and_grad` and `grad` call `vjp` of their module, which this module replaces (JAX 0.10.2;
https://github.com/jax-ml/jax/blob/main/jax/_src/api.py). JAX offers no hook.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax._src import api
from jax._src.sharding_impls import UnspecifiedValue
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MARK = "nbdist gradient "
_vjp_upstream = api.vjp
_is_marking = jax.make_user_context(default_value=False)
"""Part of the key of JAX's caches: functions that were traced before are traced again."""

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
    """

    source: Any
    gradient: Any


class Evaluated(NamedTuple):
    """Result of `evaluated`.

    Attributes:
        outputs: outputs of the step.
        gradients: gradients in the order of their computation.
        has_inner: gradients are inside of a loop or a condition of JAX, where they stay.
    """

    outputs: Any
    gradients: list[Gradient]
    has_inner: bool


@contextlib.contextmanager
def _marking() -> Iterator[None]:
    """Mark gradients that are taken in this context, except those in other gradients."""
    with replaced(api, "vjp", _vjp), replaced(jax, "vjp", _vjp), _is_marking(True):
        yield


def _vjp(fun: Any, *primals: Any, **options: Any) -> Any:
    """Differentiate a function as upstream, and mark its gradient."""
    if _depth.now:
        return _vjp_upstream(fun, *primals, **options)
    number = next(_numbers)
    leaves, structure = jax.tree.flatten(primals)
    marked = [_marked(leaf, f"{number} {i} source") for i, leaf in enumerate(leaves)]
    _depth.now += 1
    try:
        output, pull, *rest = _vjp_upstream(fun, *jax.tree.unflatten(structure, marked), **options)
    finally:
        _depth.now -= 1

    def pull_marked(*cotangents: Any) -> Any:
        gradients, form = jax.tree.flatten(pull(*cotangents))
        pairs = enumerate(gradients)
        return jax.tree.unflatten(form, [_marked(g, f"{number} {i} gradient") for i, g in pairs])

    return output, pull_marked, *rest


def _marked(leaf: Any, text: str) -> Any:
    if not isinstance(leaf, jax.Array) or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        return leaf
    return checkpoint_name(leaf, f"{_MARK}{text}")


def evaluated(step: Callable[..., Any], *arguments: Any) -> Evaluated:
    """Call a step while it is traced, and return its outputs and its gradients."""
    with _marking():
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    marks: dict[str, Any] = {}
    leaves = jax.tree.leaves(arguments)
    outputs = jax.tree.unflatten(
        jax.tree.structure(shapes), _run(closed.jaxpr, closed.consts, leaves, marks)
    )
    gradients = []
    for name, value in marks.items():
        source = marks.get(name.replace("gradient", "source"))
        if name.endswith("gradient") and source is not None:
            gradients.append(Gradient(source, value))
    has_inner = not gradients and _contains_marks(closed.jaxpr)
    return Evaluated(outputs, gradients, has_inner)


def _run(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], marks: dict[str, Any]
) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        name = _mark_of(eqn)
        if name:
            marks[name] = given[0]
            found = given
        elif _is_inlined(eqn):
            inner = eqn.params["jaxpr"]
            found = _run(inner.jaxpr, inner.consts, given, marks)
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
    if eqn.primitive.name not in ("jit", "pjit") or not _contains_marks(eqn.params["jaxpr"].jaxpr):
        return False
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return all(isinstance(sharding, UnspecifiedValue) for sharding in shardings)


def _contains_marks(jaxpr: Any) -> bool:
    return any(
        _mark_of(eqn) or any(map(_contains_marks, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )
