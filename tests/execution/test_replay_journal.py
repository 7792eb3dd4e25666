"""Journal of cells and pushed objects in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.errors import ReplayError, UsageError
from nbdist.execution.replay_journal import Journal
from nbdist.execution.result import Run
from nbdist.records import (
    CellOptions,
    Planning,
    RunningCell,
    Saving,
    StepBegun,
    StepOptions,
    StepProgram,
)
from nbdist.utils.files import LateFiles
from tests.execution.doubles import request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import CellRequest

PROGRAM = StepProgram(
    body="", given=("batch",), reads={"rate": 2}, carried=("w",), carried_lines={"w": 2}, report=""
)

BEGUN = StepBegun(
    rank=0,
    cell=1,
    replicas=1,
    batch=1,
    samples=1,
    epochs=1,
    steps=1,
    sharding="",
    rates=(),
    changes=("model",),
)


class Kept:
    """A journal of two ranks in a folder.

    Args:
        folder: the folder of the journal.
        files: writes the files.
    """

    def __init__(self, folder: Path, files: LateFiles) -> None:
        self._folder, self._files = folder, files
        self.journal = Journal(folder, files)

    def again(self) -> Journal:
        """Return the journal as the next process reads it."""
        self._files.settle()
        return Journal(self._folder, self._files)

    def add(
        self,
        source: str,
        label: int = 1,
        ranks: tuple[int, ...] = (0, 1),
        *,
        failed: bool = False,
        generators: bytes = b"",
        **options: object,
    ) -> None:
        given = CellOptions(**options)  # type: ignore[arg-type]
        one = request(source, label=label, options=given)
        cell = RunningCell(request=one, ranks=ranks)
        self.journal.add_cell(cell, Run(1), failed, generators=generators)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    files = LateFiles()
    yield Kept(tmp_path / "cells", files)
    files.close()


def step_request(**options: object) -> CellRequest:
    step = StepOptions(data="rows", **options)  # type: ignore[arg-type]
    return request("w = w", "pjrt", options=CellOptions(step=step), program=PROGRAM)


def places(journal: Journal, run: CellRequest, *saved: str, world_size: int = 2) -> list[str]:
    return [entry.place for entry in journal.needed(run, saved, world_size).entries]


def test_a_run_needs_the_cells_that_bind_its_names(kept: Kept) -> None:
    kept.add("a = 1", 1)
    kept.add("b = 2", 2)
    kept.journal.add_push(["pushed"], b"x", [0, 1])
    kept.add("c = a", 4)
    for journal in (kept.journal, kept.again()):
        assert places(journal, request("print(c, pushed)")) == ["[1]", "%dist_push", "[4]"]
        assert places(journal, request("d = 1")) == []


def test_the_states_before_a_cell_are_those_after_the_last_one_that_drew(kept: Kept) -> None:
    for label, states in enumerate((b"seeded", b"seeded", b"drawn", b"drawn"), 1):
        kept.add(f"a{label} = 1", label, generators=states)
    for journal in (kept.journal, kept.again()):
        before = [journal.generators(before=entry) for entry in journal.entries]
        assert before == [b"", b"seeded", b"seeded", b"drawn"]
        assert journal.generators() == b"drawn"
        assert [entry.drew for entry in journal.entries] == [False, False, True, False]


def test_records_of_fits_are_stored_with_their_cell(kept: Kept) -> None:
    cell = RunningCell(request=request("model.fit(x)"), ranks=(0, 1))
    kept.journal.add_cell(cell, Run(1), failed=False, fits={0: b"first", 1: b"second"})
    for journal in (kept.journal, kept.again()):
        stored = journal.entries[-1].request
        assert stored is not None
        assert [stored.fits_of(rank) for rank in range(3)] == [b"first", b"second", b"second"]
    assert request("model.fit(x)").fits_of(0) == b""


def test_cells_of_ended_workers_change_nothing_that_later_cells_created(kept: Kept) -> None:
    kept.add("from jax import config", 1)
    kept.add('config.update("jax_enable_x64", True)', 2)
    kept.add("a = 1", 3)
    assert places(kept.journal, request("a")) == ["[1]", "[2]", "[3]"]
    kept.journal.resized(2, 2)
    assert places(kept.journal, request("a")) == ["[1]", "[2]", "[3]"]
    kept.add("a = 2", 4)
    for journal in (kept.journal, kept.again()):
        assert places(journal, request("a")) == ["[4]"]
    kept.journal.repeated(kept.journal.needed(request("config"), (), 2).entries)
    assert [entry.gone for entry in kept.again().entries] == [False, False, True, True]


def test_files_of_large_own_modules_that_no_cell_uses_are_not_analysed(kept: Kept) -> None:
    kept.add("a = [1]", 1)
    kept.add("from big import change\nb = change(a)", 2)
    helper = "def change(values):\n    return grow(values)\n"
    grow = "def grow(values):\n    values += [2]\n    return values\n"
    others = [f"def f{i}(x):\n    x += 1\n" * 200 for i in range(1000)]
    texts = {"big": (*others, helper, grow)}
    needed = kept.journal.needed(request("a"), (), 2, texts).entries
    assert [entry.place for entry in needed] == ["[1]", "[2]"]
    assert places(kept.journal, request("a")) == ["[1]"]


def test_a_step_needs_its_data_and_the_names_of_its_program(kept: Kept) -> None:
    for label, name in enumerate(("rows", "rate", "w", "other"), 1):
        kept.add(f"{name} = 1", label)
    assert places(kept.journal, step_request()) == ["[1]", "[2]", "[3]"]


def test_a_step_trains_the_names_that_it_changes(kept: Kept) -> None:
    kept.add("model = 1", 1)
    cell = RunningCell(request=step_request(), ranks=(0, 1))
    kept.journal.add_cell(cell, Run(1, begun=BEGUN), failed=False)
    assert places(kept.journal, request("model"), "model") == ["[1]"]
    with pytest.raises(ReplayError, match=r"^`model`: \[3\] trained it$"):
        places(kept.journal, request("model"))
    kept.journal.clear()
    kept.add("model = 1", 1)
    kept.journal.add_cell(cell, Run(1), failed=False)  # it failed before its first step
    assert places(kept.journal, request("model")) == ["[1]"]


def test_a_program_contains_earlier_training(kept: Kept) -> None:
    kept.add("w = rows = rate = 1", 1)
    kept.add("other = rows", 2)
    cell = RunningCell(request=step_request(), ranks=(0, 1))
    for _ in range(2):
        kept.journal.add_cell(cell, Run(1, begun=BEGUN), failed=False)
    entries = kept.journal.program(0, "", 2)
    assert [entry.place for entry in entries] == ["[1]", "[3]", "[3]"]
    assert [entry.place for entry in kept.journal.until(entries)] == ["[1]", "[2]", "[3]", "[3]"]


def test_a_program_needs_a_training(kept: Kept) -> None:
    kept.add("w = 1", 1)
    with pytest.raises(UsageError, match="a training loop with steps on all replicas"):
        kept.journal.program(0, "", 2)
    kept.journal.add_cell(
        RunningCell(request=step_request(), ranks=(0, 1)), Run(1, begun=BEGUN), failed=False
    )
    with pytest.raises(UsageError, match=r"cell \[9\] has not trained .* are \[3\]"):
        kept.journal.program(9, "", 2)


def test_a_cell_marked_once_or_failed_cannot_be_repeated(kept: Kept) -> None:
    kept.add("a = 1", 1, once=True)
    kept.add("b = 1", 2, failed=True)
    with pytest.raises(ReplayError) as refused:
        places(kept.again(), request("a + b"))
    assert str(refused.value) == (
        "[1] is marked --once, and creates `a`; "
        "[2] did not run to its end, and may have created `b`"
    )


def test_plans_and_missing_cells_are_ignored(kept: Kept) -> None:
    kept.journal.add_cell(None, Run(1), failed=False)
    plan = step_request(planning=Planning(only=True))
    kept.journal.add_cell(RunningCell(request=plan, ranks=(0,)), Run(1), failed=False)
    assert kept.again().last_saved() is None
    assert kept.journal.describe_lost_names(()) == ""


def test_cleared_entries_are_gone(kept: Kept) -> None:
    kept.add("a = 1", 1)
    kept.add("a = 2", 2)
    kept.journal.clear()
    assert places(kept.journal, request("a")) == []
    kept.add("b = 1", 3)
    assert places(kept.again(), request("a + b")) == ["[3]"]


def test_entries_of_all_workers_follow_the_number_of_workers(kept: Kept) -> None:
    kept.add("a = 1", 1)
    kept.add("b = 1", 2, (0,))
    kept.add("c = 1", 3, (0, 1, 2))
    kept.journal.resized(2, 4)
    for journal in (kept.journal, kept.again()):
        ranks = [entry.ranks for entry in journal.needed(request("a + b + c"), (), 4).entries]
        assert ranks == [(0, 1, 2, 3), (0,), (0, 1, 2, 3)]


def test_the_newest_run_with_a_checkpoint_is_found(kept: Kept) -> None:
    assert kept.journal.last_saved() is None
    kept.add("a = 1", 1, saving=Saving(folder="/one"))
    kept.add("a = 2", 2, saving=Saving(folder="/two"))
    kept.add("a = 3", 3)
    kept.journal.add_push(["x"], b"", [0])
    found = kept.journal.last_saved()
    assert found is not None
    assert found.label == 2


def test_imports_are_listed_once_in_order(kept: Kept) -> None:
    kept.add("import math")
    kept.add("from os.path import join")
    kept.add("import json, math")
    assert kept.journal.imports() == ("math", "os.path", "json")


def test_the_last_cell_that_binds_a_name_is_its_place(kept: Kept) -> None:
    kept.add("a = b = 1", 1)
    kept.add("a = 2\nc = 3", 4)
    kept.journal.add_push(["p"], b"", [0])
    assert kept.journal.places(["a", "b", "p", "none"]) == "[4] [1] %dist_push"
    assert kept.journal.places(["a", "c"]) == "[4]"
    assert kept.journal.places(["none"]) == ""


def test_lost_names_are_those_that_no_repeated_cell_binds(kept: Kept) -> None:
    kept.add("a = 1", 1)
    kept.add("b = 1\nx = 1", 2)
    kept.add("a = 2", 3)
    kept.add("print(a)", 4)
    repeated = kept.journal.needed(request("a"), (), 2).entries
    assert [entry.place for entry in repeated] == ["[3]"]
    assert kept.journal.describe_lost_names(repeated) == "without `b`, `x`, defined in [1] [2]"
    everything = kept.journal.needed(request("a + b + x"), (), 2).entries
    assert kept.journal.describe_lost_names(everything) == ""


def test_deleted_cells_are_stored_until_they_run_again(kept: Kept) -> None:
    def add(label: int, cell: str) -> None:
        one = request("w = 1\n", label=label)
        running = RunningCell(request=one, ranks=(0, 1), notebook_cell=cell)
        kept.journal.add_cell(running, Run(1), failed=False)

    add(1, "a")
    add(2, "b")
    kept.journal.note_deleted({"a", "c"})
    assert [(e.cell, e.deleted) for e in kept.again().entries] == [("a", True), ("b", False)]
    add(3, "a")
    assert not any(entry.deleted for entry in kept.again().entries)
