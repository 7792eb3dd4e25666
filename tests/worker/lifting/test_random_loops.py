"""Random training loops compute the same after they have been divided.

The loops mix updates, conditions, draws, prints and assignments. The doubles are those of
`test_rewrite.py`. A loop that nbdist refuses to divide is left out.
"""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest

from nbdist.cells.loops import LoopError
from nbdist.worker.lifting.callees import Callees
from nbdist.worker.lifting.rewrite import lift
from tests.worker.lifting.test_rewrite import LocalLoop, run

HEAD = """
a, b, c, loss = 1, 2, 3, 4
draws = iter(range(1000))
for n, (x, y) in enumerate(data):
"""
COUNTED = 150
"""Loops in each test. About a third of them can be divided."""


class PlainLoop(LocalLoop):
    """Loop whose body may read the rows of each batch."""

    def batches(self, data: Any) -> Any:
        return data


class Writer:
    """Writes the body of a random loop.

    Args:
        seed: the same seed gives the same loop.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def cell(self) -> str:
        return HEAD + "\n".join(self._block(1)) + "\n"

    def _block(self, depth: int) -> list[str]:
        lines: list[str] = []
        for _ in range(self._random.randint(4, 6) if depth == 1 else self._random.randint(1, 3)):
            lines += self._statement(depth)
        return ["    " + line for line in lines]

    def _statement(self, depth: int) -> list[str]:
        pick = self._random.choice
        kinds = ["assign", "assign", "add", "append", "print", "update", "update", "apply"]
        if depth < 3:
            kinds += ["if", "if", "if"]
        match pick(kinds):
            case "assign":
                return [f"{pick('abc')} = {self._value()}"]
            case "add":
                return [f"{pick('abc')} += {self._value()}"]
            case "append":
                return [f"{pick(['seen', 'losses'])}.append({self._value()})"]
            case "print":
                return [f"print({self._value()})"]
            case "apply":
                return [f"{pick(['optimizer', 'other'])}.apply_gradients([{self._value()}])"]
            case "update":
                rule = pick(["optimizer", "other"])
                return [
                    "with GradientTape() as tape:",
                    f"    loss = {self._value()}",
                    f"{rule}.apply_gradients(tape.gradient(loss, variables))",
                ]
        lines = [f"if {pick('nax')} % {self._random.randint(2, 3)} == {pick('01')}:"]
        lines += self._block(depth + 1)
        if self._random.random() < 0.35:
            lines += ["else:", *self._block(depth + 1)]
        return lines

    def _value(self) -> str:
        kind = self._random.random()
        if kind < 0.5:
            return self._random.choice(["a", "b", "c", "loss", "x", "y", "n"])
        if kind < 0.75:
            return self._random.choice(["1", "2", "next(draws)", "next(draws)"])
        return f"({self._value()} {self._random.choice('+-*')} {self._value()}) % 97"


def is_divided(cell: str) -> bool:
    tree = ast.parse(cell)
    changed, programs = lift(tree, cell, Callees(ast.parse(cell), {}))
    refused = any(isinstance(program, LoopError) for program in programs.values())
    return changed is not None and bool(programs) and not refused


def outcome(cell: str, *, lifted: bool) -> dict[str, Any]:
    """Return the plain values in the namespace of a cell that has run, and its prints."""
    namespace, _ = run(cell, lifted=lifted, loop=PlainLoop)
    kinds = (int, float, str, list, tuple, dict)
    return {
        name: value
        for name, value in namespace.items()
        if isinstance(value, kinds) and not name.startswith("_")
    }


@pytest.mark.parametrize("block", range(4))
def test_divided_loop_computes_the_same(block: int) -> None:
    cells = [Writer(seed).cell() for seed in range(block * COUNTED, (block + 1) * COUNTED)]
    divided = [cell for cell in cells if is_divided(cell)]
    assert len(divided) > COUNTED // 5
    for cell in divided:
        assert outcome(cell, lifted=True) == outcome(cell, lifted=False), cell
