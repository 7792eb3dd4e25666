"""Requests for the stacks of ranks, and the stored stacks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from nbdist.records import RankPosition
from tests.runs import new_run, read

if TYPE_CHECKING:
    from pathlib import Path


def position(rank: int = 1, clock_s: float = 0.0) -> RankPosition:
    return RankPosition(
        rank=rank,
        cell=1,
        step=7,
        place="Cell In[3], line 2",
        waits=True,
        cpu_s=1.0,
        stack="  Cell In[3], line 2, in <module>\n    wait()",
        clock_s=clock_s,
        threads="MainThread:\n",
    )


def test_each_request_is_taken_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.stacks.take_requests() == set()
    for rank in (1, 3, 1):
        read(run).ask_for_stack(rank)
    assert run.stacks.take_requests() == {1, 3}
    assert run.stacks.take_requests() == set()
    read(run).ask_for_stack(0)
    assert run.stacks.take_requests() == {0}
    run.close()


def test_last_stack_of_a_rank_is_stored(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert read(run).stack(1) is None
    run.take(position())
    stack = read(run).stack(1)
    assert stack is not None
    assert (stack.rank, stack.step, stack.place, stack.waits) == (1, 7, "Cell In[3], line 2", True)
    assert stack.threads == "MainThread:\n"
    assert read(run).stack(0) is None
    run.close()


def test_regular_queries_of_the_monitor_are_not_stored(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.take(position(clock_s=5.0))
    assert read(run).stack(1) is None
    run.close()


def test_deleted_run_is_not_created_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stored = read(run)
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        stored.ask_for_stack(1)
    run.take(position())
    assert run.stacks.take_requests() == set()
    assert not run.path.exists()
    run.close()
