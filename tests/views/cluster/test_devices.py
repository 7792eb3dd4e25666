"""Devices of a cluster, their links and measurements."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbdist.records import (
    Bench,
    Chip,
    Crossing,
    DeviceState,
    Level,
    Link,
    Product,
    Topology,
    Way,
)
from nbdist.views.cluster.devices import DevicesPicture, intensity

CHIP = Chip(name="X9", platform="gpu", memory_bytes=1, flops={}, bytes_per_s=1.0, source="a table")
LINK = Link(latency_s=1e-5, bytes_per_s=2e9)
PRODUCTS = (
    Product(dtype="float32", size=256, flops=1e12),
    Product(dtype="bfloat16", size=64, flops=2e9),
    Product(dtype="float32", size=64, flops=3e9),
)
BENCH = Bench(devices=2, products=PRODUCTS, bytes_per_s=5e9, links={}, dispatch_s=2e-5)
MEASURE = "run %dist_devices --bench to measure the devices: later plans use the results"


def device(process: int = 0, **changes: Any) -> DeviceState:
    fields: dict[str, Any] = {
        "name": "gpu:0",
        "platform": "gpu",
        "kind": "X9",
        "process": process,
        "host": "a",
        "plugin": "p 1",
        "memory_bytes": 2_500_000_000,
        "used_bytes": 0,
    }
    return DeviceState(**(fields | changes))


def topology(*sizes: int, assumed: tuple[str, ...] = ()) -> Topology:
    levels = tuple(
        Level(name=f"level {i}", size=size, latency_s=0.001, bytes_per_s=1e9)
        for i, size in enumerate(sizes)
    )
    return Topology(chip=CHIP, levels=levels, assumed=assumed)


def picture(*devices: DeviceState, **changes: Any) -> DevicesPicture:
    fields: dict[str, Any] = {"topology": None, "fault": "", "bench": None}
    return DevicesPicture(devices or (device(),), **(fields | changes))


def notes(shown: DevicesPicture) -> list[str]:
    return list(shown._notes())


def tables(shown: DevicesPicture) -> list[list[list[str]]]:
    """Return the cells of the rows of each table."""
    lines = shown.lines()[1:]
    count = len(notes(shown))
    assert lines[len(lines) - count - 1 :] == ["", *notes(shown)]
    blocks = "\n".join(lines[: len(lines) - count - 1]).split("\n\n")
    found = [block.splitlines() for block in blocks]
    return [
        [re.split(r" {2,}", line.strip()) for line in (header, *rows)]
        for header, _rule, *rows in found
    ]


def test_the_title_counts_devices_workers_and_hosts() -> None:
    one = picture(device())
    assert one.lines()[0] == "nbdist: 1 device of 1 worker on 1 host"
    several = picture(device(0), device(0, name="gpu:1"), device(1, host="b"))
    assert several.lines()[0] == "nbdist: 3 devices of 2 workers on 2 hosts"
    assert picture(of_cluster=False).lines()[0] == "nbdist: 1 device on 1 host"


def test_unknown_memory_is_marked() -> None:
    shown = picture(device(), device(1, memory_bytes=None, used_bytes=None))
    ((_, *rows),) = tables(shown)
    assert [row[4:6] for row in rows] == [["2.3 GiB", "0 B"], ["-", "-"]]


def test_equal_devices_of_a_host_are_one_line() -> None:
    shown = picture(
        *(device(i // 2, name=f"gpu:{i % 2}", used_bytes=i * 7_000_000) for i in range(4)),
        device(2, host="b", name="gpu:3"),
        device(2, host="b", name="gpu:1"),
        device(2, host="b", name="gpu:2"),
        device(2, host="b", name="cpu:0", kind="cpu"),
        device(3, host="c", name="meta"),
    )
    ((_, *rows),) = tables(shown)
    assert [row[:4] for row in rows] == [
        ["0-1", "a", "gpu:0-1", "X9"],
        ["2", "b", "gpu:1-3", "X9"],
        ["2", "b", "cpu:0", "cpu"],
        ["3", "c", "meta", "X9"],
    ]
    assert rows[0][5] == "0 B to 20.0 MiB"


def test_links_between_several_devices_are_measured_or_from_tables() -> None:
    bench = Bench(devices=2, products=PRODUCTS, bytes_per_s=1.0, links={"level 2": LINK})
    assert tables(picture(topology=topology(2, 1, 4), bench=bench))[1][1:] == [
        ["level 0", "2", "1 ms", "1.0 GB/s", "from tables"],
        ["level 2", "4", "10 µs", "2.0 GB/s", "measured"],
    ]
    assert len(tables(picture(topology=topology(1)))) == 1


def test_products_are_listed_by_type_and_size() -> None:
    assert tables(picture(bench=BENCH))[1] == [
        ["products", "64 x 64", "256 x 256"],
        ["float32", "3 GFLOP/s", "1 TFLOP/s"],
        ["bfloat16", "2 GFLOP/s"],
    ]


def test_transfers_and_the_size_from_which_they_pay_are_shown() -> None:
    ways = (Way(size=64, home_s=0.001, there_s=0.002), Way(size=1024, home_s=1.0, there_s=0.5))
    crossing = Crossing(ways=ways, size=500.0, home="cpu", there="gpu")
    bench = Bench(
        devices=2,
        products=PRODUCTS,
        bytes_per_s=5e9,
        links={},
        transfers={"to device": LINK},
        dispatch_s=2e-5,
        crossing=crossing,
    )
    shown = picture(bench=bench)
    _, _, transfers, advice = tables(shown)
    assert transfers[1] == ["to device", "10 µs", "2.0 GB/s"]
    assert advice == [
        ["product", "each matrix", "cpu", "gpu, with transfers", "faster"],
        ["64 x 64", "16.0 KiB", "1 ms", "2 ms", "cpu"],
        ["1,024 x 1,024", "4.0 MiB", "1 s", "500 ms", "gpu"],
    ]
    copies, smallest, crossed = notes(shown)
    assert copies == "copies within a device's memory: 5.0 GB/s"
    assert smallest == "the smallest program takes 20 µs"
    assert crossed == (
        "from 977 KiB on (products of 500 x 500) gpu is faster, transfers included: keep smaller "
        "arrays on cpu"
    )


def test_data_stay_at_home_if_no_transfer_pays() -> None:
    crossing = Crossing(ways=(), size=None, home="cpu", there="gpu")
    bench = Bench(devices=2, products=PRODUCTS, bytes_per_s=1.0, links={}, crossing=crossing)
    assert notes(picture(bench=bench))[2] == ("no product was faster on gpu: keep data on cpu")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        (
            {"topology": topology(2, assumed=("one host",)), "fault": "unused"},
            ["X9: a table", "one host", MEASURE],
        ),
        ({"fault": "unknown chip"}, ["unknown chip", MEASURE]),
        (
            {"fault": "unknown chip", "of_cluster": False},
            [
                "unknown chip",
                "run %dist_devices --bench or nbdist.devices(bench=True) to measure the devices",
            ],
        ),
    ],
)
def test_notes_name_source_and_remedy(changes: dict[str, Any], expected: list[str]) -> None:
    assert notes(picture(**changes)) == expected


def test_notes_explain_missing_or_shared_memory() -> None:
    unknown = device(1, platform="cpu", used_bytes=None)
    (missing,) = notes(picture(unknown))
    assert missing.startswith("the runtime of these devices does not report")
    (shared,) = notes(picture(device(), unknown))
    assert shared == "CPU devices share the memory of their host"


def test_a_product_moves_three_matrices_once() -> None:
    assert intensity(Product(dtype="float32", size=600, flops=1.0)) == 100.0
    assert intensity(Product(dtype="bfloat16", size=600, flops=1.0)) == 200.0
