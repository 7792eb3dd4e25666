from __future__ import annotations

import itertools
from base64 import b64encode
from types import SimpleNamespace

import matplotlib.legend
import numpy as np
import pytest

from nbdist.settings import Settings
from nbdist.views.run.chart import (
    Curve,
    Mark,
    comparison_chart,
    line_chart,
    marks,
    mean_of_ranks,
    run_bundle,
)
from tests.runs import recover

MOST_BYTES = Settings().picture_bytes


def test_the_mean_leaves_out_missing_values() -> None:
    nan, inf = np.nan, np.inf
    values = np.array([[1, 1, nan, inf, inf], [3, nan, nan, 1, -inf]])
    np.testing.assert_array_equal(mean_of_ranks(values), [2, 1, nan, inf, nan])


def curve(values: np.ndarray, name: str = "loss", axis: str = "step") -> Curve:
    return Curve(name, axis, np.arange(1, values.shape[1] + 1), values)


def test_invalid_numbers_are_drawn_without_a_warning() -> None:
    values = np.array([[1, np.nan, np.inf], [2, np.nan, -np.inf]])
    compared = comparison_chart({"a": values}, "loss", MOST_BYTES)
    for picture in (line_chart(curve(values), (), MOST_BYTES), compared):
        assert picture.startswith(b"\x89PNG")


def test_names_that_look_like_formulas_are_not_interpreted() -> None:
    values = np.array([[1.0, 2.0]])
    assert line_chart(curve(values, "$\\frac$"), (), MOST_BYTES).startswith(b"\x89PNG")


def test_a_recovery_is_marked_with_its_text() -> None:
    values = np.linspace(2, 1, 100)[None]
    recovered = marks([recover(73, 50, time_s=9.0)])
    words = "recovered: rank 1 died after step 73, resumed after step 50, 1.4 s lost"
    assert recovered == (Mark(50, words),)
    plain, marked, often = (
        line_chart(curve(values), shown, MOST_BYTES) for shown in ((), recovered, recovered * 4)
    )
    assert len({plain, marked, often}) == 3


def test_a_chart_of_epochs_has_no_marks() -> None:
    epochs = curve(np.array([[1.0, 2.0]]), axis="epoch")
    recovered = marks([recover(73, 50, time_s=9.0)])
    assert run_bundle(epochs, "a run", recovered, MOST_BYTES) == run_bundle(
        epochs, "a run", (), MOST_BYTES
    )


def test_a_slow_machine_draws_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count(0, 60).__next__)
    monkeypatch.setattr(matplotlib.legend, "time", clock)
    values = np.random.default_rng(1).standard_normal((2, 2000))
    assert line_chart(curve(values), (), MOST_BYTES)
    assert comparison_chart({"a": values, "b": values}, "loss", MOST_BYTES)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_picture_of_noise_is_small(ranks: int) -> None:
    noise = np.random.default_rng(1).standard_normal((ranks, 2000))
    png = line_chart(curve(noise), (), MOST_BYTES)
    assert 0 < len(b64encode(png)) <= MOST_BYTES


def test_a_picture_has_alternative_text_and_the_text_of_the_run() -> None:
    shown = run_bundle(curve(np.array([[2.0, 1.0], [4.0, 2.0]])), "run <1>", (), MOST_BYTES)
    assert shown["text/plain"] == "run <1>"
    page = str(shown["text/html"])
    assert 'alt="Chart of loss of 2 ranks, step 1 to 2, mean from 3 to 1.5"' in page
    assert "run &lt;1&gt;" in page


def test_a_run_without_a_picture_is_text() -> None:
    two = curve(np.array([[2.0, 1.0]]))
    one = curve(np.array([[2.0]]))
    for shown, most_bytes in ((None, MOST_BYTES), (one, MOST_BYTES), (two, 0)):
        assert run_bundle(shown, "a run", (), most_bytes) == {"text/plain": "a run"}
