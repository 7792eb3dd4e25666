"""Attribution of a trace: spans, lines, programs and self time."""

from __future__ import annotations

import linecache
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.records import HOST_COPIES
from nbdist.worker.profiling import cell_lines
from nbdist.worker.profiling.cell_lines import CellLines
from nbdist.worker.profiling.hlo_lines import (
    Operation,
    Program,
    Programs,
    programs_of,
    read_program,
)
from nbdist.worker.profiling.jax_profiler import HostThread, holds_others, is_collective
from nbdist.worker.profiling.trace import KINDS, Span
from nbdist.worker.profiling.trace_tables import NOWHERE, launches_of, own_seconds, spent_of
from nbdist.worker.remote import cell_trace
from nbdist.worker.runtime.spans import covered

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

MOMENTS = st.integers(0, 20)
SPANS = st.lists(
    st.builds(
        lambda kind, device, begin, length: Span(kind, kind, device, 0, begin, begin + length),
        st.sampled_from(KINDS),
        st.integers(0, 1),
        MOMENTS,
        MOMENTS,
    ),
    max_size=12,
)


def launched_span(module: str, begin_s: float, run: int) -> Span:
    return Span("compute", "dot.1", 0, run, begin_s, begin_s + 1, 3, module, "dot.1")


@given(SPANS)
def test_self_times_add_up_to_busy_time(spans: list[Span]) -> None:
    own = own_seconds(spans)
    together: dict[int, float] = defaultdict(float)
    busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span, seconds in zip(spans, own, strict=True):
        assert 0 <= seconds <= span.end_s - span.begin_s
        together[span.device] += seconds
        busy[span.device].append((span.begin_s, span.end_s))
    for device, pairs in busy.items():
        assert together[device] == covered(np.array(pairs, float))


@given(SPANS)
def test_computation_hides_other_spans(spans: list[Span]) -> None:
    own = own_seconds(spans)
    alone = [span for span in spans if span.kind == "compute"]
    computed = sum(o for span, o in zip(spans, own, strict=True) if span.kind == "compute")
    assert computed == sum(own_seconds(alone))


def test_innermost_span_gets_the_time() -> None:
    spans = [Span("compute", "fusion", 0, 0, 0, 10), Span("compute", "dot", 0, 0, 2, 5)]
    assert own_seconds(spans) == [7, 3]


def test_launches_match_runs_in_order() -> None:
    """The second run started long after both launches."""
    thread = HostThread(0, (("<lambda>", 1.0), ("<lambda>", 2.0), ("sin", 3.0)), frozenset())
    spans = [
        launched_span("jit__lambda", 5, 2),
        launched_span("jit__lambda", 4, 1),
        launched_span("jit_sin", 9, 7),
    ]
    assert launches_of(spans, thread) == [2.0, 1.0, 3.0]


def test_run_before_the_trace_has_no_launch() -> None:
    thread = HostThread(0, (("f", 1.0), ("f", 6.0)), frozenset())
    spans = [launched_span("jit_f", begin_s, run) for run, begin_s in enumerate((0.5, 2.0, 7.0))]
    assert launches_of(spans, thread) == [None, 1.0, 6.0]


def test_copies_of_other_threads_have_no_launch() -> None:
    spans = [Span("to_device", "copy", 0, 0, begin, begin + 1) for begin in (1.0, 2.0)]
    assert launches_of(spans, HostThread(0, (), frozenset([2.0]))) == [None, 2.0]


def test_opcode_determines_kind_of_operation(shell: InteractiveShell) -> None:
    opcodes = {"psum.1": "dot", "mine.2": "all-reduce", "loop.3": "while"}
    operations = {name: Operation(opcode, ()) for name, opcode in opcodes.items()}
    spans = [
        Span("compute", name, 0, 0, begin, begin + 1, 1, "jit_f", name)
        for begin, name in enumerate(operations)
    ]
    programs = Programs({1: Program("jit_f", operations)})
    spent = spent_of(spans, programs, HostThread(0, (), frozenset()), CellLines(shell))
    parts = [(part.name, part.span.kind, part.place) for part in spent]
    assert parts == [("dot", "compute", NOWHERE), ("all-reduce", "collective", NOWHERE)]


def test_copy_to_host_starts_after_its_computation(shell: InteractiveShell) -> None:
    spans = [
        Span("to_host", "np.asarray(jax.Array)", 0, 0, 0.0, 10.0),
        Span("compute", "dot.1", 0, 0, 1.0, 8.0),
    ]
    spent = spent_of(spans, Programs({}), HostThread(0, (), frozenset()), CellLines(shell))
    assert [(part.span.device, part.seconds) for part in spent] == [(HOST_COPIES, 2), (0, 7)]


def compiled_program(function: Callable[..., object], *arguments: object) -> Program:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return read_program("jit_function", text)


