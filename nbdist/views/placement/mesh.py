"""Picture of a mesh of up to four axes: one cell per device, in the colour of its host.

The last axis goes across and the one before it down. Two more axes arrange such grids across and
down. If all devices are on one host, the colours are those of the ranks.
"""

from __future__ import annotations

import itertools
from html import escape
from typing import TYPE_CHECKING

from nbdist.views import formatting, html
from nbdist.views.placement import text as words
from nbdist.views.placement.blocks import cell, colour_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.records import MeshShape, Placement

MOST_AXES = 4
MOST_DEVICES = 512
"""Limit for the devices of a picture. A cell takes about 100 bytes."""

_DIRECTIONS = ("blocks down", "blocks across", "down", "across")
_CELL = "padding:0 1px 0 0;background:none;text-align:left"
_BLOCK = "padding:2px 14px 6px 0;background:none;text-align:left;vertical-align:top"


def picture(placement: Placement, mesh: MeshShape) -> str:
    """Return the picture as HTML.

    Empty for a mesh on one device, with more than `MOST_AXES` axes of several devices, or with more
    than `MOST_DEVICES` devices, and for a plan without hosts.
    """
    axes = [index for index, size in enumerate(mesh.sizes) if size > 1]
    if not (axes and placement.hosts and len(axes) <= MOST_AXES):
        return ""
    if len(mesh.devices) > MOST_DEVICES:
        return ""
    return _Picture(placement, mesh, axes).html()


class _Picture:
    """Picture of one mesh, whose drawn axes are `axes`."""

    def __init__(self, placement: Placement, mesh: MeshShape, axes: Sequence[int]) -> None:
        self._placement = placement
        self._mesh = mesh
        self._axes = axes
        self._sizes = [mesh.sizes[axis] for axis in axes]
        self._group_of = self._groups()
        groups = dict.fromkeys(self._group_of.values())
        self._colour_of = {group: colour_of(i) for i, group in enumerate(groups)}

    def html(self) -> str:
        padded = [1] * (MOST_AXES - len(self._sizes)) + self._sizes
        rows = [
            [self._block(padded, down, across) for across in range(padded[1])]
            for down in range(padded[0])
        ]
        return html.faint(self._legend_of_axes()) + _table(rows, _BLOCK) + self._legend_of_groups()

    def _groups(self) -> Mapping[int, str]:
        """Return the name of the group of each device: its host, or its rank on a single host."""
        rank_of = {one: self._placement.devices[one].rank for one in self._mesh.devices}
        hosts = {one: self._placement.hosts[rank] for one, rank in rank_of.items()}
        if len(set(hosts.values())) > 1:
            return hosts
        return {one: f"rank {rank}" for one, rank in rank_of.items()}

    def _legend_of_axes(self) -> str:
        names = [f"{self._mesh.axes[axis]} {self._mesh.sizes[axis]}" for axis in self._axes]
        directions = _DIRECTIONS[-len(names) :]
        pairs = zip(reversed(names), reversed(directions), strict=True)
        return f"mesh: {', '.join(f'{name} {direction}' for name, direction in pairs)}"

    def _legend_of_groups(self) -> str:
        counts = {
            group: sum(1 for one in self._group_of.values() if one == group)
            for group in self._colour_of
        }
        entries = [
            f"{cell(self._colour_of[group], '', ' ')} {escape(group)} "
            f"({formatting.count(count, 'device')})"
            for group, count in counts.items()
        ]
        return f'<div style="margin-bottom:6px">{" &nbsp; ".join(entries)}</div>'

    def _block(self, sizes: Sequence[int], block_down: int, block_across: int) -> str:
        rows = [
            [
                self._cell(((block_down * sizes[1] + block_across) * sizes[2] + down), across)
                for across in range(sizes[3])
            ]
            for down in range(sizes[2])
        ]
        return _table(rows, _CELL)

    def _cell(self, row: int, across: int) -> str:
        index = row * self._sizes[-1] + across
        device = self._mesh.devices[index]
        place = ", ".join(
            f"{self._mesh.axes[axis]} {at}"
            for axis, at in zip(self._axes, self._position(index), strict=True)
        )
        tip = f"{place}: {words.device(self._placement, device)}"
        return cell(self._colour_of[self._group_of[device]], tip, str(device))

    def _position(self, index: int) -> Sequence[int]:
        """Return the position of a device along the drawn axes."""
        ranges = [range(size) for size in self._sizes]
        return next(itertools.islice(itertools.product(*ranges), index, None))


def _table(rows: Sequence[Sequence[str]], style: str) -> str:
    body = "".join(
        "<tr>" + "".join(f'<td style="{style}">{inner}</td>' for inner in row) + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse;margin:2px 0;border:none">{body}</table>'
