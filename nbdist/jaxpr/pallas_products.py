"""Operations of a Pallas kernel, for the planner.

Products are counted over the whole grid. Kernels skip blocks, such as those that a causal mask
excludes. They decide this from the steps of the grid, which are known. So branches and loop bounds
that depend on these alone are evaluated for all steps at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import Literal

from nbdist.jaxpr.core import scan_counts
from nbdist.jaxpr.pallas_calls import (
    NAME,
    OF_KERNELS,
    is_known,
    label,
    own_axes,
    split_axes,
)
from nbdist.jaxpr.rules import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.jaxpr.model_builder import Builder
    from nbdist.planner.graph.model import Value

    Known = np.ndarray[Any, Any] | None
    """A number in each step of the grid; None if it is not known."""

_MOST = 2**22
"""Most steps of a grid for which numbers are evaluated."""


def _quotient(a: Any, b: Any) -> Any:
    """Divide integers as XLA does, towards zero."""
    return (np.sign(a) * np.sign(b) * (abs(a) // abs(np.where(b == 0, 1, b)))).astype(np.int64)


_NUMBERS: dict[str, Any] = {
    "add": np.add,
    "and": np.bitwise_and,
    "convert_element_type": np.copy,
    "copy": np.copy,
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "multiple_of": np.copy,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "sign": np.sign,
    "sub": np.subtract,
}


class _UnknownError(Exception):
    """The kernel's operations are not known."""


class _Products:
    """Counts the products of a kernel.

    Args:
        sizes: the grid without axes of `jax.vmap`.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._is_small = math.prod(sizes) <= _MOST

    def count(
        self, jaxpr: Jaxpr, args: Sequence[Known], share: np.ndarray[Any, Any]
    ) -> tuple[float, list[Known]]:
        """Return the products of a program for a mean step, and its results.

        Args:
            jaxpr: the program.
            args: its inputs.
            share: number of times that each step runs it.
        """
        known: dict[Any, Known] = dict(zip(jaxpr.invars, args, strict=True))
        total = 0.0
        for eqn in jaxpr.eqns:
            ins = [_literal(a) if isinstance(a, Literal) else known.get(a) for a in eqn.invars]
            more, outs = self._operation(eqn, ins, share)
            total += more
            known.update(zip(eqn.outvars, outs, strict=True))
        outs = [_literal(a) if isinstance(a, Literal) else known.get(a) for a in jaxpr.outvars]
        return total, outs

    def _operation(
        self, eqn: Any, ins: list[Known], share: np.ndarray[Any, Any]
    ) -> tuple[float, list[Known]]:
        name, params = eqn.primitive.name, eqn.params
        unknown: list[Known] = [None] * len(eqn.outvars)
        if name == "dot_general":
            return _dot(eqn) * float(share.mean()), unknown
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if name == "scan":
            consts, _ = scan_counts(params)
            given = [*ins[:consts], *[None] * (len(ins) - consts)]
            return self.count(_open(inner), given, share * params["length"])[0], unknown
        if inner is not None:
            return self.count(_open(inner), ins, share)
        if name == "cond":
            return self._cond(eqn, ins, share), unknown
        if name == "while":
            return self._while(eqn, ins, share), unknown
        if name not in PLAIN and name not in OF_KERNELS:
            raise _UnknownError(name)
        return 0.0, [self._number(eqn, ins)] if len(unknown) == 1 else unknown

    def _number(self, eqn: Any, ins: list[Known]) -> Known:
        """Return the integer that an operation computes."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        if not self._is_small or getattr(aval, "shape", None) != () or aval.dtype.kind not in "iub":
            return None
        if name in ("program_id", "num_programs"):
            axis = eqn.params["axis"]
            size, shape = self._sizes[axis], [1] * len(self._sizes)
            shape[axis] = size
            return np.array(size) if name == "num_programs" else np.arange(size).reshape(shape)
        if any(each is None for each in ins):
            return None
        if name == "select_n":
            which, *cases = ins
            return np.choose(np.asarray(which, np.int64), cases)  # type: ignore[arg-type]
        found: Known = _NUMBERS[name](*ins) if name in _NUMBERS else None
        return found

    def _cond(self, eqn: Any, ins: list[Known], share: np.ndarray[Any, Any]) -> float:
        """Return the products of the taken branches; of the largest one if these are not known."""
        which, *given = ins
        branches = [_open(each) for each in eqn.params["branches"]]
        if which is None:
            return max(self.count(each, given, share)[0] for each in branches)
        taken = np.clip(which.astype(np.int64), 0, len(branches) - 1)
        return sum(self.count(b, given, share * (taken == n))[0] for n, b in enumerate(branches))

    def _while(self, eqn: Any, ins: list[Known], share: np.ndarray[Any, Any]) -> float:
        """Return the products of a loop that counts up to a number, as `fori_loop` does."""
        params = eqn.params
        conds, bodies = params["cond_nconsts"], params["body_nconsts"]
        carry = ins[conds + bodies :]
        cond, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
        given = [*ins[:conds], *carry]
        (test,) = cond.eqns if len(cond.eqns) == 1 else (None,)
        first, last = (
            (cond.invars.index(atom) if atom in cond.invars else -1 for atom in test.invars)
            if test is not None and test.primitive.name == "lt" and not _has_literal(test)
            else (-1, -1)
        )
        start, end = (given[place] if place >= 0 else None for place in (first, last))
        if start is None or end is None or not _counts_up(body, bodies + first - conds):
            raise _UnknownError("while")
        times = np.maximum(end - start, 0)
        inside: list[Known] = [*ins[conds : conds + bodies], *[None] * len(carry)]
        return self.count(body, inside, share * times)[0]


