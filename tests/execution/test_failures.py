"""Ends of ranks as one error of the cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.collectives import RESTORED
from nbdist.errors import CellError, RanksLostError
from nbdist.execution.failures import (
    CellOutcome,
    cell_error,
    hang,
    interrupt,
    lone_collective_error,
    lost_error,
    preempted_error,
    root,
    stuck_error,
)
from nbdist.records import Failure
from tests.execution.doubles import ended, failure, where

if TYPE_CHECKING:
    from nbdist.records import CellEnded

HOSTS = dict.fromkeys(range(5), "a")


def outcome(*ends: CellEnded) -> CellOutcome:
    one = CellOutcome({0: "a", 1: "b"})
    for end in ends:
        one.ended[end.rank] = end
    return one


def notes_of(first: int, *ends: CellEnded, hosts: dict[int, str] | None = None) -> list[str]:
    """Return the notes of the error of rank `first`."""
    by_rank = {end.rank: end for end in ends}
    error = cell_error(by_rank[first], by_rank, hosts or dict.fromkeys(by_rank, "a"), ())
    assert isinstance(error, CellError)
    return list(error.notes)


def test_the_first_rank_that_failed_is_the_failure() -> None:
    ends = outcome(ended(0), ended(2, "error"), ended(1, "error"))
    assert ends.first_failure(interrupted=False) == ended(2, "error")
    assert outcome(ended(0)).first_failure(interrupted=False) is None


def test_an_interrupt_is_a_failure_only_if_the_cell_raised_it() -> None:
    ends = outcome(ended(0), ended(1, "interrupted"))
    assert ends.first_failure(interrupted=False) == ended(1, "interrupted")
    assert ends.first_failure(interrupted=True) is None


def test_the_status_of_a_run_is_that_of_its_end() -> None:
    one = outcome()
    assert one.summary() == ("finished", "")
    one.stop()
    assert one.summary() == ("stopped", "")
    one.stop(requested=False)
    assert one.summary() == ("interrupted", "")
    one.failed = ended(1, "error", failure())
    assert one.summary() == ("failed", "ValueError on rank 1@b: bad")
    one.fail(RuntimeError("no disk"))
    assert one.summary() == ("failed", "no disk")
    one.stop()
    assert one.summary() == ("stopped", "")


def test_an_end_without_a_failure_keeps_the_status() -> None:
    one = outcome()
    one.failed = ended(0, "interrupted")
    assert one.summary() == ("finished", "")


def test_the_error_of_a_cell_is_that_of_its_rank() -> None:
    error = cell_error(ended(1, "error", failure()), {}, {1: "b"}, ())
    assert isinstance(error, CellError)
    assert (error.rank, error.host, error.ename, error.evalue) == (1, "b", "ValueError", "bad")
    assert error.traceback == ("line 1",)
    assert error.notes == ("rank 1: still running, perhaps in a collective: run %dist_restart",)


def test_other_ranks_are_grouped_by_their_end() -> None:
    follower = failure("InternalError", "aborted", follows=True)
    notes = notes_of(
        0,
        ended(0, "error", failure()),
        ended(1),
        ended(2, "error", failure("KeyError", "'x'")),
        ended(3),
        ended(4, "error", failure(evalue="other words")),
        ended(5, "interrupted", failure("KeyboardInterrupt")),
        ended(6, "error", failure("AnotherRankError")),
        ended(7, "error", follower),
        ended(8, "error", failure("UnsentError", "did not receive the cell")),
    )
    assert notes == [
        "rank 1,3: finished",
        "rank 2: KeyError: 'x'",
        "rank 4: the same error",
        "rank 5: stopped",
        "rank 6: stopped because of it",
        "rank 7: waited for it in a collective that nbdist cancelled",
        "rank 8: did not receive the cell",
    ]


def test_ranks_without_an_end_are_the_last_note() -> None:
    notes = notes_of(1, ended(1, "error", failure()), ended(0), hosts=HOSTS)
    assert notes == [
        "rank 0: finished",
        "rank 2-4: still running, perhaps in a collective: run %dist_restart",
    ]


def test_cancelled_collectives_are_noted_in_order() -> None:
    first = ended(0, "error", failure())
    error = cell_error(first, {0: first}, HOSTS | {}, ("pjrt", "mirrored"))
    assert isinstance(error, CellError)
    assert error.notes[-2:] == (RESTORED["mirrored"], RESTORED["pjrt"])


def test_a_rank_without_the_cell_is_lost() -> None:
    error = cell_error(ended(3, "error", failure("UnsentError", "sent nothing")), {}, HOSTS, ())
    assert isinstance(error, RanksLostError)
    assert (error.ranks, str(error)) == ((3,), "rank 3: sent nothing")


def test_a_collective_without_the_others_names_them() -> None:
    stack = "Cell In[3], line 2\nall_reduce"
    waits = {2: where(2, place="Cell In[3], line 2", stack=stack), 1: where(1, place="line 9")}
    error = lone_collective_error(waits, {0: ended(0)}, dict.fromkeys(range(3), "a"), ())
    assert isinstance(error, CellError)
    assert (error.rank, error.ename) == (1, "LoneCollectiveError")
    assert error.evalue == (
        "waits at line 9 in a collective, but rank 0 has ended the cell and cannot join: "
        'call the collective on all ranks, not under "if rank == 0"'
    )
    assert error.traceback == ()
    several = lone_collective_error({3: where(3, place="", stack=stack)}, {}, HOSTS, ())
    assert isinstance(several, CellError)
    assert "waits at the end of the cell in" in several.evalue
    assert "rank 0-2,4 have ended" in several.evalue
    assert several.traceback[:2] == ("Cell In[3], line 2", "all_reduce")
    assert several.traceback[-1] == f"LoneCollectiveError: {several.evalue}"


def test_other_ranks_in_a_cancelled_collective_waited_too() -> None:
    alone = ended(0, "error", failure("LoneCollectiveError", "waits"))
    notes = notes_of(0, alone, ended(1, "error", failure("InternalError", follows=True)))
    assert notes == ["rank 1: also waited in the cancelled collective"]


@pytest.mark.parametrize(
    ("step", "killed", "forced", "saves", "text"),
    [
        (1200, (), False, False, "after step 1,200; the workers keep their variables"),
        (3, (), True, False, "in step 3; the workers keep their variables"),
        (0, (), True, False, "at Cell In[3], line 2: f(x); the workers keep their variables"),
        (3, (1,), True, False, "in step 3; all workers restart without their variables"),
        (
            3,
            (),
            False,
            True,
            "after step 3; the workers keep their variables, and --resume continues the run",
        ),
    ],
)
def test_an_interrupt_is_described_by_its_place_and_the_kept_state(
    step: int, killed: tuple[int, ...], forced: bool, saves: bool, text: str
) -> None:
    stopped = Failure(
        ename="KeyboardInterrupt", evalue="", traceback=("Cell In[3], line 2: f(x)",), same=""
    )
    ends = [ended(0), ended(1, "interrupted", stopped)]
    assert str(interrupt(ends, step, killed, forced=forced, saves=saves)) == f"stopped {text}"


def test_a_consequence_is_replaced_by_its_cause() -> None:
    consequence = ended(0, "error", failure(follows=True))
    cause = ended(2, "error", failure("KeyError"))
    interrupted = ended(1, "interrupted", failure("KeyboardInterrupt"))
    ends = [consequence, interrupted, ended(3), cause]
    assert root(consequence, ends) is cause
    assert root(consequence, ends[:3]) is consequence
    assert root(cause, ends) is cause
    assert root(None, ends) is None


@pytest.mark.parametrize(
    ("dead", "step", "words", "text"),
    [
        ([1], 3, "", "rank 1@a died after step 3: run %dist_restart for new workers"),
        ([1, 2], 0, "", "rank 1-2@a died in the cell: run %dist_restart for new workers"),
        ([1, 9], 0, "", "rank 1,9 died in the cell: run %dist_restart for new workers"),
        (
            [1],
            0,
            "Killed",
            "rank 1@a died in the cell: run %dist_restart for new workers\nrank 1: Killed",
        ),
    ],
)
def test_a_loss_names_rank_host_and_step(dead: list[int], step: int, words: str, text: str) -> None:
    error = lost_error(dead, HOSTS | {9: "b"}, (), step, words)
    assert str(error) == text
    assert error.ranks == tuple(dead)


def test_ranks_that_do_not_respond_are_lost_too() -> None:
    error = lost_error([2], HOSTS, [0, 2], 0, "", "was killed")
    assert error.ranks == (0, 2)
    assert error.reason == "rank 2@a was killed in the cell"


def test_stuck_ranks_are_lost() -> None:
    error = stuck_error({3, 1}, "no step for 60 s")
    assert error.ranks == (1, 3)
    assert str(error) == "no step for 60 s\nrank 1,3 is stuck: run %dist_restart"
    assert str(stuck_error((), "no step for 60 s")) == "no step for 60 s"


def test_a_preemption_names_the_checkpoint() -> None:
    saved = preempted_error({2, 1}, "rank 1@a", "after step 3", saves=True)
    assert saved.ranks == (1, 2)
    assert str(saved) == (
        "rank 1@a received SIGTERM: the run stopped after step 3; use --resume to continue from "
        "there. Run %dist_restart for new workers first"
    )
    assert "; it has no --checkpoint. Run" in str(preempted_error({1}, "r", "s", saves=False))


def test_a_hang_names_positions_and_silent_ranks() -> None:
    found = {
        3: where(3, waits=True, step=4),
        0: where(0, step=5, place="line 9"),
        2: where(2, waits=True, step=5),
    }
    assert hang(found, dict.fromkeys(range(4), "a")) == (
        "rank 0@a is at line 9, step 5; rank 1@a does not respond; "
        "the others wait in a collective of step 4-5"
    )
    assert hang({1: where(1, step=0)}, {1: "a"}) == "rank 1@a is at line 2"


def test_a_hang_of_all_ranks_shows_equal_stacks_once() -> None:
    found = {rank: where(rank, waits=True, step=2, stack="f\ng") for rank in range(2)}
    found[2] = where(2, waits=True, step=2)
    assert hang(found, dict.fromkeys(range(3), "a")).splitlines() == [
        "all ranks wait in a collective of step 2",
        "rank 0-1:",
        "f",
        "g",
    ]
