"""Parts of a value that the files of an export do not contain."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nbdist.utils.listing import listed
from nbdist.worker.export import named_arrays
from nbdist.worker.keras.own_classes import classes_of_notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.export.named_arrays import Contents

_MOST_NAMES = 3


def omissions(value: Any, kind: str, contents: Contents | None) -> str:
    """Return the parts that the files do not contain, for a message.

    Args:
        value: the exported value.
        kind: format of the files.
        contents: its arrays; None if Keras wrote the files.
    """
    if named_arrays.is_keras_model(value):
        found = _of_model(value, kind)
    elif isinstance(value, (str, os.PathLike)):
        found = iter(("code", "Python values", "random generators of Python and NumPy"))
    else:
        assert contents is not None
        found = _of_tree(contents, kind)
    return ", ".join(found)


def _of_model(model: Any, kind: str) -> Iterator[str]:
    if kind != "keras":
        yield "code"
    elif own := sorted(classes_of_notebook(model)):
        yield f"code of {listed(own, _MOST_NAMES)}"
    has_optimizer = getattr(model, "optimizer", None) is not None  # only a compiled model has one
    if has_optimizer and kind not in ("keras", "weights"):
        yield "optimizer"
    yield from ("random generators", "metrics")


def _of_tree(contents: Contents, kind: str) -> Iterator[str]:
    yield from ("code", "static attributes")
    yield "types of containers" if kind == "orbax" else "containers"
    if contents.keys:
        yield f"random generators ({listed(contents.keys, _MOST_NAMES)})"
    empty = [array.name for array in contents.arrays if not array.nbytes]
    if kind == "orbax" and empty:
        yield f"arrays without elements ({listed(empty, _MOST_NAMES)})"
    if contents.others:
        yield f"other values ({listed(contents.others, _MOST_NAMES)})"
