"""Records of the fits of a cell, with which a repeated `fit` is the same without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.worker.checkpoint import python_values

if TYPE_CHECKING:
    from collections.abc import Sequence


class FitRecord(msgspec.Struct, frozen=True):
    """Epochs of one `fit`.

    Attributes:
        epochs: number of epochs that have ended.
        stopped: True if a callback ended the `fit`.
        last_batches: number of batches of the last epoch if a callback ended the `fit` within it;
            0 if the epoch was complete.
        history: attributes of Keras's `History`, encoded by `python_values`.
        lacking: names of its values that cannot be encoded.
    """

    epochs: int = 0
    stopped: bool = False
    last_batches: int = 0
    history: Any = None
    lacking: tuple[str, ...] = ()

    def restore(self, model: Any) -> None:
        """Set the epochs and the values of the model's `History`."""
        if self.history is not None:
            model.history.epoch, values = python_values.decode(self.history)
            model.history.history.clear()
            model.history.history.update(values)


def encoded(history: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the attributes of a `History` for a record, and the names of values that it lacks."""
    lacking, values = [], {}
    for name, found in history.history.items():
        try:
            python_values.encode(found)
        except python_values.UnsavableError:
            lacking.append(name)
        else:
            values[name] = found
    return python_values.encode([history.epoch, values]), tuple(lacking)


def pack(records: Sequence[FitRecord]) -> bytes:
    """Encode the records of a cell; empty without records."""
    return msgspec.msgpack.encode(records) if records else b""


def unpack(data: bytes) -> list[FitRecord]:
    """Decode the result of `pack`."""
    return msgspec.msgpack.decode(data, type=list[FitRecord]) if data else []
