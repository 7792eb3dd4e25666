"""Alignment of the ranks' random generators. The runner itself needs engines."""

from __future__ import annotations

from nbdist.execution.runner import Alignment
from tests.execution.doubles import ended

SAME = {"numpy": 1, "python": 2}
STATE = b"states of rank 0"


def alignment(*generators: dict[str, int]) -> Alignment:
    """Return the alignment after a cell on ranks with these generators."""
    found = Alignment()
    found.note(
        {
            rank: ended(rank, generators=own, generator_states=b"" if rank else STATE)
            for rank, own in enumerate(generators)
        }
    )
    return found


def test_ranks_that_drew_other_numbers_restore_the_generators_of_the_chief() -> None:
    other = {"numpy": 5, "python": 2}
    state, message = alignment(SAME, other, SAME, {"numpy": 5, "python": 6}).due(range(4), 4)
    assert state == STATE
    assert message.startswith(
        "rank 1,3 drew other random numbers than rank 0 (numpy, python). All ranks continue from "
        "rank 0's generators. "
    )


def test_only_generators_that_differ_are_named() -> None:
    _, message = alignment(SAME, {"numpy": 1, "python": 3}).due([0, 1], 2)
    assert "than rank 0 (python)." in message


def test_equal_generators_need_nothing() -> None:
    assert alignment(SAME, dict(SAME)).due([0, 1], 2) == (b"", "")


def test_a_cell_on_some_ranks_keeps_their_generators() -> None:
    found = alignment(SAME, {"numpy": 5})
    assert found.due([0], 2) == (b"", "")
    assert found.due([0, 1], 2)[0] == STATE


def test_generators_that_a_rank_has_not_loaded_do_not_differ() -> None:
    assert alignment(SAME, {"numpy": 1}).due([0, 1], 2) == (b"", "")
    assert alignment({"numpy": 1}, SAME).due([0, 1], 2) == (b"", "")


def test_nothing_is_restored_without_the_state_of_the_chief() -> None:
    found = Alignment()
    found.note({1: ended(1, generators={"numpy": 5})})
    assert found.due([0, 1], 2) == (b"", "")
    found.note({0: ended(0, generators=SAME)})
    assert found.due([0, 1], 2) == (b"", "")
    found.note({0: ended(0, generators=SAME, generator_states=STATE)})
    assert found.due([0, 1], 2)[0] == STATE


def test_an_end_without_generators_keeps_the_last_ones() -> None:
    found = alignment(SAME, {"numpy": 5})
    found.note({0: ended(0), 1: ended(1)})
    assert found.due([0, 1], 2)[0] == STATE
    found.note({1: ended(1, generators=SAME)})
    assert found.due([0, 1], 2) == (b"", "")


def test_seeded_ranks_have_no_states() -> None:
    found = alignment(SAME, {"numpy": 5})
    found.forget()
    assert found.due([0, 1], 2) == (b"", "")
