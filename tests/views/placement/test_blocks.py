"""Pictures of sharded arrays."""

from __future__ import annotations

import re

import pytest

from nbdist.records import Layout, PlacedArray, PlacedDevice, Placement
from nbdist.views.placement import blocks as module
from nbdist.views.placement.blocks import Blocks, chip


def sharded(*parts: int, devices: int = 0) -> Layout:
    """Return a layout whose devices hold the blocks in order, several times if there are more."""
    count = 1
    for number in parts:
        count *= number
    every = tuple(range(devices or count))
    return Layout(
        kind="sharded", devices=every, blocks=tuple(d % count for d in every), parts=parts
    )


def placement(*layouts: Layout) -> Placement:
    devices = max((max(layout.devices, default=0) for layout in layouts), default=0) + 1
    return Placement(
        names=(),
        hosts={},
        devices=tuple(PlacedDevice(number, str(number)) for number in range(devices)),
        meshes=(),
        layouts=layouts,
        arrays=(),
    )


def array(*shape: int, layout: int = 0) -> PlacedArray:
    return PlacedArray(("x",), shape, "float32", 96, layout)


def picture(layout: Layout, *shape: int) -> str:
    return Blocks(placement(layout)).html(array(*shape))


def cells(picture: str) -> list[list[str]]:
    """Return the text of each cell, by row."""
    return [re.findall(r">([^<>]*)</b>", line) for line in picture.split("<br>")]


def tips(picture: str) -> list[str]:
    return re.findall(r'title="([^"]*)"', picture)


@pytest.mark.parametrize(
    ("layout", "shape", "rows"),
    [
        (sharded(3), (6,), [["0", "1", "2"]]),
        (sharded(2, devices=4), (6,), [["0,2", "1,3"]]),
        (sharded(2, 3), (6, 6), [["0", "1", "2"], ["3", "4", "5"]]),
        (sharded(2, 1), (6, 6), [["0"], ["1"]]),
        (sharded(1, 2), (6, 6), [["0", "1"]]),
        (sharded(1, 1, devices=2), (6, 6), [["0-1"]]),
        (sharded(1, 2, 2), (6, 6, 6), [["0", "1"], ["2", "3"]]),
        (sharded(2, 2, 2), (6, 6, 6), [["0-1", "2-3"], ["4-5", "6-7"]]),
        (Layout(kind="replicated", devices=(0, 1), blocks=(0, 0)), (), [["0-1"]]),
    ],
)
def test_cells_contain_the_devices_of_a_block(
    layout: Layout, shape: tuple[int, ...], rows: list[list[str]]
) -> None:
    assert cells(picture(layout, *shape)) == rows


def test_tool_tips_contain_slices_and_devices() -> None:
    drawn = picture(sharded(2, devices=4), 6)
    assert tips(drawn) == ["0:3 on devices 0,2", "3:6 on devices 1,3"]
    both = tips(picture(sharded(2, 2, 2), 6, 6, 6))
    assert both[0] == "[0:3, 0:3, 0:3]; [0:3, 0:3, 3:6] on devices 0-1"


def test_long_numbers_are_in_tool_tips_only() -> None:
    assert cells(picture(sharded(12), 12))[0] == ["&nbsp;"] * 12
    assert cells(picture(sharded(7), 14))[0] == list("0123456")


def test_a_block_without_a_device_is_grey() -> None:
    layout = Layout(kind="sharded", devices=(1,), blocks=(1,), parts=(3,))
    drawn = picture(layout, 6)
    assert cells(drawn) == [["-", "1", "-"]]
    assert tips(drawn).count("on no remaining device") == 2


def test_large_pictures_are_truncated() -> None:
    rows = cells(picture(sharded(9, 13), 9, 13))
    assert [len(row) for row in rows] == [13] * 8 + [1]
    assert {row[-1] for row in rows} == {"…"}
    fits = cells(picture(sharded(8, 12), 8, 12))
    assert [len(row) for row in fits] == [12] * 8


def test_the_label_describes_the_layout() -> None:
    assert 'aria-label="dim 0 in 2; on 4 devices"' in picture(sharded(2, devices=4), 6)
    assert 'aria-label="not sharded, on 1 device"' in picture(sharded(1), 6)


def test_colours_repeat_after_seven_devices() -> None:
    assert chip(0).split(";")[0] == chip(7).split(";")[0]
    assert chip(0).split(";")[0] != chip(6).split(";")[0]
    assert ">7<" in chip(7)


def test_a_full_page_draws_no_more_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPEATED_CELLS", 4)
    monkeypatch.setattr(module, "_ALL_CELLS", 6)
    found = Blocks(placement(sharded(2), sharded(1, 2), sharded(2, 1), sharded(1, 1, 2)))
    first = [bool(found.html(array(6))) for _ in range(3)]
    assert first == [True, True, False]  # the page is half full
    assert found.html(array(6, 6, layout=1))
    assert found.left_out == 0
    assert not found.html(array(6, 6, layout=2))
    assert not found.html(array(6))
    assert found.left_out == 1
