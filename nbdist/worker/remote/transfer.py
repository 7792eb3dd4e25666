"""Names of the user's namespace, and the binding of pushed objects, as cloudpickle bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle

from nbdist.worker.own_modules.reload import reload_changed
from nbdist.worker.runtime.shell import engine_shell

_KERAS = ".keras_transfer"


def put(payload: bytes) -> bool:
    """Bind every name in the pickled dict in the user's namespace, with current own modules.

    Returns:
        True if the objects belong into the scope of the strategy: call `put_in_scope` on all ranks.
        Any error of an object has appeared on its rank by then.
    """
    reload_changed(engine_shell().user_ns)
    reader = Reader(io.BytesIO(payload))
    engine_shell().push(reader.load())
    return needs_scope(reader)


def needs_scope(reader: Reader) -> bool:
    """Return True if the objects that were read belong into the scope of Keras's strategy."""
    if not reader.finds_keras:
        return False
    from nbdist.worker.remote import keras_transfer

    return keras_transfer.scope() is not None


def put_in_scope(payload: bytes) -> None:
    """Bind the names in the scope of Keras's strategy. Collective: variables are agreed."""
    from nbdist.worker.remote import keras_transfer

    scope = keras_transfer.scope()
    assert scope is not None
    with scope:
        engine_shell().push(cloudpickle.loads(payload))


class Reader(pickle.Unpickler):
    """Reader of pushed objects.

    Attributes:
        finds_keras: True if the objects use Keras.
    """

    finds_keras = False

    def find_class(self, module: str, name: str) -> Any:
        self.finds_keras |= module.partition(".")[0] == "keras" or module.endswith(_KERAS)
        return super().find_class(module, name)


def missing(names: list[str]) -> list[str]:
    """Return the names that the user's namespace lacks."""
    return [name for name in names if name not in engine_shell().user_ns]
