"""Blocks and copies of a layout."""

from __future__ import annotations

import pytest

from nbdist.records import Layout, PlacedArray


@pytest.mark.parametrize(
    ("devices", "parts", "owners", "pieces", "copies"),
    [
        (6, (3, 2), 1, 6, 1),
        (6, (3, 1), 1, 3, 2),
        (6, (), 1, 1, 6),
        (6, (), 3, 1, 2),
        (0, (), 1, 1, 1),
        (2, (4,), 1, 4, 1),  # some devices are gone
    ],
)
def test_devices_hold_blocks_and_copies(
    devices: int, parts: tuple[int, ...], owners: int, pieces: int, copies: int
) -> None:
    layout = Layout(kind="sharded", devices=tuple(range(devices)), parts=parts, owners=owners)
    assert (layout.pieces, layout.copies) == (pieces, copies)


def test_the_name_of_an_array_is_its_path() -> None:
    array = PlacedArray(("p", "['w']", ".kernel"), (), "float32", 4, 0)
    assert array.name == "p['w'].kernel"
