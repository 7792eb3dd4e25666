"""Names from outside that functions read when they are called."""

from __future__ import annotations

import ast
import functools

from nbdist.worker.lifting.outside_names import read_by, read_in

CELL = """
def report(value, scale=1):
    total = value * scale
    def inner():
        return total + offset + value
    history.append(inner())

def count():
    global steps, name
    steps += 1
    name = ""

show = lambda: loss
later = (first for first in rows if first > limit)
now = loss_of_now
"""


def test_names_of_functions_lambdas_and_generators() -> None:
    found = read_by(ast.walk(ast.parse(CELL)))
    assert {"offset", "history", "loss", "rows", "limit", "steps"} <= found
    assert not {"value", "scale", "total", "first", "name", "loss_of_now"} & found


def test_names_of_functions_and_classes_in_a_namespace() -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    exec(
        """
import functools
def own(x):
    return [x.attribute + listed for _ in range(2)]
class Trainer:
    def step(self):
        return lambda: in_method
    @property
    def best(self):
        return in_property
partial = functools.partial(lambda x: in_partial, 1)
""",
        space,
    )
    space |= {"module": ast, "text": "no function"}
    found = read_in(space)
    assert {"listed", "in_method", "in_property", "in_partial"} <= found
    assert not {"attribute", "x", "functools"} & found


def test_functions_of_other_modules_do_not_count() -> None:
    assert read_in({"wraps": functools.wraps, "partial": functools.partial}) == set()
