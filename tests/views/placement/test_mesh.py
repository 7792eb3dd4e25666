"""Pictures of meshes."""

from __future__ import annotations

import math
import re

from nbdist.records import MeshShape, PlacedDevice, Placement
from nbdist.views.placement.mesh import picture


def placed(axes: dict[str, int], per_rank: int = 2, hosts: int = 2) -> tuple[Placement, MeshShape]:
    """Return a mesh over ranks with `per_rank` devices each, that are on `hosts` in turn."""
    count = math.prod(axes.values())
    devices = tuple(PlacedDevice(i // per_rank, f"gpu:{i % per_rank}") for i in range(count))
    ranks = range(-(-count // per_rank))
    mesh = MeshShape(axes=tuple(axes), sizes=tuple(axes.values()), devices=tuple(range(count)))
    placement = Placement(
        names=("x",),
        hosts={rank: f"host{rank % hosts}" for rank in ranks},
        devices=devices,
        meshes=(mesh,),
        layouts=(),
        arrays=(),
    )
    return placement, mesh


def grid(page: str) -> list[list[list[str]]]:
    """Return the numbers in each innermost table."""
    tables = re.findall(r"<table[^>]*>((?:(?!<table).)*?)</table>", page)
    rows = [re.findall(r"<tr>(.*?)</tr>", table) for table in tables]
    return [[re.findall(r">(\d+)</b>", row) for row in table] for table in rows]


def test_one_axis_is_a_row() -> None:
    assert grid(picture(*placed({"data": 4}))) == [[["0", "1", "2", "3"]]]


def test_two_axes_are_a_grid_with_the_hosts() -> None:
    page = picture(*placed({"data": 2, "model": 2}))
    assert grid(page) == [[["0", "1"], ["2", "3"]]]
    assert "mesh: model 2 across, data 2 down" in page
    assert 'title="data 1, model 0: 1@host1 gpu:0"' in page
    assert "host0 (2 devices)" in page
    colours = re.findall(r"background:(#\w+);[^>]*>\d", page)
    assert colours[0] == colours[1] != colours[2] == colours[3]


def test_four_axes_are_a_grid_of_grids() -> None:
    axes = {"stage": 2, "expert": 3, "data": 2, "model": 2}
    page = picture(*placed(axes))
    blocks = grid(page)
    assert blocks[0] == [["0", "1"], ["2", "3"]]
    assert blocks[3] == [["12", "13"], ["14", "15"]]
    assert len(blocks) == 6
    assert "model 2 across, data 2 down, expert 3 blocks across, stage 2 blocks down" in page
    assert 'title="stage 1, expert 2, data 1, model 1: 11@host1 gpu:1"' in page


def test_devices_of_one_host_have_the_colours_of_their_ranks() -> None:
    page = picture(*placed({"data": 4}, hosts=1))
    assert "rank 0 (2 devices)" in page
    assert "rank 1 (2 devices)" in page


def test_axes_of_one_device_are_left_out() -> None:
    page = picture(*placed({"a": 1, "data": 2, "b": 1, "model": 2, "c": 1}))
    assert grid(page) == [[["0", "1"], ["2", "3"]]]
    assert "data 0, model 1:" in page


def test_meshes_without_a_picture() -> None:
    assert picture(*placed({"data": 1})) == ""
    assert picture(*placed(dict.fromkeys("abcde", 2))) == ""
    assert picture(*placed({"data": 1024})) == ""
    placement, mesh = placed({"data": 2})
    plan = Placement(
        names=(), hosts={}, devices=placement.devices, meshes=(mesh,), layouts=(), arrays=()
    )
    assert picture(plan, mesh) == ""
