"""Reported values of a step, its source, and the report of its footprint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import StepOptions, StepProgram, StepRequest
from nbdist.worker.training.step_contract import (
    function_source,
    named,
    scalars,
)


def request_of(report: str = "loss", body: str = "    return 1, ()\n") -> StepRequest:
    program = StepProgram(
        body=body, given=("batch",), reads={}, carried=(), carried_lines={}, report=report
    )
    return StepRequest(program, StepOptions(data="train"))


@pytest.mark.parametrize(
    ("expression", "report", "expected"),
    [
        ("loss", 2.0, {"loss": 2.0}),
        ("loss / 2", 2.0, {"value": 2.0}),
        ("", None, {}),
        ("f(x)", None, {}),
        ("loss", {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        ("loss", {}, {}),
    ],
)
def test_single_value_is_named_by_its_expression(
    expression: str, report: Any, expected: dict[str, Any]
) -> None:
    assert named(request_of(expression), report) == expected


def test_reports_are_converted_to_scalars() -> None:
    found = scalars(request_of(), {"loss": 1, "mean": np.float32(2.5), "is_new": True}, np.asarray)
    assert {name: float(value) for name, value in found.items()} == {
        "loss": 1.0,
        "mean": 2.5,
        "is_new": 1.0,
    }
    assert scalars(request_of(), {}, np.asarray) == {}


@pytest.mark.parametrize(
    "value", [None, "x", b"x", {"a": 1}, (1,), [1.0], {1}, 1j], ids=lambda v: type(v).__name__
)
def test_report_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(StepError, match=r"the step reports `bad` as .*: report scalars"):
        scalars(request_of(), {"good": 1.0, "bad": value}, np.asarray)


def test_long_value_is_truncated_in_the_message() -> None:
    with pytest.raises(StepError) as caught:
        scalars(request_of(), "x" * 100, np.asarray)
    assert str(caught.value) == f"the step reports `loss` as '{'x' * 59}: report scalars"


def test_array_is_refused_with_its_shape() -> None:
    message = r"the step reports `loss` of shape \(2, 3\): report scalars"
    with pytest.raises(StepError, match=message):
        scalars(request_of(), np.ones((2, 3)), np.asarray)


def test_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(StepError, match="a value under 3: names must be strings"):
        scalars(request_of(), {3: 1.0}, np.asarray)


def test_lines_of_the_function_are_those_of_the_cell() -> None:
    source = function_source(request_of(body="    fail\n"), ("w", "batch"))
    assert source == "def step(w, batch):\n    fail\n"
