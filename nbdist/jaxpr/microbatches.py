"""A step that goes through its batch in parts, one after another.

It is done to the step's jaxpr, as in `rematerialise`. What has rows of the batch is made of a part
of them at a time; what is summed over all rows is summed over the parts (in float32 at least); all
else is made once, before or after. Each part has every so-manyth row, so that a device has its own
rows in each of them. The numbers are those of the whole batch, but for the order of the sums.
"""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant

from nbdist.errors import PlanError
from nbdist.jaxpr.batch_rows import (
    is_added_to_zeros,
    is_by_row,
    is_linear,
    is_sum_over_rows,
    with_fewer,
)
from nbdist.jaxpr.flatten import OPEN, flat, make, renamed, variables
from nbdist.jaxpr.planner_model import of_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.planner.graph.model import Role

Kind = Literal["same", "zero", "rows", "sum", "after", "each"]
"""Of a value: it is the same for all parts; so, and nothing but zeros; each part has its rows of
it; it is the sum of what parts have; it is made of such sums; it is the same for all parts, and
made in each of them, beside rows or sums."""

Where = Literal["before", "loop", "after"]

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    dict.fromkeys((_PATHS["purelib"], _PATHS["platlib"], _PATHS["stdlib"], _PATHS["platstdlib"]))
)
_OURS = str(Path(__file__).parents[1])
_MOST = 60
"""Letters of a line that are shown."""


def in_parts(closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], parts: int) -> ClosedJaxpr:
    """The same step, with a part of the batch in memory at a time.

    Args:
        closed: its jaxpr.
        inputs: of each of its inputs, the path and the role.
        parts: in how many; the batch divides by it.

    Raises:
        PlanError: a row depends on other rows, or on the sum of all, as in a batch normalisation.
    """
    program = flat(closed)
    data = [
        var for var, (_, role) in zip(program.jaxpr.invars, inputs, strict=True) if role == "batch"
    ]
    batch = max(var.aval.shape[0] for var in data if var.aval.shape)
    made = _Parted(program, Rows(of_rows(program, inputs), batch, parts), set(data))
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(made.run)(*given)


