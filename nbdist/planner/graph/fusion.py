"""Fusion of operations: the values of a step that XLA writes to memory.

A compiler fuses element-by-element operations with their users, so that most values between them
are never written. Here, a value is written if more than one operation uses it, or if a dot, a
convolution, a lookup or a loop does. Constants and broadcasts are never written. A reshape or a
transpose uses the same memory. These are the rules of XLA's instruction fusion pass, simplified.
Inputs of products are written first, except by compilers for TPUs. These compilers recompute cheap
values in each user if they depend on one value that is not larger.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nbdist.planner.graph.model import Op
from nbdist.planner.graph.program import Program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from nbdist.planner.graph.model import Value

_SAME_MEMORY = frozenset(
    ("reshape", "transpose", "squeeze", "expand_dims", "stop_gradient", "optimization_barrier")
)
ADDS = frozenset(("add", "add_any"))
"""Primitives that add."""

_PRODUCTS = frozenset(("dot", "conv"))
_CHEAP = _SAME_MEMORY.union(
    ("abs", "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "eq", "ge"),
    ("gt", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or"),
    ("select_n", "sign", "square", "sub"),
)
"""Primitives that XLA recomputes instead of writing their results."""

_REPEATS = 4
"""Ratio of a value's size to that of its inputs from which it counts as a broadcast."""


def fused(
    ops: tuple[Op, ...], kept: Collection[int] = (), *, into_products: bool = False
) -> Program:
    """Return the operations after fusion, with the values that each reads and writes.

    Args:
        ops: operations of the program.
        kept: numbers of values that are needed later.
        into_products: True if cheap inputs of products are recomputed in them.
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
    return Program(made.left(ops))


class _Fusion:
    """State of a fusion; each factor of a product remains one value in memory.

    Args:
        uses: number of times that each value is read.
        whole: numbers of values that are needed as they are, also by products.
        factors: numbers of values that products multiply.
        written: numbers of values that users other than products need, if cheap values are
            recomputed; None otherwise.
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
        self._expensive: set[int] = set()

    def left(self, ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            ins = self._read(op)
            if op.kind == "stream" and all(self._vanishes(op, out, ins) for out in op.outs):
                for out in op.outs:
                    self._origins[out.number] = ins
                if not self._is_cheap(op):
                    self._expensive.update(out.number for out in op.outs)
                continue
            again = self._written is not None
            outs = {value.number for value in op.outs}
            body = fused(op.body, outs, into_products=again) if op.body else ()
            whole = op.outs, op.summed, op.flops, op.contract, op.times, body, op.carried, op.over
            yield Op(op.kind, op.name, ins, *whole)  # `replace` is much slower

    def _read(self, op: Op) -> tuple[Value, ...]:
        """Return the values that an operation reads from memory; two factors for products."""
        if op.kind in _PRODUCTS:
            origins = (self._origins.get(v.number, (v,)) for v in op.ins)
            return tuple(max(each, key=lambda v: v.nbytes) for each in origins)
        every: dict[int, Value] = {}
        for value in op.ins:
            for origin in self._origins.get(value.number, (value,)):
                every[origin.number] = origin
        return tuple(every.values())

    def _vanishes(self, op: Op, out: Value, ins: tuple[Value, ...]) -> bool:
        if _is_same_memory(op) or self._is_recomputed(op, out, ins):
            return True
        if out.number in self._factors:
            return False
        if _REPEATS * sum(value.nbytes for value in op.ins) <= out.nbytes:
            return True
        return self._uses[out.number] <= 1 and out.number not in self._whole

    def _is_recomputed(self, op: Op, out: Value, ins: tuple[Value, ...]) -> bool:
        """Return True if all users recompute it from small values and one that is not larger."""
        if self._written is None or out.number in self._written or not self._is_cheap(op):
            return False
        large = [value.nbytes for value in ins if _REPEATS * value.nbytes > out.nbytes]
        return len(large) == 1 and large[0] <= out.nbytes

    def _is_cheap(self, op: Op) -> bool:
        """Return True if the operation and its unwritten inputs are cheap."""
        return op.name in _CHEAP and self._expensive.isdisjoint(value.number for value in op.ins)


def _is_same_memory(op: Op) -> bool:
    return op.name in _SAME_MEMORY and len(op.outs) == 1


def added_up(ops: tuple[Op, ...], results: Collection[int]) -> dict[int, int]:
    """Return the sums that only add results of products: the sum by the number of each result.

    If each device has a part of each product, XLA adds the parts first and reduces them over the
    devices once (its pass all-reduce-reassociate). An example is the gradient of the input of a
    layer's queries, keys and values.

    Args:
        ops: in program order.
        results: numbers of the step's results; these are not terms of a sum.
    """
    found: dict[int, int] = {}
    uses = Counter(value.number for op in ops for value in op.ins)
    terms: dict[int, tuple[int, ...]] = {}
    for op in ops:
        found |= added_up(op.body, results)
        numbers = [value.number for value in op.ins]
        if op.kind == "dot":
            terms[op.outs[0].number] = (op.outs[0].number,)
        elif op.name in ADDS and all(
            n in terms and uses[n] == 1 and n not in results for n in numbers
        ):
            whole = op.outs[0].number
            terms[whole] = tuple(term for number in numbers for term in terms[number])
            found |= dict.fromkeys(terms[whole], whole)
    return found
