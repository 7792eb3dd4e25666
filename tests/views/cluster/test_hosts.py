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


def test_a_line_for_each_host_shows_the_median_latency_and_the_best_bandwidth() -> None:
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
    assert columns(first) == ["0", "a", "2.3 GiB", "668 MiB", "± 2 ms", "3 ms", "2.0 GB/s"]
    assert columns(second)[-2:] == ["-", "-"]
    assert columns(third)[-2:] == ["3 ms", "-"]


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
