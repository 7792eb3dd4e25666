"""Formats of ranks, sizes, times and shares."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nbdist.records import Device, RecoveryRecord
from nbdist.views import formatting

DURATIONS = Path(__file__).with_name("durations.json")
"""Cases that the tests of the front end share."""


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0-1"),
        ([4, 0, 2, 3], "0,2-4"),
        ([0, 2, 4], "0,2,4"),
        ([7, 8, 9, 10, 11], "7-11"),
    ],
)
def test_ranks_are_ranges(numbers: list[int], text: str) -> None:
    assert formatting.ranks(numbers) == text


def test_a_common_host_follows_the_ranks() -> None:
    host_of = {0: "a", 1: "a", 2: "b"}
    assert formatting.places([1, 0], host_of) == "[0-1@a]"
    assert formatting.places([0, 2], host_of) == "[0,2]"
    assert formatting.places([], host_of) == "[]"


def test_devices_are_counted_by_kind() -> None:
    gpu = Device(platform="gpu", kind="H100", name="gpu:0")
    cpu = Device(platform="cpu", kind="cpu", name="cpu:0")
    assert formatting.devices([gpu, cpu, gpu]) == "2 x gpu (H100), 1 x cpu"
    assert formatting.devices([]) == ""


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 MB"), (362e6, "362 MB"), (999e6, "999 MB"), (1e9, "1.0 GB"), (1.44e9, "1.4 GB")],
)
def test_memory_is_in_megabytes_or_gigabytes(size_bytes: float, text: str) -> None:
    assert formatting.memory(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (12, "12 B", "12 B"),
        (999, "999 B", "999 B"),
        (999.4, "999 B", "999 B"),
        (999.5, "1.0 kB", "1,000 B"),
        (1023.5, "1.0 kB", "1.0 KiB"),
        (3400, "3.4 kB", "3.3 KiB"),
        (99_940, "99.9 kB", "97.6 KiB"),
        (99_950, "100 kB", "97.6 KiB"),
        (5e11, "500 GB", "466 GiB"),
        (2**40, "1.1 TB", "1.0 TiB"),
        (5e15, "5,000 TB", "4,547 TiB"),
    ],
)
def test_sizes_have_a_unit_and_three_digits(size_bytes: float, decimal: str, binary: str) -> None:
    assert formatting.size(size_bytes) == decimal
    assert formatting.binary(size_bytes) == binary


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (1200, "1,200 ranks")]
)
def test_a_count_has_a_plural(number: int, text: str) -> None:
    assert formatting.count(number, "rank") == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(312e12, "312 TFLOP/s"), (1e12, "1 TFLOP/s"), (38.44e9, "38.4 GFLOP/s"), (0, "0 GFLOP/s")],
)
def test_rates_are_in_giga_or_tera(rate: float, text: str) -> None:
    assert formatting.flops(rate) == text


@pytest.mark.parametrize(("seconds", "text"), msgspec.json.decode(DURATIONS.read_bytes()))
def test_durations_have_one_format(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0, "0%"),
        (0.0004, "<0.1%"),
        (0.0005, "0.1%"),
        (0.014, "1.4%"),
        (0.0994, "9.9%"),
        (0.0996, "10%"),
        (0.13, "13%"),
        (0.99, "99%"),
        (0.991, "99.1%"),
        (0.9994, "99.9%"),
        (0.9996, ">99.9%"),
        (1, "100%"),
        (1.2, "120%"),
        (-0.05, "-5%"),
    ],
)
def test_shares_near_the_ends_have_a_digit_more(part: float, text: str) -> None:
    assert formatting.share(part) == text


@pytest.mark.parametrize(
    ("step", "workers", "onward"),
    [
        (1200, 0, "resumed after step 1,200"),
        (0, 0, "restarted"),
        (5, 3, "resumed after step 5 with 3 workers"),
        (0, 1, "restarted with 1 worker"),
    ],
)
def test_a_recovery_describes_how_the_run_continues(step: int, workers: int, onward: str) -> None:
    record = RecoveryRecord(
        time_s=1.0,
        ranks=(2,),
        reason="rank 2 died\nKilled",
        step=step,
        lost_s=1.26,
        workers=workers,
    )
    assert formatting.recovered(record) == f"recovered: rank 2 died, {onward}, 1.26 s lost"


def test_occurrences_are_counted() -> None:
    assert [formatting.times(number) for number in (1, 2, 1000)] == [
        "once",
        "2 times",
        "1,000 times",
    ]


def test_a_long_text_is_truncated_to_its_width() -> None:
    assert formatting.shortened("abcd", 4) == "abcd"
    assert formatting.shortened("abcde", 4) == "abc…"


def test_the_verb_follows_the_number_of_workers() -> None:
    assert formatting.ready(1) == "1 worker is ready"
    assert formatting.ready(2) == "2 workers are ready"
