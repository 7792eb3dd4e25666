"""Conversion of reported values to histograms, images, tables and texts."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image as Pillow

from nbdist.errors import UsageError
from nbdist.records import DataTable, Histogram, Image, Text
from nbdist.worker.runtime import media

if TYPE_CHECKING:
    from nbdist.records import AnyMedia


def content(kind: str, value: Any) -> AnyMedia:
    return media.converted(kind, "x", value)[0]


def remark(kind: str, value: Any) -> str:
    return media.converted(kind, "x", value)[1]


def pixels(image: AnyMedia) -> np.ndarray:
    assert isinstance(image, Image)
    return np.asarray(Pillow.open(io.BytesIO(image.png)))


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        ("hist", [1.0, 2.0], ["hist"]),
        ("hist", {"w": [1.0], "b": [2.0]}, ["w", "b"]),
        ("hist", {"dense": {"w": [1.0], "b": [2.0]}, "out": [3.0]}, ["dense/w", "dense/b", "out"]),
        ("text", "a", ["text"]),
        ("table", {"a": [1, 2], "b": [3, 4]}, ["table"]),
        ("table", [{"a": 1}], ["table"]),
        ("table", {"errors": [{"a": 1}], "sizes": {"n": [1]}}, ["errors", "sizes"]),
        ("table", {"errors": pd.DataFrame({"a": [1]})}, ["errors"]),
    ],
)
def test_values_have_the_names_of_the_user(kind: str, given: Any, names: list[str]) -> None:
    assert [name for name, _ in media.named(kind, given)] == names


def test_a_histogram_counts_finite_values() -> None:
    values = np.random.default_rng(0).normal(2, 3, (100, 50)).astype(np.float32)
    found = content("hist", values)
    assert isinstance(found, Histogram)
    counts, edges = np.histogram(values.astype(float), 64)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.edges, edges)
    assert found.size == 5000
    assert found.mean == pytest.approx(values.mean(), rel=1e-5)
    assert found.deviation == pytest.approx(values.std(), rel=1e-5)


def test_a_histogram_separates_values_that_are_not_finite() -> None:
    found = content("hist", [1.0, np.nan, 2.0, np.inf])
    assert isinstance(found, Histogram)
    assert (found.size, found.not_finite, sum(found.counts)) == (2, 2, 2)


def test_equal_values_have_a_bin() -> None:
    for value in (0.0, 1e-12, -3.0, 1e20):
        found = content("hist", [value] * 3)
        assert isinstance(found, Histogram)
        assert sum(found.counts) == 3
        assert np.all(np.diff(found.edges) > 0)


def test_a_large_array_is_sampled() -> None:
    values = np.zeros(media.MOST_VALUES + 1, np.int8)
    found = content("hist", values)
    assert isinstance(found, Histogram)
    assert found.size == media.MOST_VALUES // 2 + 1
    assert remark("hist", values) == "hist 'x': counts one in 2 of 4,194,305 values"


def test_an_image_keeps_its_pixels() -> None:
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(pixels(content("image", colours)), colours)
    grey = np.linspace(0, 1, 35, dtype=np.float32).reshape(5, 7)
    np.testing.assert_array_equal(pixels(content("image", grey)), np.rint(grey * 255))
    np.testing.assert_array_equal(pixels(content("image", grey[..., None])), np.rint(grey * 255))
    np.testing.assert_array_equal(pixels(content("image", grey > 0.5)), 255 * (grey > 0.5))


def test_a_large_image_is_scaled_down() -> None:
    large = np.zeros((3000, 1500), np.uint8)
    found = content("image", large)
    assert isinstance(found, Image)
    assert (found.width, found.height) == (512, 1024)
    assert remark("image", large) == "image 'x': scaled down from 1500 x 3000 pixels"


def test_a_table_has_columns_of_any_form() -> None:
    expected = (("a", 1.5), ("b", 2.5))
    forms: list[Any] = [
        [{"name": "a", "loss": 1.5}, {"name": "b", "loss": np.float32(2.5)}],
        {"name": ["a", "b"], "loss": np.array([1.5, 2.5])},
        pd.DataFrame({"name": ["a", "b"], "loss": [1.5, 2.5]}),
    ]
    for form in forms:
        found = content("table", form)
        assert isinstance(found, DataTable)
        assert found.columns == ("name", "loss")
        assert found.rows == expected


def test_a_missing_cell_of_a_dict_is_empty() -> None:
    found = content("table", [{"a": 1}, {"b": 2}])
    assert isinstance(found, DataTable)
    assert found.rows == ((1, None), (None, 2))


def test_a_long_table_is_cut() -> None:
    long = {"a": range(media.MOST_ROWS + 5)}
    found = content("table", long)
    assert isinstance(found, DataTable)
    assert (len(found.rows), found.left_out) == (media.MOST_ROWS, 5)
    assert remark("table", long) == "table 'x': shows the first 1000 of 1,005 rows"


def test_a_long_text_is_cut() -> None:
    found = content("text", "a" * (media.MOST_CHARACTERS + 1))
    assert found == Text(text="a" * media.MOST_CHARACTERS)
    assert remark("text", "a" * 100_001).endswith("shows the first 100,000 of 100,001 characters")


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("hist", [], r"hist 'x': the array of shape (0,) is empty"),
        ("hist", [np.nan, np.inf], "hist 'x': all values are NaN or infinite"),
        ("hist", ["a"], "hist 'x': values of type <U1 cannot be counted: report numbers"),
        ("hist", [[1.0], [1.0, 2.0]], "hist 'x': list cannot be read as an array"),
        ("image", np.full((2, 2), np.nan), "image 'x': some pixels are NaN or infinite"),
        ("image", np.zeros(4), "image 'x': shape (4,) is not (height, width[, 1, 3 or 4])"),
        ("image", np.zeros((8, 4, 4, 1)), "report one image of the batch, as in images[0]"),
        ("image", np.zeros((4, 4, 2)), "image 'x': shape (4, 4, 2) is not (height"),
        ("image", np.zeros((0, 4)), "image 'x': shape (0, 4) is not"),
        ("image", np.full((2, 2), 3.0), "floats from 3 to 3: scale them to 0 to 1, or use uint8"),
        ("image", np.zeros((2, 2), int), "pixels of type int64: use uint8, or floats from 0 to 1"),
        (
            "table",
            {"a": [1, 2], "b": [1]},
            "column 'a' has 2 rows and column 'b' has 1: use columns of the same length",
        ),
        ("table", {"a": 1}, "table 'x': column 'a' is int: use a list of cells"),
        ("table", {}, "table 'x': it has no columns"),
        ("table", 3, "int is not a list of dicts, a dict of columns or a data frame"),
        ("table", {f"c{i}": [1] for i in range(101)}, "it has 101 columns, and at most 100"),
        ("text", 3, r"text 'x': int is not a text: use str(...)"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(kind: str, value: Any, error: str) -> None:
    with pytest.raises(UsageError) as refused:
        media.converted(kind, "x", value)
    assert error in str(refused.value)
    assert str(refused.value).startswith(f"{kind} 'x': ")
    assert "\n" not in str(refused.value)