def test_operations_have_their_source_lines() -> None:
    def inner(a: jax.Array) -> jax.Array:
        return a @ a  # the product

    def function(a: jax.Array) -> jax.Array:
        return jnp.tanh(inner(a))  # the call

    lines = {text: line for line, text in _own_lines(inner, function)}
    operations = compiled_program(function, jnp.ones((64, 64))).operations.values()
    product = next(o for o in operations if o.name == "dot")
    assert [(f.function.rpartition(".")[2], f.line) for f in product.frames][-2:] == [
        ("function", lines["the call"]),
        ("inner", lines["the product"]),
    ]
    assert product.frames[-1].file == __file__


def _own_lines(*functions: Callable[..., object]) -> list[tuple[int, str]]:
    """Return the numbered lines of this file that end in a comment within the functions."""
    numbered = enumerate(linecache.getlines(__file__), start=1)
    spanned = {f.__code__.co_firstlineno + offset for f in functions for offset in (0, 1)}
    return [(n, text.rpartition("# ")[2].strip()) for n, text in numbered if n in spanned]


def test_fused_operation_is_named_after_its_root() -> None:
    text = """
FileNames
1 "cell.py"

FunctionNames
1 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %tanh.1 = f32[2]{0} tanh(%p), metadata={op_name="tanh" stack_frame_id=1}
}

ENTRY %main (a: f32[2]) -> (f32[2], f32[2]) {
  %a = f32[2]{0} parameter(0)
  %f = f32[2]{0} fusion(%a), kind=kLoop, calls=%fused
  %s = (f32[2]{0}, u32[]) all-reduce-start(%a), to_apply=%add
  ROOT %call = (f32[2]{0}) custom-call(%f), custom_call_target="cublas$gemm"
}
"""
    operations = read_program("jit_f", text).operations
    assert operations["f"].name == "fusion of tanh"
    assert [frame.line for frame in operations["f"].frames] == [7]
    assert operations["s"].name == "all-reduce"
    assert operations["call"].name == "cublas$gemm"
    assert operations["call"].frames == ()


def test_program_with_wrong_number_is_found_by_name() -> None:
    """Programs that JAX loads from its cache have such numbers."""
    sin, cos = (read_program(name, "") for name in ("jit_sin", "jit_cos"))
    operation = next(iter(compiled_program(jnp.sin, jnp.ones(4)).operations.values()))
    sin.operations["sine"] = cos.operations["sine"] = operation
    assert Programs({1: sin, 2: cos}).find(2, "jit_sin", "sine") == operation
    assert Programs({1: sin, 2: sin}).find(3, "jit_sin", "sine") is None
    assert Programs({1: sin}).find(1, "jit_sin", "cosine") is None


def test_invalid_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="wire type 7"):
        programs_of(b"\x0f\x00")


@pytest.mark.parametrize("name", ["all-reduce", "psum_invariant.7", "fusion of all-gather"])
def test_collectives_are_recognized_by_name(name: str) -> None:
    assert is_collective(name)
    assert not holds_others(name)


@pytest.mark.parametrize("name", ["dot", "fusion of add", "reduce", "broadcast.1", "condition"])
def test_other_operations_are_not_collectives(name: str) -> None:
    assert not is_collective(name)
    assert not holds_others(name)


def test_lines_are_followed_into_functions_and_back(shell: InteractiveShell) -> None:
    lines = CellLines(shell)
    shell.user_ns["noted"] = noted = []
    shell.user_ns["clock"] = time.time_ns
    lines.begin()
    shell.run_cell("def f():\n    noted.append(clock())\nf()\nnoted.append(clock())\n")
    lines.end()
    assert [lines.at(moment) for moment in noted] == [2, 4]
    assert lines.at(time.time_ns()) == 0
    assert lines.is_whole
    assert sys.gettrace() is None


def test_earlier_cells_are_recognized_but_not_followed(shell: InteractiveShell) -> None:
    shell.user_ns["noted"] = noted = []
    shell.user_ns["clock"] = time.time_ns
    shell.run_cell("def f():\n\n\n    noted.append((clock(), f.__code__.co_filename))\n")
    lines = CellLines(shell)
    lines.begin()
    shell.run_cell("a = 1\nf()\n")
    lines.end()
    ((moment, file),) = noted
    assert lines.at(moment) == 2
    assert lines.is_cell(file)
    assert not lines.is_current(file)
    assert not lines.is_cell(__file__)


def test_recording_stops_after_too_many_lines(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_lines, "MOST_LINES", 10)
    lines = CellLines(shell)
    lines.begin()
    shell.run_cell("for i in range(100):\n    i\n")
    lines.end()
    assert not lines.is_whole
    assert lines.at(time.time_ns()) == 0


def test_trace_function_of_a_debugger_is_kept(shell: InteractiveShell) -> None:
    def debugger(*_: object) -> None:
        return None

    sys.settrace(debugger)
    try:
        lines = CellLines(shell)
        lines.begin()
        lines.end()
        assert sys.gettrace() is debugger
        assert not lines.is_whole
    finally:
        sys.settrace(None)


def test_end_without_begin_returns_nothing() -> None:
    assert cell_trace.end(False) == b""
