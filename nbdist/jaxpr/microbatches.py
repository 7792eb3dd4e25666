"""Rewriting of a step so that it processes its batch in microbatches, one after another.

The rewriting changes the step's jaxpr, as in `remat`. Values with rows of the batch are computed
for one microbatch at a time. Sums over rows are accumulated over microbatches, at least in float32.
Everything else is computed once, before or after. Microbatch k has the rows k, k + n, k + 2n, ...,
so that each device keeps its own rows. The results are those of the whole batch, except for the
order of sums.

If each place of the data axis has its own rows, it also has its own sums (`places`). The places add
their sums once, after the last microbatch.
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
    why_not_by_row,
    with_fewer,
)
from nbdist.jaxpr.core import jaxprs_in_params, scan_counts
from nbdist.jaxpr.flatten import OPEN, flat, make, renamed, variables, with_bodies
from nbdist.jaxpr.planner_model import of_rows
from nbdist.planner.graph.layout import SUMMED_EACH_TIME
from nbdist.records import batch_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.extend.core import Jaxpr

    from nbdist.planner.graph.model import Role

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    dict.fromkeys((_PATHS["purelib"], _PATHS["platlib"], _PATHS["stdlib"], _PATHS["platstdlib"]))
)
_OURS = str(Path(__file__).parents[1])
_MOST = 60
"""Characters of a source line in messages."""

Kind = Literal["same", "zero", "rows", "sum", "after", "each"]
"""Kinds of values. `same`: equal for all microbatches. `zero`: the same, and zeros. `rows`: each
microbatch has its rows. `sum`: a sum over microbatches. `after`: computed from such sums. `each`:
equal for all microbatches, and computed in each of them beside rows or sums."""

LoopPhase = Literal["before", "loop", "after"]


_OPEN_DIMENSION = jax.P.UNCONSTRAINED


def in_parts(
    closed: ClosedJaxpr, inputs: Sequence[tuple[str, Role]], parts: int, places: int = 1
) -> ClosedJaxpr:
    """Return the same step, which holds one microbatch at a time in memory.

    Args:
        closed: the step's jaxpr.
        inputs: path and role of each input.
        parts: number of microbatches, which divides the batch.
        places: size of the data axis of the context mesh, to add sums over it once; 1 leaves sums
            to XLA, which adds those of each microbatch.

    Raises:
        PlanError: a row depends on other rows or on their sum, as in batch normalization.
    """
    program = flat(closed)
    data = [
        var for var, (_, role) in zip(program.jaxpr.invars, inputs, strict=True) if role == "batch"
    ]
    batch = max(var.aval.shape[0] for var in data if var.aval.shape)
    own = places if batch % (parts * places) == 0 and has_separate_sums(program.jaxpr) else 1
    made = _MicrobatchedStep(program, Rows(of_rows(program, inputs), batch, parts, own), set(data))
    given = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(made.run)(*given)


def has_separate_sums(jaxpr: Jaxpr) -> bool:
    """Return True if each place of the data axis can keep its own sums over microbatches."""
    return all(
        eqn.primitive.name not in SUMMED_EACH_TIME
        and all(map(has_separate_sums, jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


class Rows(NamedTuple):
    """Rows of the batch in a program.

    Attributes:
        dims: the dimensions that are rows, by variable; other variables have no rows.
        batch: number of rows.
        parts: number of parts that the rows are processed in.
        places: number of places that each part is divided into.
    """

    dims: dict[Var, tuple[int, ...]]
    batch: int
    parts: int
    places: int = 1

    @property
    def each(self) -> int:
        """Rows of a part in one place."""
        return self.batch // (self.parts * self.places)

    def shape(self, var: Any) -> tuple[int, ...]:
        """Return the shape of one part of a value."""
        dims = () if isinstance(var, Constant) else self.dims.get(var, ())
        if len(dims) > 1:
            raise PlanError(
                "a value combines each row with all rows, as x @ x.T does: treat rows separately, "
                "or use no microbatches"
            )
        sizes = list(var.aval.shape)
        for dim in dims:
            if sizes[dim] % self.batch:
                raise PlanError("rows are merged or split")
            sizes[dim] //= self.parts * self.places
        return tuple(sizes)

    def divided(self, array: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """Return the array with new first dimensions: the parts, and several places of each."""
        (dim,) = dims
        head, tail = array.shape[:dim], array.shape[dim + 1 :]
        beside = array.shape[dim] // self.batch
        apart = array.reshape(*head, *self._places, self.each, self.parts, beside, *tail)
        moved = (dim + 1 + len(self._places), *range(dim, dim + len(self._places)))
        first = jnp.moveaxis(apart, moved, range(len(moved)))
        return first.reshape(self.parts, *self._places, *head, self.each * beside, *tail)

    def joined(self, array: jax.Array, dims: tuple[int, ...]) -> jax.Array:
        """Undo `divided`."""
        (dim,), first = dims, 1 + len(self._places)
        head, tail = array.shape[first : first + dim], array.shape[first + dim + 1 :]
        beside = array.shape[first + dim] // self.each
        apart = array.reshape(self.parts, *self._places, *head, self.each, beside, *tail)
        moved = (dim + 1 + len(self._places), *range(dim, dim + len(self._places)))
        last = jnp.moveaxis(apart, range(first), moved)
        return last.reshape(*head, self.batch * beside, *tail)

    @property
    def _places(self) -> tuple[int, ...]:
        """Shape of the dimension of places; empty if there is one place."""
        return (self.places,) if self.places > 1 else ()

    def fewer(self, jaxpr: Jaxpr) -> Jaxpr:
        """Return a program for one part of the rows."""
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
            params = with_bodies(eqn.primitive.name, with_fewer(eqn, *shapes), self.fewer)
            given = renamed(eqn.invars, names)
            eqns.append(
                eqn.replace(invars=given, outvars=list(map(made, eqn.outvars)), params=params)
            )
        return jaxpr.replace(invars=ins, eqns=eqns, outvars=renamed(jaxpr.outvars, names))


class Kinds:
    """Kinds of all values of a step, inferred in program order.

    Attributes:
        of: the kind of each variable.
        where: for each operation of the step, whether it runs before, in or after the loop.
    """

    def __init__(self, rows: Rows) -> None:
        self.of: dict[Var, Kind] = {}
        self.where: list[LoopPhase] = []
        self._dims = rows.dims

    def read_step(self, jaxpr: Jaxpr, data: set[Var]) -> None:
        """Infer the kinds of a step.

        Args:
            jaxpr: the step's program.
            data: inputs that hold the batch. Values that depend on them and on constants alone, and
                have no rows, are computed from the whole batch before the loop; an example is the
                count of a mask.

        Raises:
            PlanError: the step cannot run in microbatches.
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

    def _placed(self, eqn: Any, ins: list[Kind], *, whole: bool) -> tuple[list[Kind], LoopPhase]:
        """Return the kinds of an operation's results, and where it runs.

        Args:
            eqn: the operation.
            ins: kinds of its inputs.
            whole: True if it can run on the whole batch at little cost.
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
                raise PlanError(
                    f"{with_line(eqn)} makes rows of a value that is computed in each microbatch"
                )
            return first, "before"
        if {"rows", "sum"} & {*outs} or "rows" in ins:
            return ["each" if kind in ("same", "zero") else kind for kind in outs], "loop"
        if {"sum", "after"} & {*ins}:
            return outs, "after"
        return (["each"] * len(outs), "loop") if beside else (outs, "before")

    def read(self, jaxpr: Jaxpr, kinds: Sequence[Kind]) -> list[Kind]:
        """Infer the kinds of an inner program, and return those of its results.

        Raises:
            PlanError: the program cannot run in microbatches.
        """
        self.of |= dict(zip(jaxpr.invars, kinds, strict=True))
        self.of |= {var: "rows" if var in self._dims else "same" for var in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            if eqn.effects:
                raise PlanError(
                    f"{with_line(eqn)} has side effects (such as jax.debug.print) inside a loop: "
                    "remove it from the loop"
                )
            outs = self._outs(eqn, list(map(self._kind, eqn.invars)))
            if outs is None:
                raise PlanError(f"{with_line(eqn)} makes rows inside a loop")
            if "after" in outs:
                raise PlanError(f"{with_line(eqn)} needs a sum over all rows inside a loop")
            self.of.update(zip(eqn.outvars, outs, strict=True))
        return list(map(self._kind, jaxpr.outvars))

    def _kind(self, atom: Any) -> Kind:
        if isinstance(atom, Constant):
            return "zero" if not atom.aval.shape and atom.val == 0 else "same"
        return self.of[atom]

    def _outs(self, eqn: Any, ins: list[Kind]) -> list[Kind] | None:
        """Return the kinds of the results; None if it makes rows from inputs without rows."""
        name = eqn.primitive.name
        if "rows" not in ins:
            return self._without_rows(eqn, ins)
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "optimization_barrier" and "after" not in ins:
            return ins
        if "after" in ins or "sum" in ins:
            raise PlanError(f"{with_line(eqn)} needs the sum over all rows for each row")
        if name == "scan":
            return self._scan(eqn, ins)
        if name in OPEN:
            return self.read(eqn.params["jaxpr"], ins)
        if eqn.effects:
            raise PlanError(
                f"{with_line(eqn)} has side effects (such as jax.debug.print): remove it, or omit "
                "micro"
            )
        if is_added_to_zeros(eqn, self._dims) and ins[0] == "zero":
            return ["sum"]
        has_rows = [var in self._dims for var in eqn.outvars]
        if not (is_by_row(eqn, self._dims) if all(has_rows) else is_sum_over_rows(eqn, self._dims)):
            why = why_not_by_row(eqn)
            raise PlanError(
                f"{with_line(eqn)} is not known to treat rows of the batch separately"
                f"{why and f' ({why})'}"
            )
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
        first, carried = scan_counts(eqn.params)
        second = first + carried
        if any(0 in self._dims.get(var, ()) for var in variables(eqn.invars[second:])):
            raise PlanError(
                "a scan iterates over rows of the batch: use jax.vmap over the rows instead"
            )
        carry = ins[first:second]
        while True:
            given = [*ins[:first], *carry, *ins[second:]]
            outs = self.read(eqn.params["jaxpr"].jaxpr, given)
            now = [_kind_in_rows(*pair) for pair in zip(carry, outs, strict=False)]
            if now == carry:
                return [*carry, *outs[len(carry) :]]
            carry = now

    def _cond(self, eqn: Any, ins: list[Kind]) -> list[Kind]:
        """Infer the kinds of a conditional, whose predicate must not depend on the batch."""
        which, *given = ins
        if which != "same":
            raise PlanError(f"{with_line(eqn)}: the taken branch depends on the batch")
        of_each = [self.read(branch.jaxpr, given) for branch in eqn.params["branches"]]
        return [_branch_kind(eqn, set(kinds)) for kinds in zip(*of_each, strict=True)]


def _branch_kind(eqn: Any, kinds: set[Kind]) -> Kind:
    """Return the common kind of a result of all branches."""
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {"zero", "sum"} or kinds == {"zero", "same"}:
        return "sum" if "sum" in kinds else "same"
    raise PlanError(f"{with_line(eqn)}: one branch uses the batch, and another one does not")


def _kind_in_rows(before: Kind, after: Kind) -> Kind:
    """Return the kind of a value that a scan carries."""
    if before == after or after == "zero":
        return before
    if before == "zero":
        return after
    raise PlanError("a scan adds sums over rows to a value that is not zero")


class _MicrobatchedStep:
    """A step that runs in three parts: before the loop over microbatches, in it, and after it.

    Args:
        program: the step, flat.
        rows: its rows.
        data: inputs that hold the batch.
    """

    def __init__(self, program: ClosedJaxpr, rows: Rows, data: set[Var]) -> None:
        self._program, self._rows = program, rows
        jaxpr = program.jaxpr
        kinds = Kinds(rows)
        kinds.read_step(jaxpr, data)
        at = list(zip(jaxpr.eqns, kinds.where, strict=True))
        self._loop, self._after = ([e for e, where in at if where == w] for w in ("loop", "after"))
        self._before = _with_dependencies(jaxpr.eqns, [e for e, where in at if where == "before"])
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
        """Run the step."""
        jaxpr, rows = self._program.jaxpr, self._rows
        values: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        values |= dict(zip(jaxpr.constvars, self._program.consts, strict=True))
        make(jaxpr, self._before, values)
        body = jaxpr.replace(
            constvars=[],
            invars=[*self._constants, *self._over],
            eqns=self._loop,
            outvars=[*self._sums, *self._stacked, *self._last],
        )
        part = jaxpr_as_fun(ClosedJaxpr(rows.fewer(body), []))
        constants = [values[var] for var in self._constants]
        shared = (*[None] * len(constants), *[0] * len(self._over))
        run, own = (part, ()) if rows.places == 1 else (jax.vmap(part, shared), (rows.places,))

        def one(total: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = run(*constants, *slices)
            pairs = zip(total, outs, strict=False)
            return _apart([t + new.astype(t.dtype) for t, new in pairs], rows), outs[len(total) :]

        zeros = [
            jnp.zeros((*own, *var.aval.shape), accumulator_dtype(var.aval.dtype))
            for var in self._sums
        ]
        given = [rows.divided(values[var], rows.dims[var]) for var in self._over]
        sums, stacked = jax.lax.scan(one, _apart(zeros, rows), given, length=rows.parts)
        if own:
            sums = [each.sum(0, dtype=each.dtype) for each in sums]
        values |= {v: s.astype(v.aval.dtype) for v, s in zip(self._sums, sums, strict=True)}
        pairs = zip((*self._stacked, *self._last), stacked, strict=True)
        last = (-1, 0) if own else -1
        values |= {v: rows.joined(s, rows.dims[v]) if v in rows.dims else s[last] for v, s in pairs}
        make(jaxpr, self._after, values)
        return [v.val if isinstance(v, Constant) else values[v] for v in jaxpr.outvars]


def _apart(sums: list[Any], rows: Rows) -> list[Any]:
    """Return the sums of each place, constrained to be on their place."""
    if rows.places == 1:
        return sums
    axes = batch_axes(jax.sharding.get_abstract_mesh().shape)
    return [
        jax.lax.with_sharding_constraint(each, jax.P(axes, *[_OPEN_DIMENSION] * (each.ndim - 1)))
        for each in sums
    ]


def _with_dependencies(eqns: list[Any], wanted: list[Any]) -> list[Any]:
    """Return some operations and those whose results they need, in program order."""
    open_ = {var for eqn in wanted for var in variables(eqn.invars)}
    ids, found = {id(eqn) for eqn in wanted}, []
    for eqn in reversed(eqns):
        if id(eqn) in ids or not open_.isdisjoint(eqn.outvars):
            found.append(eqn)
            open_.update(variables(eqn.invars))
    return found[::-1]


def accumulator_dtype(dtype: Any) -> Any:
    """Return the type in which parts are summed: float32 for narrower floating-point types."""
    half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < jnp.dtype("float32").itemsize
    return jnp.dtype("float32") if half else dtype


def with_line(eqn: Any) -> str:
    """Name an operation and its line in user code: ``sort (line 3: `x = jnp.sort(x, axis=0)`)``."""
    name, traceback = eqn.primitive.name, eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*_LIBRARIES, _OURS)):
            text = linecache.getline(frame.file_name, frame.line_num).strip()
            shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
            return f"{name} (line {frame.line_num}{': `' + shown + '`' if shown else ''})"
    return str(name)
