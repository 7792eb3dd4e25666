"""Times in Slurm's format, and the states that each scheduler prints."""

from __future__ import annotations

import re

import pytest

from nbdist.cluster.schedulers.dialects import SCHEDULERS, seconds
from nbdist.errors import StartError

HOUR = 3600
DAY = 24 * HOUR


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("30", 30 * 60),
        ("90:05", 90 * 60 + 5),
        ("2:00:00", 2 * HOUR),
        ("1:2:3", HOUR + 2 * 60 + 3),
        ("1-0", DAY),
        ("1-2", DAY + 2 * HOUR),
        ("1-2:03", DAY + 2 * HOUR + 3 * 60),
        ("1-2:03:04", DAY + 2 * HOUR + 3 * 60 + 4),
        ("0-0:00:01", 1),
    ],
)
def test_times_are_converted_to_seconds(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-", "1-", "-1-2", "1:", ":1", "1:2:3:4", "1-2:3:4:5", "1.5", "1-2-3"],
)
def test_other_formats_of_times_are_refused(text: str) -> None:
    with pytest.raises(StartError, match=f"^--time {re.escape(text)}: use the format 2:00:00$"):
        seconds(text)


@pytest.mark.parametrize("launcher", SCHEDULERS)
def test_each_state_has_one_meaning(launcher: str) -> None:
    scheduler = SCHEDULERS[launcher]  # type: ignore[index]
    assert scheduler.waiting.isdisjoint(scheduler.over)
    assert scheduler.hopeless.isdisjoint(scheduler.waiting | scheduler.over)
    assert scheduler.waiting
    assert scheduler.over
