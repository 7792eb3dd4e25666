"""Names of a cell whose values nbdist saves or compares."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest

from nbdist.records import CellRequest
from nbdist.worker.runtime.cell_state import CellState, NamesOfCell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Value:
    """A value with weak references."""


def test_names_that_the_cell_only_reads_are_bound(shell: InteractiveShell) -> None:
    shell.user_ns.update(a=1, b=2)
    assert NamesOfCell(["b", "missing", "a"]).bound() == ("b", "a")


def test_made_name_is_bound_once_it_has_another_value(shell: InteractiveShell) -> None:
    shell.user_ns["model"] = earlier = Value()
    names = NamesOfCell(["model"], makes=["model"])
    assert names.bound() == ()
    shell.user_ns["model"] = Value()
    assert names.bound() == ("model",)
    shell.user_ns["model"] = earlier
    assert names.bound() == ()


def test_made_name_without_an_earlier_value_is_bound(shell: InteractiveShell) -> None:
    names = NamesOfCell(["new"], makes=["new"])
    assert names.bound() == ()
    shell.user_ns["new"] = Value()
    assert names.bound() == ("new",)


def test_value_without_weak_references_counts_from_the_start(shell: InteractiveShell) -> None:
    shell.user_ns["number"] = 5
    assert NamesOfCell(["number"], makes=["number"]).bound() == ("number",)


def test_earlier_value_is_not_kept_alive(shell: InteractiveShell) -> None:
    shell.user_ns["model"] = Value()
    earlier = weakref.ref(shell.user_ns["model"])
    names = NamesOfCell(["model"], makes=["model"])
    shell.user_ns["model"] = Value()
    assert earlier() is None
    assert names.bound() == ("model",)


def test_cell_without_a_request_refuses_to_stop() -> None:
    state = CellState()
    assert state.request.options.guard == 0
    with pytest.raises(RuntimeError, match="no cell runs on this rank"):
        state.stop_point()


def test_source_is_a_checksum_of_the_text() -> None:
    def source_of(text: str) -> int:
        request = CellRequest(number=1, source=text, label=1, strategy=None, awaits=False)
        return CellState(request).source

    assert source_of("a = 1") == source_of("a = 1") != source_of("a = 2")
