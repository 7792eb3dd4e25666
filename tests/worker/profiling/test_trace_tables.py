"""Tables of a trace, and the line that each operation is attributed to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import HOST_COPIES, OWN_RANK
from nbdist.worker.profiling.cell_lines import CellLines
from nbdist.worker.profiling.hlo_lines import Frame, Operation, Program, Programs
from nbdist.worker.profiling.jax_profiler import HostThread
from nbdist.worker.profiling.trace import Span
from nbdist.worker.profiling.trace_tables import (
    NOWHERE,
    Place,
    Spent,
    by_device,
    by_line,
    by_operation,
    own_seconds,
    spent_of,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def spent(kind: Any, name: str, seconds: float, device: int = 0, place: Place = NOWHERE) -> Spent:
    return Spent(Span(kind, name, device, 0, 0.0, seconds), name, place, seconds)


def test_operations_are_summed_by_name_and_kind() -> None:
    parts = [
        spent("compute", "dot", 1.0),
        spent("collective", "dot", 2.5),
        spent("compute", "dot", 2.0),
        spent("compute", "tanh", 0.5),
    ]
    assert [(o.name, o.kind, o.seconds, o.count) for o in by_operation(parts)] == [
        ("dot", "compute", 3.0, 2),
        ("dot", "collective", 2.5, 1),
        ("tanh", "compute", 0.5, 1),
    ]
    assert by_operation([]) == ()


def test_devices_without_operations_are_idle() -> None:
    parts = [
        spent("to_host", "copy", 0.5, HOST_COPIES),
        spent("compute", "dot", 1.0, 1),
        spent("to_device", "copy", 2.0, 1),
        spent("collective", "psum", 6.0, 3),
    ]
    found = by_device(parts, [0, 1], 4.0)
    assert [(d.device, d.rank, d.idle_s) for d in found] == [
        (0, OWN_RANK, 4.0),
        (1, OWN_RANK, 1.0),
        (3, OWN_RANK, 0.0),
        (HOST_COPIES, OWN_RANK, 0.0),
    ]
    assert (found[1].compute_s, found[1].to_device_s) == (1.0, 2.0)
    assert (found[2].collective_s, found[3].to_host_s) == (6.0, 0.5)


def test_lines_of_the_cell_precede_earlier_cells_and_unknown_lines() -> None:
    earlier = Place("In[1]", 1, "cell-1")
    parts = [
        spent("compute", "a", 1.0),
        spent("compute", "b", 1.0, place=earlier),
        spent("to_host", "c", 1.0, place=Place("", 9, "")),
        spent("to_device", "d", 2.0, place=Place("", 9, "")),
        spent("collective", "e", 3.0, place=Place("", 2, "")),
    ]
    found = by_line(parts, lambda place: f"text {place.line}")
    assert [(line.cell, line.line, line.text) for line in found] == [
        ("", 2, "text 2"),
        ("", 9, "text 9"),
        ("In[1]", 1, "text 1"),
        ("", 0, "text 0"),
    ]
    assert [line.transfer_s for line in found] == [0.0, 3.0, 0.0, 0.0]
    assert (found[0].collective_s, found[2].compute_s) == (3.0, 1.0)


def test_time_counts_for_one_of_two_kinds_and_for_the_innermost_span() -> None:
    spans = [
        Span("collective", "psum", 0, 0, 0, 10),
        Span("compute", "fusion", 0, 0, 2, 6),
        Span("compute", "dot", 0, 0, 4, 8),
        Span("compute", "dot", 1, 0, 4, 8),
        Span("to_host", "copy", 0, 0, 9, 12),
    ]
    assert own_seconds(spans) == [4, 2, 4, 4, 2]


class Cells:
    """Two cells of a notebook, of which the second one ran during a trace."""

    def __init__(self, shell: InteractiveShell) -> None:
        shell.user_ns["clock"] = time.time_ns
        shell.run_cell("def helper():\n    return 1\nearlier = helper.__code__.co_filename\n")
        self.lines = CellLines(shell)
        self.lines.begin()
        shell.run_cell(
            "started = clock()\nthere = (lambda: 0).__code__.co_filename\nat = clock()\n"
        )
        self.lines.end()
        names = shell.user_ns
        self.earlier: str = names["earlier"]
        self.current: str = names["there"]
        self.started_ns: int = names["started"]
        self.launched_s: float = (names["at"] - names["started"]) / 1e9

    def place(self, *frames: Frame, launched: bool = False, program: str = "jit_step") -> Place:
        """Return the place of an operation with these frames."""
        operation = Operation("dot", frames)
        programs = Programs({1: Program(program, {"dot.1": operation})})
        launches = ((program.removeprefix("jit_"), self.launched_s),) if launched else ()
        thread = HostThread(self.started_ns, launches, frozenset())
        begin_s = self.launched_s + 1
        span = Span("compute", "dot.1", 0, 1, begin_s, begin_s + 1, 1, program, "dot.1")
        (part,) = spent_of([span], programs, thread, self.lines)
        return part.place


@pytest.fixture
def cells(shell: InteractiveShell) -> Cells:
    return Cells(shell)


def test_line_within_a_compiled_function_of_the_cell(cells: Cells) -> None:
    caller = Frame(cells.current, "<module>", 3)
    within = Frame(cells.current, "Model.step", 1)
    library = Frame("/lib/jax.py", "dot", 99)
    assert cells.place(caller, within, library, launched=True) == Place("", 1, "")
    inner = Frame(cells.current, "helper", 2)
    assert cells.place(caller, within, inner, library, launched=True) == Place("", 2, "")


def test_function_of_an_earlier_cell_counts_for_the_line_that_launched_it(cells: Cells) -> None:
    frames = Frame(cells.current, "<module>", 1), Frame(cells.earlier, "step", 2)
    assert cells.place(*frames, launched=True) == Place("", 3, "")


def test_operation_without_a_launch_counts_for_the_line_it_was_compiled_for(cells: Cells) -> None:
    caller = Frame(cells.current, "<module>", 2)
    assert cells.place(caller, Frame(cells.earlier, "step", 2)) == Place("", 2, "")
    earlier = cells.place(Frame(cells.earlier, "step", 2))
    assert (earlier.line, earlier.file) == (2, cells.earlier)
    assert earlier.cell.startswith("In[")
    assert cells.place(Frame("/lib/jax.py", "step", 2)) == NOWHERE


def test_operation_of_no_program_has_a_plain_name(cells: Cells) -> None:
    spans = [
        Span("compute", "fusion.12.3", 0, 0, 0, 1),
        Span("to_device", "TransferToDevice", 0, 0, 2, 3),
    ]
    thread = HostThread(cells.started_ns, (), frozenset())
    parts = spent_of(spans, Programs({}), thread, cells.lines)
    assert [part.name for part in parts] == ["fusion", "copy to device"]
