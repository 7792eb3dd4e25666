"""The devices of a cluster: what each is, what it reaches, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.views import html, labels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Bench, Topology, WorkerState

_DEVICES = ("rank", "host", "device", "kind", "memory")
_LINKS = ("links", "joins", "latency", "one way, when all send", "figures")
_UNKNOWN = "-"

Table = tuple[tuple[str, ...], list[list[str]], tuple[int, ...]]


@dataclass(frozen=True)
class DevicesPicture:
    """What `%dist_devices` shows.

    Attributes:
        workers: with their devices.
        topology: what steps are planned for; None without JAX, or where nobody knows the devices.
        fault: why there is none, where JAX is there.
        bench: what was measured; None where nothing was.
    """

    workers: tuple[WorkerState, ...]
    topology: Topology | None
    fault: str
    bench: Bench | None

    def html(self) -> str:
        tables = (html.table(*table) for table in self._tables())
        return html.box(self._title, *tables, *map(html.faint, self._notes()))

    def lines(self) -> list[str]:
        tables = [line for table in self._tables() for line in ["", *html.text_table(*table)]]
        return [self._title, *tables[1:], "", *self._notes()]

    @property
    def _title(self) -> str:
        count = sum(len(worker.devices) for worker in self.workers)
        hosts = len({worker.host for worker in self.workers})
        workers = labels.count(len(self.workers), "worker")
        places = labels.count(hosts, "host")
        return f"nbdist: {labels.count(count, 'device')} of {workers} on {places}"

    def _tables(self) -> Iterator[Table]:
        yield _DEVICES, list(self._devices()), (0, 4)
        links = list(self._links())
        if links:
            yield _LINKS, links, (1, 2, 3)
        if self.bench is not None:
            yield _products(self.bench)

    def _devices(self) -> Iterator[list[str]]:
        for worker in self.workers:
            for device in worker.devices:
                size = device.memory_bytes
                told = labels.memory(size) if size else _UNKNOWN
                yield [str(worker.rank), worker.host, device.name, device.kind, told]

    def _links(self) -> Iterator[list[str]]:
        measured = self.bench.links if self.bench is not None else {}
        for level in self.topology.levels if self.topology is not None else ():
            if level.size > 1:
                link = measured.get(level.name, level)
                yield [
                    level.name,
                    str(level.size),
                    labels.brief(link.latency_s),
                    f"{labels.size(link.bytes_per_s)}/s",
                    "measured" if level.name in measured else "from tables",
                ]

    def _notes(self) -> Iterator[str]:
        if self.bench is not None:
            yield f"copies within a device's memory: {labels.size(self.bench.bytes_per_s)}/s"
        if self.topology is not None:
            yield f"{self.topology.chip.name}: {self.topology.chip.source}"
            yield from self.topology.assumed
        elif self.fault:
            yield self.fault
        if self.bench is None and (self.topology is not None or self.fault):
            yield "%dist_devices --bench measures them; steps are planned with that from then on"


def _products(bench: Bench) -> Table:
    sizes = sorted({product.size for product in bench.products})
    types = dict.fromkeys(product.dtype for product in bench.products)
    reached = {(p.dtype, p.size): f"{_rate(p.flops)}" for p in bench.products}
    rows = [[dtype, *(reached.get((dtype, size), "") for size in sizes)] for dtype in types]
    header = ("products", *(f"{size:,} x {size:,}" for size in sizes))
    return header, rows, tuple(range(1, len(header)))


def _rate(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"
