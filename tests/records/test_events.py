"""Rows of reports, and figures of events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nbdist.records import AnyEvent, Columns, Difference, Metrics, Profiled, Rows
from tests.runs import rows

MIXED = Columns(measures=("step_s", "input_s"), own=("loss", "norm"), shared=("accuracy",))
VALUES = [[2, 1, 5, 0.5, 0.1, 0.2, 7.0, 8.0, 9.0], [2, 1, 6, 0.75, 0.3, 0.4, 5.0, 4.0, 3.0]]


def metrics(step: int, time_s: float, loss: float, norm: float, accuracy: float) -> Metrics:
    return Metrics(
        rank=2,
        cell=1,
        epoch=1,
        step=step,
        time_s=time_s,
        own={"loss": loss, "norm": norm},
        shared={"accuracy": accuracy},
    )


def test_columns_begin_with_the_place_of_a_report() -> None:
    assert MIXED.names == (
        *("rank", "epoch", "step", "time_s"),
        *("step_s", "input_s"),
        *("loss", "norm"),
        "accuracy",
    )


@pytest.mark.parametrize(
    ("columns", "of_steps", "of_epochs"),
    [
        (Columns(), False, False),
        (Columns(measures=("step_s",)), False, False),
        (Columns(own=("loss",)), True, True),
        (Columns(shared=("loss",)), True, True),
        (Columns(measures=("step_s",), own=("loss",)), True, False),
        (Columns(measures=("step_s",), shared=("loss",)), True, False),
    ],
)
def test_measured_rows_count_for_steps_only(
    columns: Columns, of_steps: bool, of_epochs: bool
) -> None:
    assert columns.counts(is_step=True) == of_steps
    assert columns.counts(is_step=False) == of_epochs


def test_rows_become_metrics_without_measurements() -> None:
    sent = rows(VALUES, MIXED, rank=2)
    expected = [metrics(5, 0.5, 7.0, 8.0, 9.0), metrics(6, 0.75, 5.0, 4.0, 3.0)]
    assert list(sent.unpacked()) == expected
    assert sent.last() == expected[-1]
    assert rows(VALUES[:1], MIXED, rank=2).last() == expected[0]


def test_a_message_without_rows_has_no_metrics() -> None:
    assert list(Rows(rank=0, cell=1, columns=MIXED, values=b"").unpacked()) == []


def test_rows_are_equal_after_the_wire() -> None:
    sent = rows(VALUES, MIXED, rank=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=AnyEvent) == sent


@pytest.mark.parametrize(("largest", "passes"), [(0.1, True), (0.11, False), (float("nan"), False)])
def test_a_difference_passes_up_to_its_tolerance(largest: float, passes: bool) -> None:
    difference = Difference(
        name="w", reported=False, shape=(), dtype="float32", largest=largest, tolerance=0.1
    )
    assert difference.passes is passes


def test_the_rest_of_a_traced_step_is_not_negative() -> None:
    parts: dict[str, Any] = {
        "compute_s": 0.5,
        "collective_s": 0.25,
        "to_device_s": 0.125,
        "to_host_s": 0.0625,
    }

    def other_s(step_s: float) -> float:
        return Profiled(rank=0, cell=1, steps=1, step_s=step_s, **parts).other_s

    assert other_s(1.0) == 0.0625
    assert other_s(0.9) == 0.0
