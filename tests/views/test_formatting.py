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
    ("amount", "size", "rate"),
    [
        (0, "0 B", "0 B/s"),
        (12, "12 B", "12 B/s"),
        (999.4, "999 B", "999 B/s"),
        (999.5, "1,000 B", "1.0 kB/s"),
        (1023.5, "1.0 KiB", "1.0 kB/s"),
        (3400, "3.3 KiB", "3.4 kB/s"),
        (99_950, "97.6 KiB", "100 kB/s"),
        (5e11, "466 GiB", "500 GB/s"),
        (2**40, "1.0 TiB", "1.1 TB/s"),
        (5e15, "4,547 TiB", "5,000 TB/s"),
    ],
)
def test_sizes_are_binary_and_rates_are_decimal(amount: float, size: str, rate: str) -> None:
    assert (formatting.size(amount), formatting.rate(amount)) == (size, rate)


def test_rows_that_differ_in_the_rank_only_are_joined() -> None:
    rows = [["0", "a", "x"], ["1", "a", "x"], ["2", "b", "x"], ["3", "a", "x"]]
    assert formatting.joined(rows) == [["0-1,3", "a", "x"], ["2", "b", "x"]]


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
