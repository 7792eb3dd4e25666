"""Messages after nbdist restored cancelled collectives."""

from __future__ import annotations

from nbdist.cluster.collectives import describe_restored
from nbdist.records import Restored

CELLS = {"model": "[3]", "iterator": "[5]"}


def messages(*ranks: Restored) -> list[str]:
    return describe_restored(
        ranks, 1, lambda names: " ".join(CELLS[n] for n in names if n in CELLS)
    )


def test_no_message_if_nothing_changed() -> None:
    assert not messages(Restored(), Restored())


def test_changed_names_of_all_ranks_are_in_one_message() -> None:
    assert messages(Restored(changed=("seeds", "model")), Restored(changed=("model",))) == [
        "`model`, `seeds` set to the values of rank 1, because another rank was within a step"
    ]


def test_cells_to_run_again_are_listed() -> None:
    assert messages(Restored(iterators=("iterator",)), Restored(alone=("model", "pushed"))) == [
        "only rank 1 has all variables of `model`, `pushed`: run cell [3] again",
        "iterators may be at another element on each rank (`iterator`): run cell [5] again",
    ]
    assert messages(Restored(alone=("pushed",))) == [
        "only rank 0 has all variables of `pushed`: run the cell that creates them again"
    ]
