"""Hosts of a cluster and their problems."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbdist.records import Examination, Gpu, HostFacts, Reach, Trouble
from nbdist.views.cluster.hosts import DoctorPicture, HostsPicture


def facts(rank: int, host: str = "a", **changes: Any) -> HostFacts:
    fields: dict[str, Any] = {
        "rank": rank,
        "host": host,
        "python": "/usr/bin/python",
        "versions": {"python": "3.11"},
        "folder": "/home",
        "cpus": 4,
        "free_bytes": 2_500_000_000,
        "disk_bytes": 700_000_000,
        "shm_bytes": 1,
        "gpus": (),
        "driver": "",
        "time_s": 0.0,
    }
    return HostFacts(**(fields | changes))


def hosts(*given: HostFacts, environment: tuple[str, ...] = ()) -> HostsPicture:
    count = len(given)
    return HostsPicture(given, ("10.0.0.1",) * count, (environment,) * count, ("ssh",) * count)


def columns(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def test_a_host_without_gpus_shows_its_cores() -> None:
    given = hosts(facts(0), facts(1, cpus=1), environment=("HOME", "LANG"))
    assert [row.devices for row in given.rows] == ["4 cores", "1 core"]
    title, _, _, first, _ = given.lines()
    assert title == "nbdist: 2 workers on 1 host"
    assert columns(first) == [
        "0",
        "a",
        "10.0.0.1",
        "4 cores",
        "/usr/bin/python (3.11)",
        "/home",
        "HOME LANG",
        "ssh",
    ]


def test_gpus_are_counted_by_name() -> None:
    gpus = tuple(Gpu(name=n, memory_bytes=1, used_bytes=0, busy=0.0) for n in ("B", "A", "B"))
    (row,) = hosts(facts(0, gpus=gpus)).rows
    assert row.devices == "2 x B, 1 x A"


def test_names_of_hosts_are_escaped_and_an_empty_environment_is_marked() -> None:
    given = hosts(facts(0, "<h>"), facts(1, "b"))
    assert given.lines()[0] == "nbdist: 2 workers on 2 hosts"
    assert columns(given.lines()[3])[6] == "-"
    assert "&lt;h&gt;" in given.html()


def test_a_line_for_each_host_shows_the_median_latency_and_the_least_bandwidth() -> None:
    reaches = (
        Reach(rank=1, latency_s=0.001, bytes_per_s=1e9),
        Reach(rank=2, latency_s=0.003),
        Reach(rank=3, latency_s=0.1, bytes_per_s=2e9),
        Reach(rank=4, fault="refused", latency_s=9.0, bytes_per_s=9e9),
    )
    examined = Examination(
        facts=(facts(0), facts(1), facts(2)),
        reaches={0: reaches, 2: reaches[1:2]},
        skew_error_s=0.002,
        seconds=1.5,
    )
    title, _, _, first, second, third, *_ = DoctorPicture(examined).lines()
    assert title == "nbdist: 1 host checked in 1.5 s: 0 problems"
    assert columns(first) == ["0", "a", "2.3 GiB", "668 MiB", "± 2 ms", "3 ms", "1.0 GB/s"]
    assert columns(second)[-2:] == ["-", "-"]
    assert columns(third)[-2:] == ["3 ms", "-"]


def test_each_measured_link_is_in_a_table() -> None:
    speeds = {(0, 1): 1e9, (0, 2): 5e6, (1, 0): 2e9, (1, 2): 6e6, (2, 0): 3e9}  # 2 to 1 is unknown
    lines = DoctorPicture(bench(3, speeds)).lines()
    assert columns(lines[8]) == ["from", "to h0", "to h1", "to h2"]
    assert [columns(line) for line in lines[10:13]] == [
        ["h0", "-", "1.0 GB/s", "5.0 MB/s"],
        ["h1", "2.0 GB/s", "-", "6.0 MB/s"],
        ["h2", "3.0 GB/s", "-", "-"],
    ]
    assert "to h2" in DoctorPicture(bench(3, speeds)).html()
    ring = DoctorPicture(bench(3, {(0, 1): 1e9, (1, 2): 1e9, (2, 0): 1e9}))
    assert not any("to h2" in line for line in ring.lines())


def test_the_slowest_links_of_many_hosts_are_in_a_table() -> None:
    speeds = {(a, b): 1e9 - a * 1e7 - b for a in range(20) for b in range(20) if a != b}
    lines = DoctorPicture(bench(20, speeds)).lines()
    (header,) = (i for i, line in enumerate(lines) if line.startswith("slowest links from"))
    shown = [columns(line) for line in lines[header + 2 : header + 12]]
    assert [row[:2] for row in shown] == [["h19", f"h{b}"] for b in range(18, 8, -1)]
    assert columns(lines[header + 12]) != ["h19", "h8", "810 MB/s"]


def bench(count: int, speeds: dict[tuple[int, int], float]) -> Examination:
    reaches = {
        a: tuple(
            Reach(b, latency_s=0.001, bytes_per_s=speeds.get((a, b), 0.0))
            for b in range(count)
            if b != a
        )
        for a in range(count)
    }
    ones = tuple(facts(rank, f"h{rank}") for rank in range(count))
    return Examination(facts=ones, reaches=reaches)


@pytest.mark.parametrize(
    ("skew_s", "text"),
    [
        (0.0, "± 10 ms"),
        (0.01, "± 10 ms"),
        (-0.01, "± 10 ms"),
        (0.011, "+11 ms"),
        (-2.5, "-2.5 s"),
    ],
)
def test_a_clock_differs_only_beyond_the_error(skew_s: float, text: str) -> None:
    examined = Examination(facts=(facts(0),), skew_s={0: skew_s}, skew_error_s=0.01)
    assert columns(DoctorPicture(examined).lines()[3])[4] == text


def test_problems_have_a_sign_and_advice() -> None:
    troubles = (
        Trouble(where="a", what="the disk is <full>", advice="delete files", is_fatal=True),
        Trouble(where="b", what="it is slow", advice=""),
    )
    picture = DoctorPicture(Examination(facts=(facts(0),), troubles=troubles))
    assert picture.lines()[0].endswith(": 2 problems")
    assert picture.lines()[-2:] == ["✗ a: the disk is <full>\n    delete files", "! b: it is slow"]
    page = picture.html()
    assert "a: the disk is &lt;full&gt;" in page
    assert page.count("delete files") == 1
    assert page.index("✗") < page.index(">!<")


def test_no_problems_are_a_line_too() -> None:
    picture = DoctorPicture(Examination(facts=(facts(0),)))
    assert picture.lines()[-1] == "✓ no problems"
