"""Hyperparameters in the text and the options of a cell."""

from __future__ import annotations

import pytest

from nbdist.cells.hyperparameters import MOST, hyperparameters
from nbdist.cells.options import cell_options
from nbdist.cells.parse import parse_cell


def found(source: str, **options: object) -> dict[str, float | str]:
    request = parse_cell(source, cell_options(options), number=1, label=1, strategy="pjrt")
    return hyperparameters(request)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("lr = 0.1\nhidden: int = 64", {"lr": 0.1, "hidden": 64}),
        ("lr, decay = 1e-3, -1", {"lr": 1e-3, "decay": -1}),
        ("a = b = 2", {"a": 2, "b": 2}),
        ("lr = 4 * 1e-3 / 2", {"lr": 2e-3}),
        ("lr = 0.1\nlr = 0.2", {"lr": 0.2}),
        ("history = model.fit(x, y, epochs=3, batch_size=64)", {"epochs": 3, "batch_size": 64}),
        ("model.fit(x, y, epochs=n, verbose='auto')", {}),
        ("on = True\nname = 'a'\nx = y\ndef f():\n    z = 1\nif x:\n    w = 2", {}),
        ("x = 1e999\ny = 1 / 0\nz = " + "9" * 400 + " + 0.5", {}),
        ("!ls\nlr = 0.1", {}),
    ],
)
def test_numbers_at_the_top_level_are_found(source: str, expected: dict[str, float]) -> None:
    assert found(source) == expected


def test_given_options_are_found_by_flag() -> None:
    options = {"data": "train", "batch": 64, "scale_lr": True, "bucket": "8,16", "seed": 0}
    assert found("loss = batch", **options, prefetch="auto", fix="zero=3", checkpoint="x") == {
        "--seed": 0,
        "--data": "train",
        "--batch": 64,
        "--bucket": "8,16",
        "--scale-lr": "yes",
        "--prefetch": "auto",
    }


def test_options_that_do_not_change_the_training_are_none() -> None:
    options = {"name": "try 3", "watch": 0, "guard": 5, "hang_after": 9.0, "once": True}
    assert found("loss = batch", data="train", check=True, detach=True, **options) == {
        "--data": "train"
    }


def test_their_number_is_limited() -> None:
    assert len(found("\n".join(f"x{i} = {i}" for i in range(2 * MOST)))) == MOST
