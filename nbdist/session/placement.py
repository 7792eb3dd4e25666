"""Placement of arrays on all ranks, merged from the reports of the ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nbdist.errors import TransferError, UsageError
from nbdist.records import (
    OWN_RANK,
    Layout,
    MeshShape,
    PlacedArray,
    PlacedDevice,
    Placement,
    PlacementReport,
)
from nbdist.views import formatting
from nbdist.views.placement.picture import PlacementPicture
from nbdist.worker.inspection import placement as on_rank
from nbdist.worker.inspection.types import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Ranks = tuple[int, ...]

_MOST_LISTED = 5
"""The largest number of arrays that a note on differences between ranks lists."""


def locate(
    names: Sequence[str],
    ask: Callable[[Callable[..., Any], Any, Sequence[int]], list[Any]],
    hosts: Mapping[int, str],
) -> PlacementPicture:
    """Return the placement of the arrays behind names, from one call on each rank.

    Args:
        names: names in the user's namespace, with dots for attributes.
        ask: calls a function with an argument on ranks.
        hosts: the host of each rank.

    Raises:
        UsageError: a name is invalid, or contains no array on any rank.
        TransferError: a name exists on no rank.
    """
    _check(names)
    chosen = sorted(hosts)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank, payload in zip(chosen, ask(on_rank.describe, list(names), chosen), strict=True):
        groups[payload].append(rank)
    reports = {
        tuple(ranks): msgspec.msgpack.decode(payload, type=PlacementReport)
        for payload, ranks in groups.items()
    }
    return PlacementPicture(merge(names, reports, hosts))


def _check(names: Sequence[str]) -> None:
    wrong = [name for name in names if not all(word.isidentifier() for word in name.split("."))]
    if wrong or not names:
        fault = f"invalid name: {', '.join(map(repr, wrong))}" if wrong else "no name given"
        raise UsageError(f"{fault}: type names as in %dist_show params model.optimizer")


def merge(
    names: Sequence[str], reports: Mapping[Ranks, PlacementReport], hosts: Mapping[int, str]
) -> Placement:
    """Merge the reports of ranks. The keys of `reports` are the ranks with equal reports.

    Raises:
        UsageError: a name contains no array on any rank.
        TransferError: a name exists on no rank.
    """
    _refuse(names, reports)
    merged = _Merged(reports)
    arrays = tuple(merged.arrays())
    notes = [note for report in reports.values() for note in report.notes]
    return Placement(
        names=tuple(names),
        hosts=dict(hosts),
        devices=tuple(merged.devices.items),
        meshes=tuple(merged.meshes.items),
        layouts=tuple(merged.layouts.items),
        arrays=arrays,
        notes=(*_differences(names, reports, merged), *dict.fromkeys(notes)),
    )


def _refuse(names: Sequence[str], reports: Mapping[Ranks, PlacementReport]) -> None:
    answers = list(reports.values())
    lost = [name for name in names if all(name in report.missing for report in answers)]
    if lost:
        raise TransferError(
            f"no such name on the workers: {', '.join(lost)}; define it in a %%dist_run cell"
        )
    kinds = {name: kind for report in answers for name, kind in report.empty.items()}
    without = [
        f"`{name}` ({kinds[name]})"
        for name in names
        if all(name in report.missing or name in report.empty for report in answers)
    ]
    if without:
        raise UsageError(
            f"no arrays in {', '.join(without)}: name an array, a variable, a pytree of them, or a "
            "model with weights"
        )


def _differences(
    names: Sequence[str], reports: Mapping[Ranks, PlacementReport], merged: _Merged
) -> Iterator[str]:
    """Yield notes on differences between ranks: first for names, then for some arrays."""
    reported = set()
    for name in names:
        for ranks, report in reports.items():
            if name in report.missing or name in report.empty:
                reported.add(name)
                kind = report.empty.get(name)
                yield f"{name} {f'has type {kind}' if kind else 'does not exist'} on {_on(ranks)}"
    apart = [variants for path, variants in merged.apart.items() if path[0] not in reported]
    for variants in apart[:_MOST_LISTED]:
        lost = set(merged.everyone).difference(*(ranks for _, ranks in variants))
        texts = [f"{_described(variant)} on {_on(ranks)}" for variant, ranks in variants]
        texts += [f"not on {_on(sorted(lost))}"] if lost else []
        yield f"ranks differ in {variants[0][0].array.name}: {', '.join(texts)}"
    if len(apart) > _MOST_LISTED:
        yield f"ranks differ in {formatting.count(len(apart) - _MOST_LISTED, 'more array')}"


def _described(variant: _Variant) -> str:
    array, layout = variant.array, variant.layout
    return f"{array.dtype} of shape {array.shape}, {layout.spec or layout.kind},"


def _on(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {formatting.ranks(ranks)}"


@dataclass(frozen=True)
class _Variant:
    """An array on ranks with equal reports. Its layout is an index into their report."""

    array: PlacedArray
    report: PlacementReport
    ranks: Ranks

    @property
    def layout(self) -> Layout:
        return self.report.layouts[self.array.layout]


class _Merged:
    """Merged arrays of all ranks, with common tables of devices, meshes and layouts.

    Attributes:
        apart: variants of the arrays that differ between ranks, by path. It is complete after
            `arrays` has ended.
    """

    def __init__(self, reports: Mapping[Ranks, PlacementReport]) -> None:
        self._reports = reports
        self.everyone = tuple(sorted(rank for ranks in reports for rank in ranks))
        self._known: dict[tuple[int, int, Ranks], int] = {}
        self._meanings: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.apart: dict[tuple[str, ...], list[tuple[_Variant, Ranks]]] = {}
        self.devices: Table[PlacedDevice] = Table()
        self.meshes: Table[MeshShape] = Table()
        self.layouts: Table[Layout] = Table()

    def arrays(self) -> Iterator[PlacedArray]:
        """Yield the arrays in the order of the first ranks, then those of other ranks only."""
        by_path: dict[tuple[str, ...], list[_Variant]] = {}
        for ranks, report in sorted(self._reports.items()):
            for array in report.arrays:
                by_path.setdefault(array.path, []).append(_Variant(array, report, ranks))
        for path, variants in by_path.items():
            settled = self._settled(variants)
            if settled[0][1] != self.everyone:
                self.apart[path] = settled
            for variant, ranks in settled:
                array, who = variant.array, () if ranks == self.everyone else ranks
                layout = self._layout(variant, ranks)
                yield PlacedArray(path, array.shape, array.dtype, array.nbytes, layout, who)

    def _settled(self, variants: list[_Variant]) -> list[tuple[_Variant, Ranks]]:
        """Return one variant for all that are equal, with their ranks."""
        if len(variants) == 1:
            return [(variants[0], variants[0].ranks)]
        same: dict[tuple[Any, ...], tuple[_Variant, Ranks]] = {}
        for variant in variants:
            key = variant.array.shape, variant.array.dtype, self._meaning(variant)
            first, ranks = same.get(key, (variant, ()))
            same[key] = first, tuple(sorted((*ranks, *variant.ranks)))
        return list(same.values())

    def _meaning(self, variant: _Variant) -> tuple[Any, ...]:
        """Return a layout as a value without indices of a report.

        Layouts over only a rank's own devices are equal on all ranks.
        """
        key = id(variant.report), variant.array.layout
        if key not in self._meanings:
            layout, reported = variant.layout, variant.report.devices
            devices = tuple(reported[device] for device in layout.devices)
            self._meanings[key] = layout.kind, layout.spec, layout.parts, layout.blocks, devices
        return self._meanings[key]

    def _layout(self, variant: _Variant, ranks: Ranks) -> int:
        key = id(variant.report), variant.array.layout, ranks
        if key not in self._known:
            self._known[key] = self.layouts.index(self._whole(variant, ranks))
        return self._known[key]

    def _whole(self, variant: _Variant, ranks: Ranks) -> Layout:
        """Return the layout with `OWN_RANK` replaced by each rank that has the array."""
        reported, layout = variant.report.devices, variant.layout
        held = [
            (self._device(rank, reported[device].name), block)
            for rank in ranks
            for device, block in zip(layout.devices, layout.blocks, strict=True)
            if reported[device].rank in (OWN_RANK, rank)
        ]
        own = any(reported[device].rank == OWN_RANK for device in layout.devices)
        times = len(ranks) if own and layout.kind != "mirrored" else 1
        return msgspec.structs.replace(
            layout,
            devices=tuple(device for device, _ in held),
            blocks=tuple(block for _, block in held),
            mesh=self._mesh(variant, ranks[0]),
            owners=layout.owners * times,
        )

    def _mesh(self, variant: _Variant, own: int) -> int:
        """Return the index of the mesh. The first rank's mesh represents those of all ranks."""
        if variant.layout.mesh < 0:
            return -1
        mesh, reported = variant.report.meshes[variant.layout.mesh], variant.report.devices
        places = (reported[device] for device in mesh.devices)
        devices = tuple(self._device(own if p.rank == OWN_RANK else p.rank, p.name) for p in places)
        return self.meshes.index(msgspec.structs.replace(mesh, devices=devices))

    def _device(self, rank: int, name: str) -> int:
        return self.devices.index(PlacedDevice(rank, name))
