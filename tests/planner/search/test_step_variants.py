"""Variants of a step: made once each, with the reasons if they are impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nbdist.errors import PlanError
from nbdist.planner.graph.layout import Layout
from nbdist.planner.search.step_variants import REMATS, Steps
from tests.planner.steps import LINEAR, SCAN, STATES

if TYPE_CHECKING:
    from nbdist.planner.graph.model import Model
    from nbdist.records import Remat


class Rewriter:
    """Makes variants of the scan, and counts the calls."""

    def __init__(self, fault: str = "") -> None:
        self.made: list[tuple[Remat, int]] = []
        self._fault = fault

    def __call__(self, remat: Remat, micro: int) -> Model:
        self.made.append((remat, micro))
        if self._fault:
            raise PlanError(self._fault)
        return replace(SCAN, notes=(f"{remat} {micro}",))


def test_plain_step_is_its_own_variant() -> None:
    steps = Steps(SCAN)
    assert steps.plain is SCAN
    assert steps.of(Layout(4, 1)).model is SCAN
    assert (steps.is_fixed, steps.remats) == (True, ("",))
    assert steps.of(Layout(1, 1)).states == STATES
    rewritten = Steps(SCAN, Rewriter())
    assert (rewritten.is_fixed, rewritten.remats) == (False, REMATS)


def test_variant_is_made_once() -> None:
    rewriter = Rewriter()
    steps = Steps(SCAN, rewriter)
    first = steps.of(Layout(1, 1, remat="full", micro=2))
    assert steps.of(Layout(4, 1, remat="full", micro=2, zero=1)) is first
    assert first.model.notes == ("full 2",)
    assert rewriter.made == [("full", 2)]


def test_microbatches_of_a_pipeline_are_no_variant() -> None:
    rewriter = Rewriter()
    steps = Steps(SCAN, rewriter)
    assert steps.of(Layout(1, 1, stage=2, micro=4)).model is SCAN
    steps.of(Layout(1, 1, remat="full", stage=2, micro=4))
    assert rewriter.made == [("full", 1)]


def test_impossible_variant_states_the_reason() -> None:
    with pytest.raises(PlanError, match=r"^no microbatches: it draws$"):
        Steps(SCAN, Rewriter("it draws")).of(Layout(1, 1, micro=2))
    with pytest.raises(PlanError, match=r"^this step cannot be rewritten for remat or microbat"):
        Steps(SCAN).of(Layout(1, 1, remat="full"))
    with pytest.raises(PlanError, match=r"^no stages: there is no scan over layers"):
        Steps(LINEAR).of(Layout(1, 1, stage=2, micro=2))


@pytest.mark.parametrize(
    ("lengths", "most", "in_two_rounds"),
    [
        (None, 8, (2, 4)),
        ((8,), 8, (2, 4)),
        ((8, 4), 4, (2,)),
        ((8, 3), 3, ()),
        ((), 8, (2, 4)),
    ],
)
def test_stages_fit_the_layers_that_the_runtime_finds(
    lengths: tuple[int, ...] | None, most: int, in_two_rounds: tuple[int, ...]
) -> None:
    """In several rounds, blocks divide the layers of all scans."""
    steps = Steps(SCAN, None, None if lengths is None else lambda _: lengths)
    assert steps.stages == tuple(range(2, most + 1))
    assert tuple(n for n in range(1, 10) if steps.allows(n, 1)) == steps.stages
    assert tuple(n for n in range(1, 10) if steps.allows(n, 2)) == in_two_rounds


@pytest.mark.parametrize(
    ("model", "lengths", "reason"),
    [
        (SCAN, (8, 3), ""),
        (
            LINEAR,
            (8,),
            (
                "there is no scan over layers whose stacked parameters, [layers, ...], "
                "the step carries"
            ),
        ),
    ],
)
def test_missing_stages_have_a_reason(model: Model, lengths: tuple[int, ...], reason: str) -> None:
    steps = Steps(model, None, lambda _: lengths)
    assert steps.why_no_stages() == reason


def test_reason_depends_on_remat_and_is_found_once() -> None:
    asked: list[Remat] = []

    def layers(remat: Remat) -> tuple[int, ...]:
        asked.append(remat)
        if remat == "full":
            raise PlanError("a layer draws")
        return (8,)

    steps = Steps(SCAN, Rewriter(), layers)
    assert [steps.why_no_stages(remat) for remat in ("full", "full", "")] == [
        "a layer draws",
        "a layer draws",
        "",
    ]
    assert asked.count("full") == 1
    assert steps.stages == (2, 3, 4, 5, 6, 7, 8)


def test_1f1b_is_checked_for_each_remat_once() -> None:
    asked: list[Remat] = []

    def check(remat: Remat) -> None:
        asked.append(remat)
        if remat == "full":
            raise PlanError("the loss needs all rows")

    steps = Steps(SCAN, Rewriter(), None, check)
    for _ in range(2):
        assert steps.why_no_1f1b("full") == "the loss needs all rows"
        assert steps.why_no_1f1b("selective") == ""
    assert asked == ["full", "selective"]


def test_model_may_not_allow_1f1b() -> None:
    assert Steps(SCAN).why_no_1f1b("") == ""
    reason = Steps(LINEAR).why_no_1f1b("")
    assert reason.startswith("schedule=1f1b is not possible: the step needs exactly one scan")
    assert Steps(SCAN).why_no_1f1b("full") == (
        "this step cannot be rewritten for remat or microbatches"
    )
