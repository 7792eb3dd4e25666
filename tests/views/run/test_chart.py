from __future__ import annotations

import numpy as np

from nbdist.views.run.chart import Mark, comparison_chart, line_chart, marks, mean_of_ranks
from tests.runs import recover


def test_the_mean_leaves_out_missing_values() -> None:
    nan, inf = np.nan, np.inf
    values = np.array([[1, 1, nan, inf, inf], [3, nan, nan, 1, -inf]])
    np.testing.assert_array_equal(mean_of_ranks(values), [2, 1, nan, inf, nan])


def test_invalid_numbers_are_drawn_without_a_warning() -> None:
    values = np.array([[1, np.nan, np.inf], [2, np.nan, -np.inf]])
    for picture in (line_chart(values, "loss", "a run"), comparison_chart({"a": values}, "loss")):
        assert picture.startswith(b"\x89PNG")


def test_names_that_look_like_formulas_are_not_interpreted() -> None:
    values = np.array([[1.0, 2.0]])
    assert line_chart(values, "$\\frac$", "last $x^{$ 2").startswith(b"\x89PNG")


def test_a_recovery_is_marked_with_its_text() -> None:
    values = np.linspace(2, 1, 100)[None]
    recovered = marks([50], [recover(73, 50, time_s=9.0)])
    words = "recovered: rank 1 died after step 73, resumed after step 50, 1.4 s lost"
    assert recovered == (Mark(50, words),)
    plain = line_chart(values, "loss", "a run")
    marked = line_chart(values, "loss", "a run", recovered)
    assert len({plain, marked, line_chart(values, "loss", "a run", recovered * 4)}) == 3


def test_a_chart_of_epochs_has_no_marks() -> None:
    assert marks([], [recover(73, 50, time_s=9.0)]) == ()
