"""Pickles of Keras objects, and refusal of objects that belong to one process.

Keras 3.15 pickles a model as a `.keras` file. Its loader does not find classes of the notebook, and
leaves a model uncompiled, with a warning, if `compile` has arguments of the user.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from nbdist.errors import TransferError
from nbdist.worker.keras.own_classes import classes_of_notebook
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    import contextlib


def reduced(value: object) -> tuple[Any, ...] | None:
    """Return the pickle of a Keras object as a function and its arguments; None for other values.

    Raises:
        TransferError: the object cannot be copied to another process.
    """
    from nbdist.private_api.keras import KerasSaveable

    _refuse_dataset(value)
    if not isinstance(value, KerasSaveable):
        return None
    import keras

    kind = type(value).__name__
    if isinstance(value, keras.Model) and value.compiled:
        _check_compile(type(value))
    try:
        _, (buffer,) = value.__reduce__()
    except Exception as error:
        raise _refusal(kind, error) from error
    return load, (kind, buffer.getvalue(), classes_of_notebook(value))


def load(kind: str, saved: bytes, classes: dict[str, Any]) -> Any:
    """Create a Keras object from its pickle.

    Args:
        kind: name of its class.
        saved: `.keras` file.
        classes: classes of the notebook that the file names.

    Raises:
        TransferError: Keras cannot create the object.
    """
    from nbdist.private_api.keras import saving_lib

    try:
        return saving_lib._load_model_from_fileobj(
            io.BytesIO(saved), custom_objects=classes, compile=True, safe_mode=False
        )
    except Exception as error:
        raise _refusal(kind, error) from error


def scope() -> contextlib.AbstractContextManager[object] | None:
    """Return the scope in which cells create Keras objects; None without the backend's strategy."""
    import keras

    strategies = context.current().strategies
    backend = keras.backend.backend()
    entered: contextlib.AbstractContextManager[object] | None = None
    if backend == "tensorflow" and "mirrored" in strategies:
        entered = strategies["mirrored"].scope()
    elif backend == "jax" and "pjrt" in strategies:
        entered = strategies["pjrt"].keras_scope()
    return entered


def _refuse_dataset(value: object) -> None:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(value, tensorflow.data.Dataset):
        raise TransferError(
            "is a tf.data.Dataset, and cannot be copied to another process: create it in a "
            "%%dist_run cell, from arrays that %dist_push copies"
        )


def _check_compile(kind: Any) -> None:
    """Refuse models of the user that Keras would leave uncompiled, with a warning."""
    import keras

    own = kind.compile is not keras.Model.compile
    if own and kind.compile_from_config is keras.Model.compile_from_config:
        raise TransferError(
            f"contains a compiled {kind.__name__} with a compile() of its own: push it before "
            "compile(), and compile it in a %%dist_run cell"
        )


def _refusal(kind: str, error: object) -> TransferError:
    reason = " ".join(str(error).split())[:200]
    return TransferError(
        f"contains a {kind} that Keras cannot create on the workers ({reason}): create it in a "
        "%%dist_run cell, and push the arrays of its get_weights()"
    )
