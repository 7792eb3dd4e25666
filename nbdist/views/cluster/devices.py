"""Devices of a cluster: their properties, measured performance and links."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.records import DeviceState
from nbdist.views import formatting, html
from nbdist.views.result_table import ResultTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from nbdist.records import Bench, Crossing, Link, Product, Topology


_DEVICES = ("rank", "host", "devices", "kind", "memory", "used", "plugin")
_LINKS = ("links", "members", "latency", "one way, if all send", "source")
_TRANSFERS = ("transfers", "latency", "one way, if all do")
_WAYS = ("product", "each matrix", "{home}", "{there}, with transfers", "faster")
_ROOFLINE = "operations per second of matrix products, by operations per byte moved"
_UNKNOWN = "-"
_MEASURES = "run %dist_devices --bench to measure the devices: later plans use the results"
_MEASURES_OWN = "run %dist_devices --bench or nbdist.devices(bench=True) to measure the devices"
_UNREPORTED = "the runtime of these devices does not report how much of their memory is used"

Table = tuple[tuple[str, ...], list[list[str]], tuple[int, ...]]


@dataclass(frozen=True, repr=False)
class DevicesPicture(ResultTable[DeviceState]):
    """Devices as `%dist_devices` shows them: equal devices of a host in one line.

    The key of a device is its name, or `rank/name` if devices of several ranks have one name.

    Attributes:
        devices: devices of all processes.
        topology: hardware for which steps are planned. None without JAX or if a device is unknown.
        fault: reason for a missing topology if JAX is available.
        bench: measurements, None if there are none.
        of_cluster: True for devices of the workers, False for those of this process.
    """

    devices: tuple[DeviceState, ...]
    topology: Topology | None
    fault: str
    bench: Bench | None
    of_cluster: bool = True

    @property
    def rows(self) -> tuple[DeviceState, ...]:
        return self.devices

    def _key(self, index: int, row: DeviceState) -> str:
        is_unique = sum(device.name == row.name for device in self.devices) == 1
        return row.name if is_unique else f"{row.process}/{row.name}"

    def _columns(self) -> list[str]:
        return list(DeviceState.__struct_fields__)

    def html(self) -> str:
        tables = (html.table(*table) for table in self._tables())
        picture = html.picture(roofline(self.bench), _ROOFLINE) if self.bench else ""
        return html.box(self._title, *tables, picture, *map(html.faint, self._notes()))

    def lines(self) -> list[str]:
        tables = [line for table in self._tables() for line in ["", *html.text_table(*table)]]
        return [self._title, *tables[1:], "", *self._notes()]

    @property
    def _title(self) -> str:
        hosts = len({device.host for device in self.devices})
        processes = len({device.process for device in self.devices})
        of = f" of {formatting.count(processes, 'worker')}" if self.of_cluster else ""
        places = formatting.count(hosts, "host")
        return f"nbdist: {formatting.count(len(self.devices), 'device')}{of} on {places}"

    def _tables(self) -> Iterator[Table]:
        yield _DEVICES, list(_groups(self.devices)), (0, 4, 5)
        links = list(self._links())
        if links:
            yield _LINKS, links, (1, 2, 3)
        if self.bench is not None:
            yield _products(self.bench)
            if self.bench.transfers:
                yield (
                    _TRANSFERS,
                    [_transfer(*item) for item in self.bench.transfers.items()],
                    (1, 2),
                )
            if self.bench.crossing is not None:
                yield _advice(self.bench.crossing)

    def _links(self) -> Iterator[list[str]]:
        measured = self.bench.links if self.bench is not None else {}
        for level in self.topology.levels if self.topology is not None else ():
            if level.size > 1:
                link = measured.get(level.name, level)
                yield [
                    level.name,
                    str(level.size),
                    formatting.duration(link.latency_s),
                    formatting.rate(link.bytes_per_s),
                    "measured" if level.name in measured else "from tables",
                ]

    def _notes(self) -> Iterator[str]:
        if self.bench is not None:
            yield f"copies within a device's memory: {formatting.rate(self.bench.bytes_per_s)}"
            yield f"the smallest program takes {formatting.duration(self.bench.dispatch_s)}"
            yield from _crossed(self.bench.crossing)
        if self.topology is not None:
            yield f"{self.topology.chip.name}: {self.topology.chip.source}"
            yield from self.topology.assumed
        elif self.fault:
            yield self.fault
        if all(device.used_bytes is None for device in self.devices):
            yield _UNREPORTED
        elif any(device.platform == "cpu" for device in self.devices):
            yield "CPU devices share the memory of their host"
        if self.bench is None and (self.topology is not None or self.fault):
            yield _MEASURES if self.of_cluster else _MEASURES_OWN


def _groups(devices: Sequence[DeviceState]) -> Iterator[list[str]]:
    """Yield a row for the equal devices of a host."""
    groups: dict[tuple[object, ...], list[DeviceState]] = {}
    for device in devices:
        facts = device.host, device.kind, device.memory_bytes, device.plugin
        groups.setdefault(facts, []).append(device)
    for group in groups.values():
        first = group[0]
        yield [
            formatting.ranks({device.process for device in group}),
            first.host,
            _names(group),
            first.kind,
            formatting.size(first.memory_bytes) if first.memory_bytes else _UNKNOWN,
            _used(group),
            first.plugin,
        ]


def _names(group: Sequence[DeviceState]) -> str:
    """Format names of devices as ranges: `gpu:0-7`. Ranks can have devices of the same name."""
    numbers: dict[str, list[int]] = {}
    others = []
    for name in dict.fromkeys(device.name for device in group):
        platform, _, number = name.rpartition(":")
        if platform and number.isdecimal():
            numbers.setdefault(platform, []).append(int(number))
        else:
            others.append(name)
    ranges = [f"{platform}:{formatting.ranks(found)}" for platform, found in numbers.items()]
    return ", ".join([*ranges, *others])


def _used(group: Sequence[DeviceState]) -> str:
    used = sorted(device.used_bytes for device in group if device.used_bytes is not None)
    if not used:
        return _UNKNOWN
    least, most = formatting.size(used[0]), formatting.size(used[-1])
    return least if least == most else f"{least} to {most}"


def _transfer(name: str, link: Link) -> list[str]:
    return [name, formatting.duration(link.latency_s), formatting.rate(link.bytes_per_s)]


def _advice(crossing: Crossing) -> Table:
    rows = [
        [
            f"{way.size:,} x {way.size:,}",
            formatting.size(4 * way.size**2),
            formatting.duration(way.home_s),
            formatting.duration(way.there_s),
            crossing.there if way.pays else crossing.home,
        ]
        for way in crossing.ways
    ]
    header = tuple(word.format(home=crossing.home, there=crossing.there) for word in _WAYS)
    return header, rows, (1, 2, 3)


def _crossed(crossing: Crossing | None) -> Iterator[str]:
    """Yield the advice on transfers as text."""
    if crossing is None:
        return
    if crossing.size is None:
        yield f"no product was faster on {crossing.there}: keep data on {crossing.home}"
    else:
        yield (
            f"from {formatting.size(crossing.nbytes)} on (products of {crossing.size:,.0f} x "
            f"{crossing.size:,.0f}) {crossing.there} is faster, transfers included: keep "
            f"smaller arrays on {crossing.home}"
        )


def _products(bench: Bench) -> Table:
    sizes = sorted({product.size for product in bench.products})
    types = dict.fromkeys(product.dtype for product in bench.products)
    reached = {(p.dtype, p.size): formatting.flops(p.flops) for p in bench.products}
    rows = [[dtype, *(reached.get((dtype, size), "") for size in sizes)] for dtype in types]
    header = ("products", *(f"{size:,} x {size:,}" for size in sizes))
    return header, rows, tuple(range(1, len(header)))


_INCHES = 7.0, 3.6
_DPI = 160
_MEMORY_BOUND = 30
"""Ratio of the lowest drawn intensity to the start of the slope: most of a step is memory-bound."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}


