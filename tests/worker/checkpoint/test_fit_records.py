"""Records of fits keep the epochs and the values of a history exactly."""

from __future__ import annotations

import types

import numpy as np

from nbdist.worker.checkpoint.fit_records import FitRecord, encoded, pack, unpack


def history(**values: list[object]) -> types.SimpleNamespace:
    """Return an object with the attributes of Keras's `History`."""
    return types.SimpleNamespace(epoch=[3, 4], history=values)


def test_a_restored_history_is_the_stored_one() -> None:
    scores = [np.ones(3), np.zeros(3)]
    stored, lacking = encoded(history(loss=[1.5, float("nan")], f1=scores, n=[1]))
    (record,) = unpack(pack([FitRecord(epochs=2, stopped=True, last_batches=7, history=stored)]))
    model = types.SimpleNamespace(history=history(loss=[0.0], other=[1]))
    values = model.history.history
    record.restore(model)
    assert (record.epochs, record.stopped, record.last_batches, lacking) == (2, True, 7, ())
    assert model.history.epoch == [3, 4]
    assert model.history.history is values
    assert list(values) == ["loss", "f1", "n"]
    np.testing.assert_equal(values["loss"], [1.5, float("nan")])
    np.testing.assert_equal(values["f1"], scores)
    assert values["n"] == [1]


def test_values_of_other_types_are_named() -> None:
    stored, lacking = encoded(history(loss=[1.5], model=[object()]))
    model = types.SimpleNamespace(history=history())
    FitRecord(epochs=1, history=stored).restore(model)
    assert lacking == ("model",)
    assert model.history.history == {"loss": [1.5]}


def test_a_cell_without_fits_has_no_records() -> None:
    assert pack([]) == b""
    assert unpack(b"") == []