class Rows(NamedTuple):
    """Where the batch's rows are.

    Attributes:
        dims: of variables that have some, which dimensions they are.
        batch: how many there are.
        parts: in how many parts they are gone through.
    """

    dims: dict[Var, tuple[int, ...]]
    batch: int
    parts: int

    def shape(self, var: Any) -> tuple[int, ...]:
        """Of what a part has of it."""
        dims = () if isinstance(var, Constant) else self.dims.get(var, ())
        if len(dims) > 1:
            raise PlanError("rows meet all rows")
        sizes = list(var.aval.shape)
        for dim in dims:
            if sizes[dim] % self.batch:
                raise PlanError("rows are put together, or taken apart")
            sizes[dim] //= self.parts
        return tuple(sizes)

    def divided(self, array: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """By parts, in a dimension before all others."""
        (dim,) = dims
        head, tail = array.shape[:dim], array.shape[dim + 1 :]
        beside = array.shape[dim] // self.batch
        apart = array.reshape(*head, self.batch // self.parts, self.parts, beside, *tail)
        first = jnp.moveaxis(apart, dim + 1, 0)
        return first.reshape(self.parts, *head, self.batch // self.parts * beside, *tail)

    def joined(self, array: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """What `divided` has divided."""
        (dim,) = dims
        head, tail = array.shape[1 : dim + 1], array.shape[dim + 2 :]
        beside = array.shape[dim + 1] * self.parts // self.batch
        apart = array.reshape(self.parts, *head, self.batch // self.parts, beside, *tail)
        last = jnp.moveaxis(apart, 0, dim + 1)
        return last.reshape(*head, self.batch * beside, *tail)

    def fewer(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program, for a part of the rows."""
        names: dict[Var, Var] = {}

        def made(var: Var) -> Var:
            if var in self.dims:
                aval: Any = var.aval
                names[var] = Var(aval.update(shape=self.shape(var)))
            return names.get(var, var)

        ins = [made(var) for var in jaxpr.invars]
        eqns = []
        for eqn in jaxpr.eqns:
            shapes = [list(map(self.shape, side)) for side in (eqn.outvars, eqn.invars)]
            params = with_fewer(eqn, *shapes)
            if eqn.primitive.name == "scan":
                params["jaxpr"] = self._closed(params["jaxpr"])
            elif eqn.primitive.name == "cond":
                params["branches"] = tuple(map(self._closed, params["branches"]))
            elif eqn.primitive.name in OPEN:
                params["jaxpr"] = self.fewer(params["jaxpr"])
            given = renamed(eqn.invars, names)
            eqns.append(
                eqn.replace(invars=given, outvars=list(map(made, eqn.outvars)), params=params)
            )
        return jaxpr.replace(invars=ins, eqns=eqns, outvars=renamed(jaxpr.outvars, names))

    def _closed(self, program: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(self.fewer(program.jaxpr), program.consts)


class Kinds:
    """What each value of a step is, as the program is gone through.

    Attributes:
        of: of each variable, its kind.
        where: of each of the step's operations, if it is made before the parts, in them, or after.
    """

    def __init__(self, rows: Rows) -> None:
        self.of: dict[Var, Kind] = {}
        self.where: list[Where] = []
        self._dims = rows.dims

    def read_step(self, jaxpr: Jaxpr, data: set[Var]) -> None:
        """The step.

        Args:
            jaxpr: its program.
            data: those of its inputs that are the batch's. What is made of them and of constants
                alone, and is no row, is made of all of them before the parts: the count of a mask.

        Raises:
            PlanError: it cannot be gone through in parts.
        """
        given = (*jaxpr.invars, *jaxpr.constvars)
        self.of |= {var: "rows" if var in self._dims else "same" for var in given}
        known = {*data, *jaxpr.constvars}
        for eqn in jaxpr.eqns:
            ins = list(map(self._kind, eqn.invars))
            whole = not eqn.effects and known.issuperset(variables(eqn.invars))
            known.update(eqn.outvars if whole else ())
            outs, where = self._placed(eqn, ins, whole=whole)
            self.of.update(zip(eqn.outvars, outs, strict=True))
            self.where.append(where)

    def _placed(self, eqn: Any, ins: list[Kind], *, whole: bool) -> tuple[list[Kind], Where]:
        """What an operation of the step leaves, and where it is made.

        Args:
            eqn: the operation.
            ins: of its inputs.
            whole: whether it can be made of the whole batch at little cost.
        """
        first: list[Kind] = ["rows" if var in self._dims else "same" for var in eqn.outvars]
        if whole and "rows" in ins and "rows" not in first:
            return first, "before"
        beside = "each" in ins
        try:
            outs = self._outs(eqn, ["same" if kind == "each" else kind for kind in ins])
        except PlanError:
            if not whole:
                raise
            return first, "before"
        if outs is None:
            if beside:
                raise PlanError(f"{_told(eqn)} makes rows of what is made beside others")
            return first, "before"
        if {"rows", "sum"} & {*outs} or "rows" in ins:
            return ["each" if kind in ("same", "zero") else kind for kind in outs], "loop"
        if {"sum", "after"} & {*ins}:
            return outs, "after"
        return (["each"] * len(outs), "loop") if beside else (outs, "before")

    def read(self, jaxpr: Jaxpr, kinds: Sequence[Kind]) -> list[Kind]:
        """A program within the step, with such inputs; what it leaves.

        Raises:
            PlanError: it cannot be gone through in parts.
        """
        self.of |= dict(zip(jaxpr.invars, kinds, strict=True))
        self.of |= {var: "rows" if var in self._dims else "same" for var in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            if eqn.effects:
                raise PlanError(f"{_told(eqn)} has effects in a loop")
            outs = self._outs(eqn, list(map(self._kind, eqn.invars)))
            if outs is None:
                raise PlanError(f"{_told(eqn)} makes rows in a loop")
            if "after" in outs:
                raise PlanError(f"{_told(eqn)} needs a sum over all rows in a loop")
            self.of.update(zip(eqn.outvars, outs, strict=True))
        return list(map(self._kind, jaxpr.outvars))

    def _kind(self, atom: Any) -> Kind:
        if isinstance(atom, Constant):
            return "zero" if not atom.aval.shape and atom.val == 0 else "same"
        return self.of[atom]

    def _outs(self, eqn: Any, ins: list[Kind]) -> list[Kind] | None:
        """None where it makes rows of nothing that has them."""
        name = eqn.primitive.name
        if "rows" not in ins:
            return self._without_rows(eqn, ins)
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "optimization_barrier" and "after" not in ins:
            return ins
        if "after" in ins or "sum" in ins:
            raise PlanError(f"{_told(eqn)} needs the sum over all rows for each of them")
        if name == "scan":
            return self._scan(eqn, ins)
        if name in OPEN:
            return self.read(eqn.params["jaxpr"], ins)
        if eqn.effects:
            raise PlanError(f"{_told(eqn)} has effects")
        if is_added_to_zeros(eqn, self._dims) and ins[0] == "zero":
            return ["sum"]
        has_rows = [var in self._dims for var in eqn.outvars]
        if not (is_by_row(eqn, self._dims) if all(has_rows) else is_sum_over_rows(eqn, self._dims)):
            raise PlanError(f"{_told(eqn)} is not known to keep rows of the batch apart")
        return ["rows" if has else "sum" for has in has_rows]

    def _without_rows(self, eqn: Any, ins: list[Kind]) -> list[Kind] | None:
        count, makes_rows = len(eqn.outvars), any(var in self._dims for var in eqn.outvars)
        sums, zeros = ([kind == of for kind in ins] for of in ("sum", "zero"))
        if "after" in ins or any(sums):
            is_sum = not ("after" in ins or makes_rows or eqn.effects)
            return ["sum" if is_sum and is_linear(eqn, sums, zeros) else "after"] * count
        if makes_rows:
            return ["rows"] if eqn.primitive.name == "broadcast_in_dim" else None
        is_zero = all(zeros) and bool(ins) and is_linear(eqn, zeros, zeros)
        return ["zero" if is_zero else "same"] * count

    def _scan(self, eqn: Any, ins: list[Kind]) -> list[Kind]:
        first = eqn.params["num_consts"]
        second = first + eqn.params["num_carry"]
        if any(0 in self._dims.get(var, ()) for var in variables(eqn.invars[second:])):
            raise PlanError("a scan goes over the rows")
        carry = ins[first:second]
        while True:
            given = [*ins[:first], *carry, *ins[second:]]
            outs = self.read(eqn.params["jaxpr"].jaxpr, given)
            now = [_joined(*pair) for pair in zip(carry, outs, strict=False)]
            if now == carry:
                return [*carry, *outs[len(carry) :]]
            carry = now

    def _cond(self, eqn: Any, ins: list[Kind]) -> list[Kind]:
        """All branches leave the same kinds; which one it is depends on no row."""
        which, *given = ins
        if which != "same":
            raise PlanError(f"{_told(eqn)}: which branch is taken depends on the batch")
        of_each = [self.read(branch.jaxpr, given) for branch in eqn.params["branches"]]
        return [_alike(eqn, set(kinds)) for kinds in zip(*of_each, strict=True)]


def _alike(eqn: Any, kinds: set[Kind]) -> Kind:
    """Of what branches leave."""
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {"zero", "sum"} or kinds == {"zero", "same"}:
        return "sum" if "sum" in kinds else "same"
    raise PlanError(f"{_told(eqn)}: one branch makes it of the batch, another does not")


def _joined(before: Kind, after: Kind) -> Kind:
    """Of what a scan carries."""
    if before == after or after == "zero":
        return before
    if before == "zero":
        return after
    raise PlanError("a scan adds to what is there before it")


class _Parted:
    """A step, in what is made before, of each part, and after.

    Args:
        program: the step, flat.
        rows: where the batch's rows are.
        data: its inputs that are the batch's.
    """

    def __init__(self, program: ClosedJaxpr, rows: Rows, data: set[Var]) -> None:
        self._program, self._rows = program, rows
        jaxpr = program.jaxpr
        kinds = Kinds(rows)
        kinds.read_step(jaxpr, data)
        at = list(zip(jaxpr.eqns, kinds.where, strict=True))
        self._loop, self._after = ([e for e, where in at if where == w] for w in ("loop", "after"))
        self._before = _with_makers(jaxpr.eqns, [e for e, where in at if where == "before"])
        inside = {var for eqn in self._loop for var in eqn.outvars}
        needed = {v for eqn in self._after for v in variables(eqn.invars)}
        needed |= set(variables(jaxpr.outvars))
        used = dict.fromkeys(v for e in self._loop for v in variables(e.invars) if v not in inside)
        self._over = [var for var in used if var in rows.dims]
        self._constants = [var for var in used if var not in rows.dims]
        left = [var for eqn in self._loop for var in eqn.outvars if var in needed]
        self._sums = [var for var in left if kinds.of[var] == "sum"]
        self._stacked = [var for var in left if kinds.of[var] == "rows"]
        self._last = [var for var in left if kinds.of[var] == "each"]

    def run(self, *args: Any) -> list[Any]:
        """The step."""
        jaxpr, rows = self._program.jaxpr, self._rows
        there: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        there |= dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        make(jaxpr, self._before, there)
        body = jaxpr.replace(
            constvars=[],
            invars=[*self._constants, *self._over],
            eqns=self._loop,
            outvars=[*self._sums, *self._stacked, *self._last],
        )
        part = jaxpr_as_fun(ClosedJaxpr(rows.fewer(body), []))
        constants = [there[var] for var in self._constants]

        def one(total: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = part(*constants, *slices)
            pairs = zip(total, outs, strict=False)
            return [t + new.astype(t.dtype) for t, new in pairs], outs[len(total) :]

        zeros = [jnp.zeros(var.aval.shape, wide(var.aval.dtype)) for var in self._sums]
        given = [rows.divided(there[var], rows.dims[var]) for var in self._over]
        sums, stacked = jax.lax.scan(one, zeros, given, length=rows.parts)
        there |= {v: s.astype(v.aval.dtype) for v, s in zip(self._sums, sums, strict=True)}
        pairs = zip((*self._stacked, *self._last), stacked, strict=True)
        there |= {v: rows.joined(s, rows.dims[v]) if v in rows.dims else s[-1] for v, s in pairs}
        make(jaxpr, self._after, there)
        return [v.val if isinstance(v, Constant) else there[v] for v in jaxpr.outvars]


def _with_makers(eqns: list[Any], wanted: list[Any]) -> list[Any]:
    """Some operations of a program, and those that they need the results of, in their order."""
    open_ = {var for eqn in wanted for var in variables(eqn.invars)}
    ids, found = {id(eqn) for eqn in wanted}, []
    for eqn in reversed(eqns):
        if id(eqn) in ids or not open_.isdisjoint(eqn.outvars):
            found.append(eqn)
            open_.update(variables(eqn.invars))
    return found[::-1]


def wide(dtype: Any) -> Any:
    """What sums of parts are kept in."""
    half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < jnp.dtype("float32").itemsize
    return jnp.dtype("float32") if half else dtype


def _told(eqn: Any) -> str:
    """Return an operation in words, as in ``sort (line 3: `x = jnp.sort(x, axis=0)`)``."""
    name, traceback = eqn.primitive.name, eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*_LIBRARIES, _OURS)):
            text = linecache.getline(frame.file_name, frame.line_num).strip()
            shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
            return f"{name} (line {frame.line_num}{': `' + shown + '`' if shown else ''})"
    return str(name)
