"""Commands that the watchdog executes while the main thread runs a cell."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist.records import (
    AbortCollectives,
    Beat,
    CellEnded,
    Diagnose,
    ForceInterrupt,
    RankPosition,
    StatusQuery,
)
from nbdist.worker import watchdog
from nbdist.worker.runtime.cell_state import Progress
from tests.worker.doubles import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.records.commands import Command

CELL = 3


class Rank:
    """Double of a `Worker` in a cell, with the real commands of the watchdog."""

    rank = 0

    def __init__(self, cell: int = CELL, ended: int = 0, refuses: bool = False) -> None:
        self.reporter = Recorder()
        self.reporter.cell = cell
        self.cell = cell
        self.progress = Progress(step=7, tested=2)
        self.strategies: dict[str, Any] = {}
        self.broken: set[str] = set()
        self.preempted = False
        self.interrupts = SimpleNamespace(force_interrupt=lambda: self.forced.append(cell))
        self.forced: list[int] = []
        self.ended = CellEnded(rank=0, cell=ended, status="ok", seconds=1.0) if ended else None
        self._refuses = refuses

    def refuse_unbegun(self, cell: int) -> bool:
        del cell
        return self._refuses

    def take(self, command: Command | bytes) -> list[Any]:
        """Execute a command; return the records that it sends."""
        frame = command if isinstance(command, bytes) else msgspec.msgpack.encode(command)
        worker: Any = self
        watchdog._take(worker, frame, threading.get_ident())
        records, self.reporter.records = self.reporter.records, []
        return records


class TestStatus:
    def test_running_cell_answers_with_a_heartbeat(self) -> None:
        (beat,) = Rank().take(StatusQuery(number=CELL))
        assert beat == Beat(rank=0, cell=CELL, step=7, tested=2)

    def test_ended_cell_answers_with_its_end(self) -> None:
        rank = Rank(cell=0, ended=CELL)
        assert rank.take(StatusQuery(number=CELL)) == [rank.ended]

    def test_end_of_another_cell_is_no_answer(self) -> None:
        (answer,) = Rank(ended=CELL - 1).take(StatusQuery(number=CELL))
        assert isinstance(answer, Beat)

    def test_cell_that_has_not_begun_ends_with_an_error(self) -> None:
        (answer,) = Rank(cell=0, refuses=True).take(StatusQuery(number=CELL))
        assert isinstance(answer, CellEnded)
        assert (answer.cell, answer.status) == (CELL, "error")
        assert answer.failure is not None
        assert answer.failure.ename == "UnsentError"


class TestStacks:
    def test_stack_of_every_thread_is_reported_on_request(self) -> None:
        begun, may_end = threading.Event(), threading.Event()

        def other() -> None:
            begun.set()
            may_end.wait()

        thread = threading.Thread(target=other, name="another thread")
        thread.start()
        begun.wait()
        main, answers = threading.get_ident(), list[Any]()
        rank: Any = Rank()

        def take(frame: bytes) -> None:
            watchdog._take(rank, frame, main)
            answers.extend(rank.reporter.records)

        for query in (Diagnose(number=CELL, threads=True), Diagnose(number=CELL)):
            frame = msgspec.msgpack.encode(query)
            watching = threading.Thread(target=take, args=(frame,), name="watchdog")
            watching.start()
            watching.join()
        may_end.set()
        thread.join()
        assert answers[0].threads.startswith("MainThread:\n")
        assert "another thread:\n" in answers[0].threads
        assert "may_end.wait()" in answers[0].threads
        assert "watchdog:" not in answers[0].threads
        assert answers[-1].threads == ""


class TestCommands:
    def test_interrupt_is_forced_only_in_its_cell(self) -> None:
        for cell, forced in ((CELL, [CELL]), (CELL + 1, [])):
            rank = Rank(cell=cell)
            assert rank.take(ForceInterrupt(number=CELL)) == []
            assert rank.forced == forced

    def test_collectives_of_a_strategy_that_is_not_built_are_left_alone(self) -> None:
        rank = Rank()
        rank.take(AbortCollectives(number=CELL, strategy="pjrt"))
        assert rank.broken == set()

    def test_strategy_is_broken_after_its_collectives_are_aborted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from nbdist.worker.jax import backend

        aborted: list[bool] = []
        monkeypatch.setattr(backend, "abort_collectives", lambda: aborted.append(True))
        rank = Rank()
        rank.strategies["pjrt"] = object()
        rank.take(AbortCollectives(number=CELL - 1, strategy="pjrt"))
        assert (aborted, rank.broken) == ([], set())
        rank.take(AbortCollectives(number=CELL, strategy="pjrt"))
        assert (aborted, rank.broken) == ([True], {"pjrt"})

    @pytest.mark.parametrize("frame", [b"\xc1", msgspec.msgpack.encode({"type": "Unknown"})])
    def test_invalid_command_is_logged(
        self, frame: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert Rank().take(frame) == []
        assert "the watchdog failed to execute a command" in caplog.text


def in_cell(shell: InteractiveShell, source: str, take: Callable[[], None]) -> str:
    """Run a cell that calls `take`; return the cell's name."""
    shell.user_ns["take"] = take
    result = shell.run_cell(f"{source}\nname = (lambda: 0).__code__.co_filename\n")
    result.raise_error()
    return " ".join(shell.compile.format_code_name(shell.user_ns["name"]))


