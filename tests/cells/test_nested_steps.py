"""Calls that take a gradient inside of statements for the host."""

from __future__ import annotations

import ast

import pytest

from nbdist.cells.nested_steps import separated, shown_name
from nbdist.worker.lifting.callees import Callees

STEP = """
def train_step(x):
    with GradientTape() as tape:
        loss = x
    return optimizer.apply_gradients(tape.gradient(loss, variables))
"""


def parts(statement: str) -> list[str] | None:
    """Return the call and the rest as source, with `result` as the name of the result."""
    tree = ast.parse(STEP + statement)
    found = separated(tree.body[-1], Callees(tree, {}))
    if found is None:
        return None
    name = ast.unparse(found[0].targets[0])
    return [ast.unparse(part).replace(name, "result") for part in found]


@pytest.mark.parametrize(
    ("statement", "rest"),
    [
        ("losses.append(train_step(x))", "losses.append(result)"),
        ("total += float(train_step(x))", "total += float(result)"),
        ("loss = train_step(x).numpy()", "loss = result.numpy()"),
        ("log['a'].append(train_step(x)[0].item())", "log['a'].append(result[0].item())"),
        ("print('loss', train_step(x), end='')", "print('loss', result, end='')"),
    ],
)
def test_the_host_receives_the_result_of_the_step(statement: str, rest: str) -> None:
    assert parts(statement) == ["result = train_step(x)", rest]


@pytest.mark.parametrize(
    "statement",
    [
        "loss = train_step(x)",
        "total += train_step(x)",
        "losses.append(x)",
        "print(train_step(x), train_step(y))",
        "losses.extend([train_step(x) for x in parts])",
        "print(f'{train_step(x)}')",
        "print(np.random.rand(), train_step(x))",
        "if float(train_step(x)) > 1: pass",
    ],
)
def test_other_statements_stay_whole(statement: str) -> None:
    assert parts(statement) is None


@pytest.mark.parametrize(
    ("name", "shown"), [("_nbdist_12_4_train_step", "train_step"), ("loss_a_b", "loss_a_b")]
)
def test_a_result_is_shown_by_the_name_of_its_function(name: str, shown: str) -> None:
    assert shown_name(name) == shown
