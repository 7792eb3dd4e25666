"""Which values of a step are ever in memory, as XLA would have it.

A compiler makes element-by-element operations together with what uses them, so that most values
between them are never written. Here: a value is written if more than one operation uses it, or if
a dot, a convolution, a lookup or a loop does; what is made of nothing or by repeating something
smaller never is; a reshape or a transpose is the same memory. (The rules of XLA's instruction
fusion pass, made coarse.) What products read is written before, but by compilers for TPUs: these
make anew in each product, and in all else that uses it, what is cheap to make of one value that is
no larger.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nbdist.planner.graph.model import Op, Value

_SAME_MEMORY = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "stop_gradient", "optimization_barrier")
)
_PRODUCTS = frozenset(("dot", "conv"))
_CHEAP = _SAME_MEMORY.union(
    ("abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "eq", "ge"),
    ("gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "select_n", "sign"),
    ("square", "sub"),
)
"""Primitives that XLA makes again rather than write what they make."""

_REPEATS = 4
"""How much larger than what it is made of a value has to be to count as made by repeating."""


def fused(
    ops: tuple[Op, ...], kept: Collection[int] = (), *, into_products: bool = False
) -> tuple[Op, ...]:
    """The operations that a compiler would leave, each with the values that it reads and writes.

    Args:
        ops: as the program has them.
        kept: numbers of values that are needed after them.
        into_products: whether products have what is cheap made anew for them.
    """
    uses: Counter[int] = Counter()
    whole: set[int] = set(kept)
    written: set[int] = set(kept)
    factors: set[int] = set()
    for op in reversed(ops):
        numbers = {value.number for value in op.ins}
        uses.update(numbers)
        renamed = {value.number for value in op.outs} if _is_same_memory(op) else set()
        if op.kind not in ("stream", "reduce") or not whole.isdisjoint(renamed):
            whole |= numbers
        if op.kind not in ("stream", "reduce", *_PRODUCTS) or not written.isdisjoint(renamed):
            written |= numbers
        if op.kind in _PRODUCTS or not factors.isdisjoint(renamed):
            factors |= numbers
    made = _Fusion(uses, whole, factors, written if into_products else None)
    return tuple(made.left(ops))


class _Fusion:
    """Every factor of a product is one value in memory, and stays one.

    Args:
        uses: how often each value is read.
        whole: numbers of values that are needed as they are, by products too.
        factors: of those that products multiply.
        written: of those that are needed as they are by all else, where what is cheap is made anew;
            None where it is not.
    """

    def __init__(
        self,
        uses: Counter[int],
        whole: set[int],
        factors: set[int],
        written: set[int] | None,
    ) -> None:
        self._uses = uses
        self._whole = whole
        self._factors = factors
        self._written = written
        self._origins: dict[int, tuple[Value, ...]] = {}
        self._dear: set[int] = set()

    def left(self, ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            ins = self._read(op)
            if op.kind == "stream" and all(self._vanishes(op, out, ins) for out in op.outs):
                for out in op.outs:
                    self._origins[out.number] = ins
                if not self._is_cheap(op):
                    self._dear.update(out.number for out in op.outs)
                continue
            again = self._written is not None
            outs = {value.number for value in op.outs}
            body = fused(op.body, outs, into_products=again) if op.body else ()
            yield replace(op, ins=ins, body=body)

    def _read(self, op: Op) -> tuple[Value, ...]:
        """What it reads of memory, once each; of a product its two factors."""
        if op.kind in _PRODUCTS:
            origins = (self._origins.get(v.number, (v,)) for v in op.ins)
            return tuple(max(each, key=lambda v: v.nbytes) for each in origins)
        every: dict[int, Value] = {}
        for value in op.ins:
            for origin in self._origins.get(value.number, (value,)):
                every[origin.number] = origin
        return tuple(every.values())

    def _vanishes(self, op: Op, out: Value, ins: tuple[Value, ...]) -> bool:
        if _is_same_memory(op) or self._is_made_anew(op, out, ins):
            return True
        if out.number in self._factors:
            return False
        if _REPEATS * sum(value.nbytes for value in op.ins) <= out.nbytes:
            return True
        return self._uses[out.number] <= 1 and out.number not in self._whole

    def _is_made_anew(self, op: Op, out: Value, ins: tuple[Value, ...]) -> bool:
        """Whether all that read it make it of one value that is no larger, and of small ones."""
        if self._written is None or out.number in self._written or not self._is_cheap(op):
            return False
        large = [value.nbytes for value in ins if _REPEATS * value.nbytes > out.nbytes]
        return len(large) == 1 and large[0] <= out.nbytes

    def _is_cheap(self, op: Op) -> bool:
        """And what it is made of, if that is never written."""
        return op.name in _CHEAP and self._dear.isdisjoint(value.number for value in op.ins)


def _is_same_memory(op: Op) -> bool:
    return op.name in _SAME_MEMORY and len(op.outs) == 1
