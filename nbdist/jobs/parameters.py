"""Parameters of an exported program: plain numbers in its cells that become arguments."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.cells.dependencies import outside_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.jobs.cells import JobCell

_RATES = ("learning_rate", "lr", "LEARNING_RATE", "LR")
_NAMES = {
    **dict.fromkeys(("epochs", "EPOCHS", "num_epochs", "NUM_EPOCHS", "n_epochs"), "epochs"),
    **dict.fromkeys(("batch_size", "BATCH_SIZE"), "batch"),
}
"""Arguments for numbers that cells assign to these names."""

_OF_KERAS = "optimizers"
"""Module whose classes take the learning rate first."""

_OF_OPTAX = {
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw"),
    *("adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "noisy_sgd"),
    *("novograd", "optimistic_adam", "optimistic_gradient_descent", "radam", "rmsprop"),
    *("rprop", "sgd", "sign_sgd", "sm3", "yogi"),
    *("constant_schedule", "cosine_decay_schedule", "exponential_decay"),
}
"""Functions of Optax 0.2 that take the learning rate, or its first value, first."""


@dataclass(frozen=True)
class Parameter:
    """A number of a cell that an argument of the program replaces.

    Attributes:
        name: name of the argument, such as `learning_rate`.
        node: the number.
        cell: label of its cell.
    """

    name: str
    node: ast.Constant
    cell: int

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def value(self) -> float:
        value = self.node.value
        assert isinstance(value, (int, float))
        return value


def parameters_of(cells: Sequence[JobCell]) -> list[Parameter]:
    """Return the learning rate, the number of epochs and the batch, if the cells contain one.

    Args:
        cells: cells of the program; the last one trains.
    """
    plain = [cell for cell in cells if cell.request.step is None]  # steps read numbers as constants
    constants = _constants(cells)
    found = [
        Parameter("learning_rate", node, cell.label) for cell in plain for node in _rates(cell.tree)
    ]
    last = cells[-1]
    if last in plain:
        fits = [node for node in ast.walk(last.tree) if _is_fit(node)]
        if len(fits) == 1:
            found += _of_fit(fits[0], last.label, constants)
        found += [
            Parameter(_NAMES[name], node, cell)
            for name, (node, cell) in constants.items()
            if name in _NAMES and type(node.value) is int
        ]
    found = list(dict.fromkeys(found))
    names = Counter(parameter.name for parameter in found)
    uses = Counter(parameter.node for parameter in found)
    return [p for p in found if names[p.name] == uses[p.node] == 1]


def replaced(source: str, parameters: Sequence[Parameter], arguments: str) -> str:
    """Return the source of a cell with its parameters read from `arguments`."""
    lines = source.split("\n")
    for parameter in sorted(parameters, key=lambda p: (p.node.lineno, p.node.col_offset))[::-1]:
        node, row = parameter.node, parameter.node.lineno - 1
        line = lines[row].encode()
        name = f"{arguments}.{parameter.name}".encode()
        lines[row] = (line[: node.col_offset] + name + line[node.end_col_offset :]).decode()
    return "\n".join(lines)


def _rates(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the numbers that are learning rates, outside of functions."""
    for node in outside_functions(tree):
        match node:
            case ast.keyword(arg=name, value=ast.Constant(value=float()) as number):
                if name in _RATES:
                    yield number
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Constant(value=float()) as number
            ):
                if name in _RATES:
                    yield number
            case ast.Call(
                func=ast.Attribute() as function, args=[ast.Constant(value=float()) as number, *_]
            ):
                module, name = ast.unparse(function.value).split("."), function.attr
                if _OF_KERAS in module or (module == ["optax"] and name in _OF_OPTAX):
                    yield number


def _is_fit(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "fit"
    )


def _of_fit(
    call: ast.AST, cell: int, constants: Mapping[str, tuple[ast.Constant, int]]
) -> Iterator[Parameter]:
    """Yield the numbers of epochs and of samples in a batch that a `fit` receives."""
    assert isinstance(call, ast.Call)
    names = {"epochs": "epochs", "batch_size": "batch"}
    for keyword in call.keywords:
        number, place = keyword.value, cell
        if isinstance(number, ast.Name) and number.id in constants:
            number, place = constants[number.id]
        if isinstance(number, ast.Constant) and type(number.value) is int and keyword.arg in names:
            yield Parameter(names[keyword.arg], number, place)


def _constants(cells: Sequence[JobCell]) -> dict[str, tuple[ast.Constant, int]]:
    """Return the names that are bound to constants only, with the constant and its cell.

    If a name is bound more than once, the last constant counts. Nothing may read the name before.
    """
    nodes = [
        (place, node)
        for place, cell in enumerate(cells)
        for node in ast.walk(cell.tree)
        if isinstance(node, ast.Name)
    ]
    bound = Counter(node.id for _, node in nodes if isinstance(node.ctx, ast.Store))
    assigned = [
        (name, value, place)
        for place, cell in enumerate(cells)
        for statement in cell.tree.body
        for name, value in _assigned_constant(statement)
    ]
    constant = Counter(name for name, _, _ in assigned)
    last = {name: (value, place) for name, value, place in assigned}
    early = {
        node.id
        for place, node in nodes
        if not isinstance(node.ctx, ast.Store)
        and node.id in last
        and (place, node.lineno) <= (last[node.id][1], last[node.id][0].lineno)
    }
    return {
        name: (value, cells[place].label)
        for name, (value, place) in last.items()
        if bound[name] == constant[name] and (bound[name] == 1 or name not in early)
    }


def _assigned_constant(statement: ast.stmt) -> Iterator[tuple[str, ast.Constant]]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
            yield name, value
