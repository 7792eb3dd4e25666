"""A 1F1B pipeline as one operation: its parts, values and refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nbdist.errors import PlanError
from nbdist.planner.graph.one_f_one_b import (
    PIPELINE_1F1B,
    Flow,
    as_1f1b,
    joined,
    parts_of,
    reached,
    stored_results,
)
from tests.planner.steps import (
    BACKWARD_SCAN,
    FEATURE,
    FORWARD_SCAN,
    INPUT,
    INPUT_SLOPE,
    LOSS,
    OUTPUT,
    ROWS,
    SAVED,
    SCALE,
    SCALE_SLOPE,
    SCAN,
    SLOPE,
    stream,
    value,
)

LABEL = value(30, (64, 16), (ROWS, FEATURE))
TARGET = value(31, (64, 16), (ROWS, FEATURE))
FACTOR, SQUARE = value(32, (16,), (FEATURE,)), value(33, (16,), (FEATURE,))
MEAN = value(34, (), ())


def flow(name: str, ins: str, outs: str) -> Flow:
    return Flow(name, frozenset(ins), frozenset(outs))


def test_loops_and_loss_section_are_one_operation() -> None:
    whole, *after = as_1f1b(SCAN.ops, SCAN)
    assert (whole.kind, whole.name) == ("loop", PIPELINE_1F1B)
    assert parts_of(whole) == (FORWARD_SCAN, (LOSS,), BACKWARD_SCAN)
    assert whole.ins == (INPUT, SCALE)
    assert whole.outs == (SCALE_SLOPE,)
    assert [op.name for op in after] == ["add", "sub"]


def test_results_of_the_step_leave_the_pipeline() -> None:
    model = replace(SCAN, results=SCAN.results | {INPUT_SLOPE.number, OUTPUT.number})
    whole = as_1f1b(SCAN.ops, model)[0]
    assert set(whole.outs) == {SCALE_SLOPE, INPUT_SLOPE, OUTPUT}


def test_operations_with_rows_that_only_the_loss_needs_join_it() -> None:
    """Labels are made before the forward loop in program order; factors have no rows."""
    label = stream("label", (LABEL,), TARGET)
    factor = stream("factor", (FACTOR,), SQUARE)
    loss = stream("loss", (OUTPUT, TARGET, SQUARE), SLOPE)
    program = (label, factor, FORWARD_SCAN, loss, BACKWARD_SCAN, *SCAN.ops[3:])
    first, whole, *_ = as_1f1b(program, SCAN)
    assert first == factor
    assert parts_of(whole)[1] == (label, loss)
    shown = replace(SCAN, results=SCAN.results | {TARGET.number})
    before = as_1f1b(program, shown)[:2]
    assert before == (label, factor)


def test_metric_of_the_loss_is_part_of_its_section() -> None:
    mean = stream("mean", (SLOPE,), MEAN)
    program = (FORWARD_SCAN, LOSS, BACKWARD_SCAN, mean, *SCAN.ops[3:])
    model = replace(SCAN, results=SCAN.results | {MEAN.number})
    whole = as_1f1b(program, model)[0]
    assert parts_of(whole)[1] == (LOSS, mean)
    assert MEAN in whole.outs


@pytest.mark.parametrize(
    "program", [(), (FORWARD_SCAN,), (FORWARD_SCAN, LOSS, BACKWARD_SCAN, BACKWARD_SCAN)]
)
def test_other_numbers_of_loops_are_refused(program: tuple) -> None:
    message = (
        "schedule=1f1b is not possible: the step needs exactly one scan over layers and its "
        "backward pass; use schedule=gpipe"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        as_1f1b(program, SCAN)


def test_backward_loop_reads_stored_results() -> None:
    assert stored_results(FORWARD_SCAN, BACKWARD_SCAN) == (SAVED,)
    unused = replace(BACKWARD_SCAN, ins=(SLOPE, SCALE))
    assert stored_results(FORWARD_SCAN, unused) == ()


def test_dependent_values_are_reached_in_order() -> None:
    flows = [flow("f", "a", "b"), flow("g", "x", "y"), flow("h", "by", "c")]
    assert reached(flows, "a") == set("abc")
    assert reached(flows, "y") == set("yc")
    assert reached(flows[::-1], "a") == set("ab")
    assert reached([], "a") == {"a"}


def test_section_contains_dependent_operations_that_are_not_late() -> None:
    flows = [flow("loss", "m", "l"), flow("metric", "l", "k"), flow("update", "g", "u")]
    found = joined(
        flows, set("mlk"), set("gu"), wanted=set(), others=set(), may_join=lambda _: True
    )
    assert found == ["loss", "metric"]
    late = joined(flows, set("mlk"), set("k"), wanted=set(), others=set(), may_join=lambda _: True)
    assert late == ["loss"]


@pytest.mark.parametrize(
    ("needed", "may_join", "is_repeatable", "found"),
    [
        ("", True, False, ["labels", "loss"]),
        ("", False, False, ["loss"]),
        ("t", True, False, ["loss"]),
        ("t", True, True, ["labels", "loss"]),
        ("t", False, True, ["labels", "loss"]),
    ],
)
def test_section_takes_what_it_alone_needs(
    needed: str, may_join: bool, is_repeatable: bool, found: list[str]
) -> None:
    flows = [flow("labels", "r", "t"), flow("other", "o", "p"), flow("loss", "mt", "l")]
    made = joined(
        flows,
        set("ml"),
        set(),
        wanted=set(),
        others=set(needed),
        may_join=lambda _: may_join,
        is_repeatable=lambda _: is_repeatable,
    )
    assert made == found


def test_section_does_not_take_values_that_a_later_operation_needs() -> None:
    flows = [flow("labels", "r", "t"), flow("loss", "mt", "l"), flow("report", "t", "p")]
    made = joined(flows, set("ml"), set(), wanted=set(), others=set(), may_join=lambda _: True)
    assert made == ["loss"]
