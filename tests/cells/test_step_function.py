"""Conversion between step cells and functions."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest

from nbdist.cells.step_function import cell_of, function_of, function_of_statements, indented
from nbdist.cells.step_program import compile_step
from nbdist.errors import UsageError

CELLS = [
    "# head\nx, y = batch\nloss = f(x) - y\n",
    "# head\nparams = params - batch\n{'loss': params.sum()}\n",
    "# head\n\n# The body.\nif batch.any():\n    total = total + 1\ntotal\n",
    "# head\ntext = '''a\n  b\n'''\nloss = len(text) * batch.sum()\n",
    "# head\nloss = (\n    batch\n    .sum()\n)\n(\n    loss + 1\n)\n",
    "# head\ndef inner(x):\n    return x\nüber = inner(batch); über.sum()\n",
    "# head\nstate.update(batch)\n",
]


@pytest.mark.parametrize("cell", CELLS)
def test_step_of_a_function_is_that_of_its_cell(cell: str) -> None:
    """Names, reports and statements are equal; only lines of the head differ."""
    before = compile_step(cell, given=("batch",), carries=True)
    function = function_of(cell, before, "train_step")
    after = compile_step(cell_of(function), given=("batch",), carries=True)
    assert ast.dump(ast.parse("def f():\n" + after.body)) == ast.dump(
        ast.parse("def f():\n" + before.body)
    )
    assert (after.carried, after.report) == (before.carried, before.report)
    assert after.reads.keys() == before.reads.keys()


def test_function_states_what_it_carries_and_returns() -> None:
    cell = "# head\nw = w - batch\nloss = w.sum()\n"
    program = compile_step(cell, given=("batch",), carries=True)
    assert function_of(cell, program, "train_step") == (
        "def train_step(batch):\n    global w\n    w = w - batch\n"
        "    loss = w.sum()\n    return loss"
    )


def test_body_keeps_the_lines_of_the_function() -> None:
    function = "def step(\n    batch,\n):\n    global w\n    w = w + 1\n    return w\n"
    assert cell_of(function) == "#\n#\n#\n#\nw = w + 1\nw\n"


def test_strings_of_several_lines_keep_their_text() -> None:
    text = "a = '''x\ny\n'''\nb = [\n    1,\n]\n"
    assert indented(text) == "    a = '''x\ny\n'''\n    b = [\n        1,\n    ]\n"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python 3.14 introduces t-strings")
def test_template_strings_of_several_lines_keep_their_text() -> None:
    assert indented("a = t'''x\ny {b}\n'''\n") == "    a = t'''x\ny {b}\n'''\n"


ANNOTATED = """\
x: float = 1.5; ü: "list[int]" = [1]; y: (int) = (2)
def f(a: int) -> int:
    x: int = a
    return x
if x:
    z: dict[
        str, int
    ] = {"a": 1}
    w: tuple
class A:
    b: int = 3
"""


def test_annotations_of_global_names_are_left_out() -> None:
    """Python refuses them: annotated name 'x' can't be global."""
    text = function_of_statements(ANNOTATED, "train")
    space: dict[str, Any] = {}
    exec(compile(text, "program", "exec"), space)
    space["train"]()
    assert (space["x"], space["ü"], space["y"], space["z"]) == (1.5, [1], 2, {"a": 1})
    assert space["f"](4) == 4
    assert space["A"].b == 3
    lines = text.splitlines()[2:]
    cell = "# head\nloss: float = batch.sum()\nw: dict = w - loss\n{'loss': loss}\n"
    program = compile_step(cell, given=("batch",), carries=True)
    function = function_of(cell, program, "step")
    assert compile(function, "program", "exec")
    assert "    loss: float = batch.sum()\n    w = w - loss\n" in function
    assert len(lines) == len(ANNOTATED.splitlines())
    assert lines[2:4] == ["        x: int = a", "        return x"]


@pytest.mark.parametrize("source", ["x = 1\n", "@jit\ndef step(batch):\n    batch\n"])
def test_other_source_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="a step or a cell is a function without decorators"):
        cell_of(source)


def test_statements_become_a_function_that_binds_the_names_of_the_module() -> None:
    source = (
        "import math as m\nfor i in [1]:\n    x = [j for j in (i, m.pi)]\nwith open(x) as y: pass"
    )
    text = function_of_statements(source, "train")
    assert text.startswith("def train():\n    global i, m, x, y\n    import math as m\n")
    assert cell_of(text + "\n").splitlines()[2:] == source.splitlines()
