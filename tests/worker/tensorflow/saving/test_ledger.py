"""Record of rank 0's saves, and the answers for ranks that ask for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.worker.tensorflow.saving.ledger import ALONE_S, SaveLedger
from nbdist.worker.tensorflow.saving.messages import Answer, AskSave

CELL = 4
DONE = Answer(status="done")


def worker(cell: int = CELL, ended: int = 0) -> Any:
    """Return rank 0 in a cell, after the end of another."""
    return SimpleNamespace(cell=cell, ended=SimpleNamespace(cell=ended) if ended else None)


def waits(seconds: float = 0.0) -> Any:
    """Return a clock of rank 0 that has waited in a collective."""
    return SimpleNamespace(seconds=lambda: seconds)


def ask(path: str, count: int = 1, cell: int = CELL, rank: int = 1) -> AskSave:
    return AskSave(cell=cell, rank=rank, path=path, count=count)


def status(ledger: SaveLedger, asked: AskSave, **options: Any) -> str:
    rank_0 = options.pop("rank_0", worker())
    return str(ledger.answer(asked, rank_0, waits(**options)).status)


def saved(*paths: str, cell: int = CELL) -> SaveLedger:
    ledger = SaveLedger()
    for path in paths:
        with ledger.saving(cell, path) as entry:
            entry.answer = DONE
    return ledger


def test_save_is_pending_until_its_answer() -> None:
    ledger = SaveLedger()
    with ledger.saving(CELL, "a") as entry:
        assert status(ledger, ask("a")) == "pending"
        assert ledger.in_progress("a") == Answer(status="pending")
        assert not ledger.knows("a")
        entry.answer = DONE
    assert ledger.answer(ask("a"), worker(), waits()) is DONE
    assert ledger.in_progress("a") is None
    assert ledger.knows("a")


def test_failed_save_is_answered_with_its_error() -> None:
    ledger = SaveLedger()
    with pytest.raises(KeyError), ledger.saving(CELL, "a"):
        raise KeyError("x")
    answer = ledger.answer(ask("a"), worker(), waits())
    assert (answer.status, answer.error) == ("failed", "KeyError: 'x'")
    assert not ledger.knows("a")


def test_saves_of_a_path_are_counted() -> None:
    ledger = saved("a", "b", "a")
    with ledger.saving(CELL, "a") as entry:
        assert [status(ledger, ask("a", count)) for count in (1, 2, 3, 4)] == [
            *("done", "done", "pending", "pending")
        ]
        entry.answer = DONE


def test_cancelled_save_does_not_count() -> None:
    ledger = SaveLedger()
    with ledger.saving(CELL, "a") as entry:
        entry.path = ""
    assert status(ledger, ask("a")) == "pending"


def test_saves_of_an_earlier_cell_do_not_count() -> None:
    ledger = saved("a", cell=CELL - 1)
    assert status(ledger, ask("a")) == "pending"
    with ledger.saving(CELL, "b") as entry:
        entry.answer = DONE
    assert status(ledger, ask("b")) == "done"
    assert ledger.knows("a")


@pytest.mark.parametrize(
    ("rank_0", "expected"),
    [
        (worker(), "pending"),
        (worker(cell=CELL + 1), "alone"),
        (worker(cell=0, ended=CELL), "alone"),
        (worker(cell=0, ended=CELL - 1), "pending"),
        (worker(cell=CELL - 1), "pending"),
    ],
)
def test_rank_continues_alone_after_rank_0_has_left_the_cell(rank_0: Any, expected: str) -> None:
    assert status(SaveLedger(), ask("a"), rank_0=rank_0) == expected


def test_rank_continues_alone_while_rank_0_waits_in_a_collective() -> None:
    assert status(SaveLedger(), ask("a"), seconds=ALONE_S) == "alone"
    assert status(SaveLedger(), ask("a"), seconds=ALONE_S / 2) == "pending"
    between = worker(cell=0, ended=CELL - 1)
    assert status(SaveLedger(), ask("a"), rank_0=between, seconds=ALONE_S) == "pending"


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_2", "expected"),
    [
        ("model-0", "model-2", "alone"),
        ("run0/model-0.keras", "run2/model-2.keras", "alone"),
        ("epoch1/rank0", "epoch1/rank2", "alone"),
        ("epoch1/rank0", "epoch2/rank2", "pending"),
        ("model-0", "model-1", "pending"),
        ("model-1", "model-2", "pending"),
        ("model-0", "other-2", "pending"),
        ("model-0", "model", "pending"),
        ("model-00", "model-02", "alone"),
    ],
)
def test_path_with_the_ranks_own_number_is_a_save_of_its_own(
    of_rank_0: str, of_rank_2: str, expected: str
) -> None:
    assert status(saved(of_rank_0), ask(of_rank_2, rank=2)) == expected


def test_files_of_a_save_are_known_by_prefix(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = saved("run/ckpt")
    assert ledger.knows(f"{tmp_path}/run/ckpt")
    assert ledger.knows("run/ckpt-12")
    assert not ledger.knows("run/ckpt2")
    assert not ledger.knows("run")
