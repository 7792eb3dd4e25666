"""Which values of a step are ever in memory, as XLA would have it.

A compiler makes element-by-element operations together with what uses them, so that most values
between them are never written. Here: a value is written if more than one operation uses it, or if
a dot, a convolution, a lookup or a loop does; what is made of nothing or by repeating something
smaller never is; a reshape or a transpose is the same memory. (The rules of XLA's instruction
fusion pass, made coarse.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nbdist.plan.model import Op, Value

_SAME_MEMORY = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "stop_gradient", "optimization_barrier")
)
_PRODUCTS = frozenset(("dot", "conv"))
_REPEATS = 4
"""How much larger than what it is made of a value has to be to count as made by repeating."""


def fused(ops: tuple[Op, ...], kept: Collection[int] = ()) -> tuple[Op, ...]:
    """The operations that a compiler would leave, each with the values that it reads and writes.

    Args:
        ops: as the program has them.
        kept: numbers of values that are needed after them.
    """
    uses: Counter[int] = Counter()
    whole: set[int] = set(kept)
    factors: set[int] = set()
    for op in reversed(ops):
        numbers = {value.number for value in op.ins}
        uses.update(numbers)
        renamed = {value.number for value in op.outs} if _is_same_memory(op) else set()
        if op.kind not in ("stream", "reduce") or not whole.isdisjoint(renamed):
            whole |= numbers
        if op.kind in _PRODUCTS or not factors.isdisjoint(renamed):
            factors |= numbers
    made = _Fusion(uses, whole, factors)
    return tuple(made.left(ops))


class _Fusion:
    """Every factor of a product is one value in memory, and stays one."""

    def __init__(self, uses: Counter[int], whole: set[int], factors: set[int]) -> None:
        self._uses = uses
        self._whole = whole
        self._factors = factors
        self._origins: dict[int, tuple[Value, ...]] = {}

    def left(self, ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            ins = self._read(op)
            if op.kind == "stream" and all(self._vanishes(op, out) for out in op.outs):
                for out in op.outs:
                    self._origins[out.number] = ins
                continue
            body = fused(op.body, {v.number for v in op.outs}) if op.body else ()
            yield replace(op, ins=ins, body=body)

    def _read(self, op: Op) -> tuple[Value, ...]:
        """What it reads of memory, once each; of a product its two factors."""
        if op.kind in _PRODUCTS:
            return tuple(self._origins.get(v.number, (v,))[0] for v in op.ins)
        every: dict[int, Value] = {}
        for value in op.ins:
            for origin in self._origins.get(value.number, (value,)):
                every[origin.number] = origin
        return tuple(every.values())

    def _vanishes(self, op: Op, out: Value) -> bool:
        if _is_same_memory(op):
            return True
        if out.number in self._factors:
            return False
        if _REPEATS * sum(value.nbytes for value in op.ins) <= out.nbytes:
            return True
        return self._uses[out.number] <= 1 and out.number not in self._whole


def _is_same_memory(op: Op) -> bool:
    return op.name in _SAME_MEMORY and len(op.outs) == 1
