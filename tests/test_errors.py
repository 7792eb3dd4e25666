"""Messages of errors, and the forms that a notebook shows."""

from __future__ import annotations

import inspect
import re

import pytest

from nbdist import errors
from nbdist.errors import (
    CellError,
    CellInterrupt,
    LeftError,
    NbdistError,
    NoClusterError,
    OwnedError,
    PreemptedError,
    RanksLostError,
    RowKeyError,
    VersionError,
)


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    found: dict[str, str | None] = {}
    path: list[tuple[int, str]] = []  # column and name of each class above
    for line in (errors.__doc__ or "").splitlines():
        name = re.search(r"\b[A-Z]\w+Error\b", line)
        if name is None or (path and "──" not in line):
            continue
        while path and path[-1][0] >= name.start():
            path.pop()
        found[name[0]] = path[-1][1] if path else None
        path.append((name.start(), name[0]))
    classes = [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if one.__module__ == errors.__name__ and issubclass(one, Exception)
    ]
    bases = {one.__name__: one.__bases__[0].__name__ for one in classes}
    assert found == {**bases, "NbdistError": None}


def test_a_notebook_shows_an_error_without_frames() -> None:
    error = NbdistError("what failed:\nwhat to do")
    assert error._render_traceback_() == ["NbdistError: what failed:\nwhat to do"]


def test_a_notebook_shows_an_interrupt_in_one_line() -> None:
    stopped = CellInterrupt("stopped after step 3")
    assert isinstance(stopped, KeyboardInterrupt)
    assert stopped._render_traceback_() == ["KeyboardInterrupt: stopped after step 3"]


def test_the_message_of_a_missing_row_is_not_quoted() -> None:
    error = RowKeyError("no row 'x'")
    assert str(error) == "no row 'x'"
    with pytest.raises(KeyError):
        raise error


def test_messages_contain_the_remedy() -> None:
    assert str(NoClusterError("%dist_push")) == (
        "%dist_push needs running workers, and none are running: run %dist_start 4 hosts"
    )
    owned = OwnedError(12)
    assert owned.pid == 12
    assert "its kernel (pid 12) is running: run %dist_stop there" in str(owned)
    assert "run %dist_attach in another one" in str(LeftError())


@pytest.mark.parametrize("pid", [None, 12])
def test_a_cluster_of_another_version_is_described_by_both_versions(pid: int | None) -> None:
    error = VersionError("abc", "nbdist 0.1.9", "nbdist 0.2.0", pid)
    assert (error.started_by, error.owner_pid) == ("nbdist 0.1.9", pid)
    assert str(error).startswith(
        "cluster abc was started by nbdist 0.1.9, and this is nbdist 0.2.0: attach with the version"
    )


def test_the_reason_of_lost_ranks_is_one_line() -> None:
    error = RanksLostError([2, 0], "rank 2 died\nits log: x", ": run %dist_restart")
    assert (error.ranks, error.reason) == ((2, 0), "rank 2 died")
    assert str(error) == "rank 2 died\nits log: x: run %dist_restart"
    preempted = PreemptedError([1], "rank 1 received SIGTERM")
    assert (preempted.ranks, str(preempted)) == ((1,), "rank 1 received SIGTERM")


def cell_error(*traceback: str) -> CellError:
    return CellError(
        rank=2,
        host="gpu1",
        ename="ValueError",
        evalue="x is 0",
        traceback=list(traceback),
        notes=["ranks 0-1 were interrupted"],
    )


def test_an_error_of_a_cell_names_rank_and_host() -> None:
    error = cell_error("line 1")
    message = "ValueError on rank 2@gpu1: x is 0\nranks 0-1 were interrupted"
    assert str(error) == message
    assert (error.traceback, error.notes) == (("line 1",), ("ranks 0-1 were interrupted",))
    assert error._render_traceback_() == [
        "line 1",
        "",
        "raised on rank 2@gpu1",
        "ranks 0-1 were interrupted",
    ]
    assert cell_error()._render_traceback_() == [message]