class TestWhere:
    def where(self, shell: InteractiveShell, source: str, rank: Rank, **options: Any) -> Any:
        answers: list[Any] = []
        command = Diagnose(number=CELL, **options)
        name = in_cell(shell, source, lambda: answers.extend(rank.take(command)))
        return name, answers

    def test_place_is_the_innermost_line_of_the_cell(self, shell: InteractiveShell) -> None:
        source = "def inner():\n    take()\n\nx = 1\ninner()"
        name, (where,) = self.where(shell, source, Rank())
        assert (where.place, where.step) == (f"{name}, line 2", 7)
        assert where.collective is None
        assert where.cpu_s > 0
        lines = where.stack.splitlines()
        assert lines[:4] == [
            f"  {name}, line 5, in <module>",
            "    inner()",
            f"  {name}, line 2, in inner",
            "    take()",
        ]

    def test_main_thread_outside_of_a_cell_has_no_place(self) -> None:
        (where,) = Rank().take(Diagnose(number=CELL))
        assert (where.place, where.stack) == ("", "")

    def test_another_cell_is_not_diagnosed(self) -> None:
        for waits in (False, True):
            assert Rank(cell=CELL + 1).take(Diagnose(number=CELL, waits=waits)) == []

    def test_wait_is_reported_with_the_clocks(self, shell: InteractiveShell) -> None:
        name, (where,) = self.where(shell, "take()", Rank(), waits=True)
        assert where.place == f"{name}, line 1"
        assert where.process_s > 0
        assert where.clock_s > 0
        assert where.collective is None

    def test_rank_that_ended_the_cell_reports_what_still_runs(self) -> None:
        (where,) = Rank(cell=0, ended=CELL).take(Diagnose(number=CELL, waits=True))
        assert isinstance(where, RankPosition)
        assert (where.cell, where.place, where.waits, where.under_way) == (CELL, "", False, False)
        assert where.clock_s > 0

    def test_rank_in_the_next_cell_does_not_answer_for_the_last(self) -> None:
        assert Rank(cell=CELL + 1, ended=CELL).take(Diagnose(number=CELL, waits=True)) == []


class TestPreemption:
    def test_idle_engine_ends_at_once(self) -> None:
        worker: Any = Rank(cell=0)
        with pytest.raises(SystemExit) as ended:
            watchdog._note_preemption(worker)
        assert ended.value.code == 0

    def test_cell_continues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[tuple[int, bytes]] = []
        monkeypatch.setattr(watchdog, "_preemption_pipe", [9])
        monkeypatch.setattr(watchdog, "os", SimpleNamespace(write=lambda *a: written.append(a)))
        worker: Any = Rank()
        watchdog._note_preemption(worker)
        assert worker.preempted
        assert written == [(9, b"!")]
