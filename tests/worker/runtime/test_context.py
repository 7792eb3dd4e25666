"""The rank of a process: begin, refusal and end of its cells."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from nbdist.records import CellEnded, CellRequest, SocketAddress, WorkerIdentity
from nbdist.worker.runtime import context
from nbdist.worker.runtime.context import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator


def identity() -> WorkerIdentity:
    nowhere = SocketAddress(url="tcp://127.0.0.1:1", server_key=zmq.curve_keypair()[0])
    return WorkerIdentity(rank=1, world_size=4, stream=nowhere, dispatch=nowhere)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(identity())
    yield made
    made.reporter.close()


def ended(cell: int) -> CellEnded:
    return CellEnded(rank=1, cell=cell, status="ok", seconds=1.0)


def request_of(cell: int, strategy: Any = None) -> CellRequest:
    return CellRequest(number=cell, source="", label=1, strategy=strategy, awaits=False)


class Scoped:
    """A strategy whose scope is its name."""

    def scope(self) -> contextlib.AbstractContextManager[str]:
        return contextlib.nullcontext("scope")


class TestRefusal:
    def test_cell_that_has_not_begun_is_refused(self, worker: Worker) -> None:
        assert worker.refuse_unbegun(3)
        assert not worker.may_begin(3)
        assert not worker.may_begin(2)
        assert worker.cell == 0
        assert worker.may_begin(4)
        assert worker.cell == 4

    def test_cell_that_has_begun_is_not_refused(self, worker: Worker) -> None:
        assert worker.may_begin(3)
        assert not worker.refuse_unbegun(3)
        worker.end_cell()
        worker.ended = ended(3)
        assert not worker.refuse_unbegun(3)

    def test_later_cell_is_refused_during_a_cell(self, worker: Worker) -> None:
        worker.may_begin(3)
        assert worker.refuse_unbegun(4)
        assert worker.cell == 3

    def test_refused_cell_stays_refused(self, worker: Worker) -> None:
        worker.refuse_unbegun(5)
        assert worker.refuse_unbegun(4)
        assert not worker.may_begin(5)


class TestCell:
    def test_each_cell_has_a_state_of_its_own(self, worker: Worker) -> None:
        worker.begin_cell(request_of(3), contextlib.nullcontext)  # type: ignore[arg-type]
        worker.progress.step = 5
        worker.begin_cell(request_of(4), contextlib.nullcontext)  # type: ignore[arg-type]
        assert (worker.cell, worker.progress.step, worker.request.number) == (4, 0, 4)

    def test_strategy_is_that_of_the_running_cell(self, worker: Worker) -> None:
        worker.begin_cell(request_of(3, "pjrt"), contextlib.nullcontext)  # type: ignore[arg-type]
        assert worker.strategy == "pjrt"
        worker.end_cell()
        assert worker.strategy is None

    def test_failed_callback_still_ends_the_cell(self, worker: Worker) -> None:
        worker.may_begin(3)
        worker.ending.callback(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.end_cell()
        assert worker.cell == 0

    @pytest.mark.parametrize("error", [None, ValueError("x")])
    def test_callbacks_get_the_error_of_the_cell(
        self, worker: Worker, error: ValueError | None
    ) -> None:
        got: list[Any] = []
        worker.ending.push(lambda *raised: got.append(raised[:2]))
        worker.end_cell(error)
        assert got == [(None if error is None else ValueError, error)]


class TestScope:
    def test_scope_is_that_of_a_built_strategy(self, worker: Worker) -> None:
        worker.strategies["pjrt"] = Scoped()
        with worker.scope("pjrt") as scope:
            assert scope == "scope"
        with worker.scope(None) as scope:
            assert scope is None

    def test_strategy_that_is_not_built_is_refused(self, worker: Worker) -> None:
        with pytest.raises(LookupError, match="strategy 'mirrored' is not built on rank 1"):
            worker.scope("mirrored")


class TestProcess:
    def test_process_without_a_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "_worker", None)
        with pytest.raises(RuntimeError, match="this engine has no rank yet"):
            context.current()
        assert context.if_any() is context.cell_strategy() is None
        assert context.strategies() == {}
        assert not context.in_cell()

    def test_process_is_one_rank(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "_worker", worker)
        assert context.current() is context.if_any() is worker
        with pytest.raises(RuntimeError, match="this engine is already rank 1"):
            context.become(identity())

    def test_strategy_of_the_cell(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "_worker", worker)
        worker.strategies["pjrt"] = scoped = Scoped()
        assert not context.in_cell()
        worker.begin_cell(request_of(3, "pjrt"), contextlib.nullcontext)  # type: ignore[arg-type]
        assert context.in_cell()
        assert context.cell_strategy() is scoped
        worker.begin_cell(request_of(4, "mirrored"), contextlib.nullcontext)  # type: ignore[arg-type]
        assert context.cell_strategy() is None
        worker.end_cell()
        assert context.cell_strategy() is None