def intensity(product: Product) -> float:
    """Return operations per byte: 2 n^3, for three matrices of n^2 elements that move once."""
    return 2 * product.size / (3 * _BYTES[product.dtype])


def roofline(bench: Bench) -> bytes:
    """Draw products by intensity, below the roof of their type and the slope of the memory.

    The roofs are the best measured values, not the maker's peaks.

    Returns:
        A PNG.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend, no state
    from matplotlib.ticker import EngFormatter, NullFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    by_type: dict[str, list[Product]] = {}
    for product in bench.products:
        by_type.setdefault(product.dtype, []).append(product)
    widest = max(map(intensity, bench.products)) * 2
    for dtype, products in by_type.items():
        _draw(axes, dtype, products, bench.bytes_per_s, widest)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte moved",
        ylabel="operations per second",
    )
    for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "FLOP/s")):
        axis.set_major_formatter(EngFormatter(unit))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(
        f"roofline of one of {bench.devices} devices, all active", fontsize=9, loc="left"
    )
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", fontsize=8, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(
    axes: Axes, dtype: str, products: Sequence[Product], bytes_per_s: float, widest: float
) -> None:
    best = max(product.flops for product in products)
    ridge = best / bytes_per_s
    begin = min(*map(intensity, products), ridge) / _MEMORY_BOUND
    places = [begin, ridge, max(widest, 2 * ridge)]
    roof = [begin * bytes_per_s, best, best]
    (line,) = axes.plot(places, roof, linewidth=1.2)
    axes.plot(
        [intensity(product) for product in products],
        [product.flops for product in products],
        _MARKERS[dtype],
        color=line.get_color(),
        ms=4,
        label=f"{dtype}: {formatting.flops(best)}, ridge at {ridge:.3g} operations per byte",
    )
