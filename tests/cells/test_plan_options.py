"""Options of a plan as typed text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.cells.parse import parse_cell
from nbdist.cells.plan_options import fixed_text, parse_budget, parse_fixed, read_plan
from nbdist.errors import UsageError
from nbdist.records import CellOptions, Planning, StepOptions
from tests import plans

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (None, 0),
        ("40GB", 40e9),
        ("16 GiB", 16 * 2**30),
        ("1.5T", 1.5e12),
        ("300mb", 300e6),
        ("7B", 7),
    ],
)
def test_a_budget_is_parsed_into_bytes(text: str | None, nbytes: float) -> None:
    assert parse_budget(text) == nbytes


@pytest.mark.parametrize("text", ["", "much", "40", "-4GB", "0GB", "40GX", "4 GB GB"])
def test_an_invalid_budget_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="use an amount of memory with its unit, as in 40GB"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        (None, {}),
        ("tensor=4", {"model": 4}),
        ("tp=4, dp=2,zero=3", {"model": 4, "data": 2, "zero": 3}),
        ("zero=0", {"zero": 0}),
        ("micro=4", {"micro": 4}),
        ("sp=0,tp=4", {"sequence": 0, "model": 4}),
        ("sequence=1", {"sequence": 1}),
        ("stage=4,micro=8", {"stage": 4, "micro": 8}),
        ("pp=2,stage=2", {"stage": 2}),
        ("tp=4,model=4", {"model": 4}),
    ],
)
def test_fixed_parts_are_parsed_by_their_names(text: str | None, fixed: dict[str, int]) -> None:
    assert parse_fixed(text) == (fixed, None, None)


def test_remat_is_parsed_from_a_word() -> None:
    assert parse_fixed("remat=full,tp=2") == ({"model": 2}, "full", None)
    assert parse_fixed("remat=none") == ({}, "", None)
    for text in ("remat=most", "remat=full,remat=full", "remat"):
        with pytest.raises(UsageError, match=r"remat=.*: use one of none, selective, full, once"):
            parse_fixed(text)


def test_schedule_and_rounds_are_parsed() -> None:
    assert parse_fixed("pp=2,schedule=1f1b") == ({"stage": 2}, None, "1f1b")
    assert parse_fixed("pp=2,rounds=3") == ({"stage": 2, "rounds": 3}, None, None)
    with pytest.raises(UsageError, match="rounds=0 is not a number of rounds"):
        parse_fixed("pp=2,rounds=0")
    assert parse_fixed("schedule=gpipe") == ({}, None, "gpipe")
    with pytest.raises(UsageError, match="schedule=both: use one of gpipe, 1f1b, once"):
        parse_fixed("schedule=both")


def test_all_errors_of_fixed_parts_are_reported() -> None:
    with pytest.raises(UsageError) as refused:
        parse_fixed("pipe=2,tensor=x,zero=2,data=0,dp=2,data=4,sp=2")
    for fault in (
        "unknown name 'pipe': use data, dp, tensor, tp, model, stage, pp, replicate, zero, micro, ",
        "tensor=x is not a number",
        "zero=2: use 0, 1 (XLA turns it into ZeRO-2: docs/planner.md) or 3",
        "data=0 is not a number",
        "sp=2: use 0 or 1",
        "data is given twice",
    ):
        assert fault in str(refused.value)


def test_a_plan_is_read_from_its_file(tmp_path: Path) -> None:
    plan = plans.made("both")
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan)))
    assert read_plan(str(path)) == plan
    assert read_plan(None) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "is not a plan"), ("{}", "is not a plan: .*axes")],
)
def test_an_invalid_plan_file_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "my.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=f"--plan .*my.json.*{message}"):
        read_plan(str(path))


def test_planning_options_of_a_fit_need_pjrt() -> None:
    options = CellOptions(step=StepOptions(data="", planning=Planning(budget=1)))
    with pytest.raises(UsageError, match="only under --strategy pjrt"):
        parse_cell("model.fit(x)", options, number=1, label=1, strategy="mirrored")
    request = parse_cell("model.fit(x)", options, number=1, label=1, strategy="pjrt")
    assert request.step is None
    assert request.planning.budget == 1
    assert not request.is_plan


@pytest.mark.parametrize(
    "text", ["", "data=2,tensor=4,zero=3", "stage=2,rounds=3,schedule=1f1b", "micro=2,remat=none"]
)
def test_the_fixed_part_of_a_layout_is_written_as_it_is_read(text: str) -> None:
    fixed = parse_fixed(text or None)
    planning = Planning(fixed=fixed.sizes, remat=fixed.remat, schedule=fixed.schedule)
    assert parse_fixed(fixed_text(planning) or None) == fixed
