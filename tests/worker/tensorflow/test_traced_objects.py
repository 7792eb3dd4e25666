"""Numbers and texts of Python that the traces of a step assign."""

from __future__ import annotations

import pytest

from nbdist.worker.tensorflow.traced_objects import TracedObjects


def objects(part: object, whole: object) -> tuple[TracedObjects, str]:
    """Return the values of a step on 4 of 8 rows, and the name of an unequal value."""
    found = TracedObjects()
    found.note("parts", {"n": part, "other": "equal"})
    found.of_whole = {"n": whole, "other": "equal"}
    return found, found.unequal("parts", 8, 2)


def test_number_of_rows_is_that_of_the_batch() -> None:
    found, name = objects(4, 8)
    assert not name
    assert (found.value("n", 8), found.value("n", 6)) == (8, 6)
    later = TracedObjects()
    later.continue_from(found)
    later.note("parts", {"n": 2})
    assert later.value("n", 4) == 4


@pytest.mark.parametrize(("part", "whole"), [(4, 9), (0.5, 0.25), ("4 rows", "8 rows")])
def test_other_values_that_depend_on_the_rows_are_named(part: object, whole: object) -> None:
    assert objects(part, whole)[1] == "n"


def test_values_of_the_trace_that_ran_last() -> None:
    found = TracedObjects()
    found.note("first", {"kind": "warm", "note": 1})
    found.note("second", {"kind": "main"})
    found.use("first")
    assert found.value("kind", 8) == "warm"
    found.use("second")
    assert found.value("kind", 8) == "main"
    with pytest.raises(KeyError):
        found.value("note", 8)
