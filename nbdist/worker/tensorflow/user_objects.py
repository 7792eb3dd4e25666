"""Objects of TensorFlow and Keras behind the names that a step reads."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.private_api.tensorflow import Function
from nbdist.worker.runtime.reachable import reachable
from nbdist.worker.runtime.user_modules import is_users

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST_ITEMS = 1000
"""Maximum length of a searched container. Longer ones contain data."""


def objects_behind(names: Iterable[str], namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every object behind `names`, with the path to it.

    The search follows containers, functions of the user and their closures, functions compiled by
    `tf.function`, and attributes of the user's own objects.
    """
    return reachable(names, namespace, more=_more, most=_MOST_ITEMS)


def _more(value: Any) -> Iterable[tuple[str, Any]]:
    """Return objects that a cell may change through a value, with their relative paths."""
    if isinstance(value, Function):
        return [("", value.python_function)]
    if isinstance(value, FunctionType):
        return _of_closure(value)
    if is_users(type(value).__module__) and type(value).__dictoffset__:
        return [(f".{name}", part) for name, part in vars(value).items() if name[:2] != "__"]
    return []


def _of_closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
