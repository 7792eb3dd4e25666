"""Products whose results are added up before anything else is done with them.

Where each device has a part of each of their sums, XLA adds the parts, and has them summed over the
devices once (its pass all-reduce-reassociate): so it does with what the gradients of a layer's
queries, keys and values leave of its input.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from nbdist.planner.graph.model import Op

_ADDS = frozenset(("add", "add_any"))


def added_up(ops: tuple[Op, ...], results: Collection[int]) -> dict[int, int]:
    """Of each such result, by its number, the number of the sum that it ends in.

    Args:
        ops: in their order.
        results: numbers of what the step leaves: these are no more than terms of a sum.
    """
    found: dict[int, int] = {}
    uses = Counter(value.number for op in ops for value in op.ins)
    terms: dict[int, tuple[int, ...]] = {}
    for op in ops:
        found |= added_up(op.body, results)
        numbers = [value.number for value in op.ins]
        if op.kind == "dot":
            terms[op.outs[0].number] = (op.outs[0].number,)
        elif op.name in _ADDS and all(
            n in terms and uses[n] == 1 and n not in results for n in numbers
        ):
            whole = op.outs[0].number
            terms[whole] = tuple(term for number in numbers for term in terms[number])
            found |= dict.fromkeys(terms[whole], whole)
    return found
