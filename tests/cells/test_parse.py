from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.cells.parse import choose_strategy, parse_cell, parse_ranks
from nbdist.errors import UsageError
from nbdist.records import ClusterRequest, Host
from nbdist.utils import installed

if TYPE_CHECKING:
    from nbdist.records import CellRequest


def parse(source: str, header: str = "") -> CellRequest:
    return parse_cell(source, number=1, label=1, strategy=None, header=header)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", (0,)), ("0,2:4", (0, 2, 3)), (":2", (0, 1)), ("2:", (2, 3, 4)), ("3,1,1", (1, 3))],
)
def test_ranks_are_numbers_and_slices(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, 5) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "no rank 7"),
        ("-1", "no rank -1"),
        ("0:9", "no rank 5, 6, 7, 8"),
        ("x", "'x' is neither a rank"),
        ("0:1:2", "'0:1:2' is neither a rank"),
        ("", "'' is neither a rank"),
        ("3:1", "it contains no rank"),
        ("a,9", "'a' is neither a rank nor a slice; no rank 9"),
    ],
)
def test_invalid_ranks_are_reported_with_the_valid_ones(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_ranks(text, 5)
    assert message in str(error.value)
    assert "use ranks from 0 to 4" in str(error.value)


@given(st.sets(st.integers(0, 30), min_size=1))
def test_every_set_of_ranks_is_parsed(ranks: set[int]) -> None:
    assert parse_ranks(",".join(map(str, ranks)), 31) == tuple(sorted(ranks))


@pytest.mark.parametrize(
    ("source", "awaits"),
    [
        ("x = 1", False),
        ("await f()", True),
        ("async def f():\n    await g()", False),
        ("[x async for x in y]", True),
        ("!ls\n%time x = 1", False),
    ],
)
def test_top_level_await_is_detected(source: str, awaits: bool) -> None:
    assert parse(source).awaits is awaits


def test_a_syntax_error_is_reported_with_its_line_in_the_cell() -> None:
    with pytest.raises(UsageError) as error:
        parse("x = 1\ny = = 2\n", header="%%dist_run")
    assert "In the cell, line 3" in str(error.value)
    assert "y = = 2" in str(error.value)


@pytest.mark.parametrize("source", ["", "  \n\t\n"])
def test_an_empty_cell_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match=r"^the cell is empty: write the code for the workers"):
        parse(source)


def test_a_null_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="null bytes"):
        parse("x = 1\0")


@pytest.mark.parametrize(
    ("python", "remedy"),
    [
        ((3, 13), "run %dist_stop, then %dist_start 1 hosts --framework both"),
        ((3, 14), "TensorFlow has no version for Python 3.14: use JAX"),
    ],
)
def test_refused_strategy_names_what_helps_on_this_python(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], remedy: str
) -> None:
    monkeypatch.setattr(installed, "_PYTHON", python)
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda _: None)
    cluster = ClusterRequest(hosts=(Host(),), frameworks=("jax",))
    with pytest.raises(UsageError) as refused:
        choose_strategy("mirrored", cluster)
    assert "--strategy mirrored needs tensorflow, and the workers run jax: " in str(refused.value)
    assert remedy in str(refused.value)


def test_warnings_about_the_syntax_of_a_cell_are_left_to_the_workers() -> None:
    """Warnings are errors here. In a notebook, they would be printed once more."""
    assert not parse("x = 1\nx is 1").awaits