def _has_literal(eqn: Any) -> bool:
    return any(isinstance(atom, Literal) for atom in eqn.invars)


def _counts_up(body: Jaxpr, place: int) -> bool:
    """Return True if a loop's body adds 1 to a carried number."""
    offset = len(body.invars) - len(body.outvars)
    if place < offset:
        return False
    counter, after = body.invars[place], body.outvars[place - offset]
    made = next((eqn for eqn in body.eqns if after in eqn.outvars), None)
    if made is None or made.primitive.name != "add" or counter not in made.invars:
        return False
    return any(isinstance(atom, Literal) and atom.val == 1 for atom in made.invars)


def _literal(atom: Any) -> Known:
    is_integer = atom.aval.shape == () and atom.aval.dtype.kind in "iub"
    return np.asarray(atom.val) if is_integer else None


def _open(program: Any) -> Jaxpr:
    opened: Jaxpr = getattr(program, "jaxpr", program)
    return opened


def _dot(eqn: Any) -> float:
    (left_sum, _), _ = eqn.params["dimension_numbers"]
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return 2.0 * float(math.prod(out.shape) * math.prod(left.shape[dim] for dim in left_sum))


def products_of(eqn: Any) -> float | None:
    """Return the floating-point operations of a call's products; None if they are not known.

    A call whose kernel is not known counts with the estimate that it gives to JAX.
    """
    estimate = eqn.params.get("cost_estimate")
    if is_known(eqn):
        grid, jaxpr = eqn.params["grid_mapping"], eqn.params["jaxpr"]
        sizes = [grid.grid[axis] for axis in own_axes(grid)]
        share = np.ones([1] * len(sizes))
        try:
            mean, _ = _Products(sizes).count(jaxpr, [None] * len(jaxpr.invars), share)
            steps: int = math.prod(grid.grid)
            return mean * steps
        except _UnknownError:
            pass
    return None if estimate is None else float(estimate.flops)


def pallas_rule(build: Builder, eqn: Any, ins: list[Value]) -> list[Value]:
    """Tie what each step of a grid axis has for itself."""
    outs = build.outs(eqn)
    axes, obstacle = split_axes(eqn)
    if build.unrewritten:
        axes, obstacle = (), build.unrewritten
    dims = [[*axis.ins, *axis.outs] for axis in axes]
    for of_axis in dims:
        pairs = zip((*ins, *outs), of_axis, strict=True)
        own = [value.groups[dim] for value, dim in pairs if dim is not None]
        for group in own:
            build.dims.tie(own[0], group)
    for n, value in enumerate((*ins, *outs)):
        split = {of_axis[n] for of_axis in dims}
        for dim, group in enumerate(value.groups):
            if dim not in split:
                build.dims.block(group, "a Pallas kernel needs it whole")
    if not axes:
        build.note(f"the Pallas kernel {label(eqn)} is not split: {obstacle}")
    flops = products_of(eqn)
    if flops is None:
        build.leave_unpriced(NAME)
    build.emit("attention", ins, outs, flops=flops or 0.0)
    return outs
