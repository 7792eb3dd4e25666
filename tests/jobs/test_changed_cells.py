"""Cells that were deleted or edited after they ran."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from nbdist.cells.dependencies import Entry, names_of
from nbdist.cells.parse import parse_cell
from nbdist.errors import UsageError
from nbdist.jobs.changed_cells import edited_cells, refuse_deleted

MODEL = "def loss_of(x):\n    return x\n"


def entry(label: int, source: str, cell: str = "", **fields: Any) -> Entry:
    request = parse_cell(
        source, number=label, label=label, strategy="pjrt", header="%%dist_run --seed 1"
    )
    return Entry("cell", names_of(request.source), (0, 1), request, cell=cell, **fields)


DELETED = entry(3, MODEL, "a", deleted=True)
TRAINING = entry(5, "loss = loss_of(1.0)\n", "b")


def test_program_that_needs_deleted_cells_is_refused() -> None:
    other = entry(4, "w = [1.0]\nw.append(2.0)\n", "c", deleted=True)
    training = entry(5, "loss = loss_of(w)\n", "b", deleted=True)
    chosen = [DELETED, other, training]
    with pytest.raises(UsageError) as caught:
        refuse_deleted(chosen, chosen)
    assert str(caught.value).splitlines() == [
        "cannot export cell [5]: `loss_of` comes from cell [3], which was deleted",
        "cannot export cell [5]: `w` comes from cell [4], which was deleted",
        "cannot export cell [5]: it was deleted from the notebook",
        "Put the code into a cell and run that cell, or train again without it",
    ]


def test_deleted_cell_whose_code_ran_elsewhere_is_present() -> None:
    merged = entry(6, f"import json\n{MODEL}\nx = 1\n", "d")
    refuse_deleted([DELETED, TRAINING], [DELETED, TRAINING, merged])
    with pytest.raises(UsageError):
        refuse_deleted(
            [DELETED, TRAINING], [DELETED, TRAINING, structs.replace(merged, deleted=True)]
        )


@pytest.mark.parametrize(
    "present", ["optimizer_lr = 0.15", "# lr = 0.1", "text = 'lr = 0.1'", "if False:\n    lr = 0.1"]
)
def test_deleted_statement_that_is_only_part_of_others_is_missing(present: str) -> None:
    deleted = entry(3, "lr = 0.1", "a", deleted=True)
    training = entry(5, f"{present}\nw = lr", "b")
    with pytest.raises(UsageError, match="`lr` comes from cell"):
        refuse_deleted([deleted, training], [deleted, training])


def test_deleted_cell_that_was_split_is_present() -> None:
    deleted = entry(3, "lr = 0.1  # rate\nsteps = 3", "a", deleted=True)
    parts = [entry(4, "steps = 3", "c"), entry(5, "lr  =  0.1", "d")]
    refuse_deleted([deleted, TRAINING], [deleted, *parts, TRAINING])


def test_cell_that_ran_again_in_the_program_is_not_left_out() -> None:
    first, second = entry(3, MODEL, "a"), entry(6, MODEL.replace("return x", "return 2 * x"), "a")
    (remark,) = edited_cells([first, second], [first, second])
    assert remark == (
        "cell [3] ran again as [6] with another text: the program contains both texts, in the "
        "order in which they ran"
    )


def test_changed_option_is_an_edit() -> None:
    first = entry(3, "report(loss=1.0)", "a")
    assert first.request is not None
    options = structs.replace(first.request.options, seed=2)
    second = structs.replace(first, request=structs.replace(first.request, options=options))
    assert [*edited_cells([first], [first, second])]


def test_cells_that_ran_again_with_another_text_are_named() -> None:
    first, second = entry(3, MODEL, "a"), entry(6, MODEL.replace("return x", "return 2 * x"), "a")
    (remark,) = edited_cells([first, TRAINING], [first, TRAINING, second])
    assert remark == (
        "cell [3] ran again as [6] with another text: the program contains the text of [3]"
    )
    again = structs.replace(entry(7, MODEL, "a"))
    assert not [*edited_cells([first, TRAINING], [first, TRAINING, second, again])]
    unknown = [entry(label, source) for label, source in ((1, "x = 1"), (2, "x = 2"))]
    assert not [*edited_cells(unknown[:1], unknown)], "the front end sends no ids"
