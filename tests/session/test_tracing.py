"""Traces of cells: refusals, numbered lines, and traces of ranks that are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nbdist.errors import CellError, UsageError, WorkerError
from nbdist.records import (
    OWN_RANK,
    CellOptions,
    ClusterRequest,
    DeviceTime,
    Host,
    LineTime,
    OperationTime,
    StepOptions,
    Trace,
    TracedRank,
)
from nbdist.session import tracing
from nbdist.session.tracing import TRACED_STEPS, merged, trace_here, trace_on
from nbdist.worker.remote import cell_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def line(number: int, cell: str = "", **seconds: float) -> LineTime:
    times = {"compute_s": 0.0, "collective_s": 0.0, "transfer_s": 0.0, **seconds}
    return LineTime(cell=cell, line=number, text="earlier" if cell else "", **times)


def traced(seconds: float = 1.0, **changes: object) -> TracedRank:
    usual = TracedRank(seconds=seconds, by_operation=(), by_device=(), by_line=())
    return msgspec.structs.replace(usual, **changes)


def operation(name: str, kind: Any, seconds: float, count: int = 1) -> OperationTime:
    return OperationTime(name=name, kind=kind, seconds=seconds, count=count)


def device(number: int) -> DeviceTime:
    times = dict.fromkeys(("compute_s", "collective_s", "to_device_s", "to_host_s", "idle_s"), 0.0)
    return DeviceTime(rank=OWN_RANK, device=number, **times)


# Merged traces.


def test_no_ranks_give_an_empty_trace(tmp_path: Path) -> None:
    assert merged({}, ["x"], str(tmp_path / "kept")) == Trace(ranks=(), seconds=0.0)
    assert list(tmp_path.iterdir()) == []


def test_operations_are_summed_by_name_and_kind_with_the_longest_first() -> None:
    first = traced(
        by_operation=(operation("dot", "compute", 1.0), operation("copy", "to_host", 0.5))
    )
    second = traced(
        seconds=3.0,
        by_operation=(operation("dot", "compute", 2.0, 4), operation("copy", "to_device", 9.0)),
    )
    trace = merged({1: second, 0: first}, [])
    assert trace.by_operation == (
        operation("copy", "to_device", 9.0),
        operation("dot", "compute", 3.0, 5),
        operation("copy", "to_host", 0.5),
    )
    assert (trace.ranks, trace.seconds) == ((0, 1), 3.0)


def test_devices_are_sorted_by_rank() -> None:
    trace = merged({2: traced(by_device=(device(0),)), 0: traced(by_device=(device(1),))}, [])
    assert [(one.rank, one.device) for one in trace.by_device] == [(0, 1), (2, 0)]


def test_lines_are_summed_in_order_with_unknown_ones_last() -> None:
    first = line(2, compute_s=1.0, collective_s=2.0, transfer_s=3.0)
    ranks = {
        0: traced(by_line=(line(0, compute_s=9.0), line(4, "In [1]"), first)),
        1: traced(by_line=(line(1), line(2, compute_s=2.0, collective_s=3.0, transfer_s=4.0))),
    }
    trace = merged(ranks, ["first", "  second  "])
    assert [(one.cell, one.line, one.text) for one in trace.by_line] == [
        ("", 1, "first"),
        ("", 2, "second"),
        ("In [1]", 4, "earlier"),
        ("", 0, ""),
    ]
    second = trace.by_line[1]
    assert (second.compute_s, second.collective_s, second.transfer_s) == (3.0, 5.0, 7.0)


def test_a_line_beyond_the_cell_has_no_text() -> None:
    trace = merged({0: traced(by_line=(line(2), line(3)))}, ["first", "second"])
    assert [one.text for one in trace.by_line] == ["second", ""]


def test_a_note_of_some_ranks_starts_with_them() -> None:
    ranks = {
        2: traced(notes=("some", "all")),
        0: traced(notes=("all",)),
        1: traced(notes=("all", "some")),
    }
    assert merged(ranks, []).notes == ("all", "rank 1-2: some")


def test_files_are_written_in_the_folders_that_xprof_reads(tmp_path: Path) -> None:
    ranks = {0: traced(file=b"zero"), 3: traced(file=b"three")}
    trace = merged(ranks, [], str(tmp_path))
    assert trace.folder == str(tmp_path)
    (own,) = (tmp_path / "plugins" / "profile").iterdir()
    files = {file.name: file.read_bytes() for file in own.iterdir()}
    assert files == {"rank-0.xplane.pb": b"zero", "rank-3.xplane.pb": b"three"}
    merged(ranks, [], str(tmp_path))
    assert len(list(own.parent.iterdir())) == 2
    assert merged(ranks, []).folder == ""


# Traces on ranks.


class Cluster:
    """Double of a cluster. It is its own inspection and its own engines.

    Attributes:
        request: the request.
        busy: ranks on which another trace is in progress.
        ran: cells that ran, with their options.
        ended: `with_file` of each end of a trace.
        fault: error that the cell raises; None if it raises none.
        lost: error at the end of the trace; None if it ends.
        payloads: traces of the ranks.
    """

    def __init__(self, *frameworks: Any) -> None:
        self.request = ClusterRequest(hosts=(Host(),) * 3, frameworks=frameworks)
        self.busy: set[int] = set()
        self.ran: list[tuple[str, CellOptions]] = []
        self.ended: list[bool] = []
        self.fault: Exception | None = None
        self.lost: Exception | None = None
        self.payloads = {rank: traced(float(rank), by_line=(line(2),)) for rank in range(3)}

    @property
    def inspection(self) -> Cluster:
        return self

    def chosen(self, ranks: str | None) -> tuple[int, ...]:
        return (1, 2) if ranks else (0, 1, 2)

    def engines(self, _ranks: Sequence[int]) -> Cluster:
        return self

    def apply(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int]
    ) -> list[Any]:
        if function is cell_trace.begin:
            return [rank not in self.busy for rank in ranks]
        assert function is cell_trace.end
        self.ended.append(*arguments)
        if self.lost is not None:
            raise self.lost
        return [
            msgspec.msgpack.encode(self.payloads[rank]) if rank in self.payloads else b""
            for rank in ranks
        ]

    def run(self, cell: str, options: CellOptions, **_: Any) -> None:
        self.ran.append((cell, options))
        if self.fault is not None:
            raise self.fault


def trace(cluster: Cluster, cell: str = "x = 1", **changes: Any) -> Trace:
    options = CellOptions(**changes.pop("options", {}))
    return trace_on(cluster, cell, options, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frameworks", "options", "message"),
    [
        (("tensorflow",), {}, "the workers run tensorflow: %%dist_trace supports only JAX"),
        ((), {}, "the workers run no framework: %%dist_trace supports only JAX"),
        (("jax", "tensorflow"), {"strategy": "mirrored"}, "--strategy mirrored: %%dist_trace"),
    ],
)
def test_only_jax_is_traced(
    frameworks: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    cluster = Cluster(*frameworks)
    with pytest.raises(UsageError) as error:
        trace(cluster, options=options)
    assert str(error.value).startswith(message)
    assert cluster.ran == []


@pytest.mark.parametrize("strategy", [None, "pjrt"])
def test_the_traces_of_the_chosen_ranks_are_merged(strategy: str | None) -> None:
    cluster = Cluster("jax", "tensorflow")
    found = trace(cluster, "a\nb", options={"strategy": strategy, "ranks": "1,2"})
    assert (found.ranks, found.seconds) == ((1, 2), 2.0)
    assert [(one.line, one.text) for one in found.by_line] == [(2, "b")]
    ((_, options),) = cluster.ran
    assert (options.strategy, options.step) == ("pjrt", None)
    assert cluster.ended == [False]


def test_a_trace_in_progress_on_some_ranks_is_refused_and_ends_on_the_others() -> None:
    cluster = Cluster("jax")
    cluster.busy = {0, 2}
    with pytest.raises(UsageError, match="another trace is in progress on rank 0,2, and JAX"):
        trace(cluster, keep="folder")
    assert (cluster.ran, cluster.ended) == ([], [False])


@pytest.mark.parametrize(("steps", "traced_steps"), [(0, TRACED_STEPS), (3, 3)])
def test_a_step_without_a_number_of_steps_has_a_limit(steps: int, traced_steps: int) -> None:
    cluster = Cluster("jax")
    trace(cluster, options={"step": StepOptions(data="xs", steps=steps)})
    ((_, options),) = cluster.ran
    assert options.step is not None
    assert (options.step.data, options.step.steps) == ("xs", traced_steps)


def test_the_trace_is_shown_even_if_the_cell_raises() -> None:
    cluster = Cluster("jax")
    cluster.fault = WorkerError("rank 1 died")
    shown: list[Trace] = []
    with pytest.raises(WorkerError, match="rank 1 died"):
        trace(cluster, show=shown.append)
    assert [one.ranks for one in shown] == [(0, 1, 2)]


def test_engines_that_restarted_have_no_trace(tmp_path: Path) -> None:
    cluster = Cluster("jax")
    del cluster.payloads[1]
    assert trace(cluster, keep=str(tmp_path)).ranks == (0, 2)
    assert cluster.ended == [True]
    cluster.lost = WorkerError("rank 1 died")
    assert trace(cluster).ranks == ()


# Lines of the cell.


class Shell:
    """Double of IPython's shell.

    Attributes:
        ran: texts of the cells.
        fault: error of the cell; None if it raises none.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fault: Exception | None = None
        self.error_before_exec: Exception | None = None

    @property
    def error_in_exec(self) -> Exception | None:
        return self.fault

    def run_cell(self, text: str) -> Shell:
        self.ran.append(text)
        return self


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell in a kernel in which traces can begin."""
    monkeypatch.setattr(cell_trace, "begin", lambda: True)
    ended = msgspec.msgpack.encode(traced(2.0, by_line=(line(1), line(2))))
    monkeypatch.setattr(cell_trace, "end", lambda _with_file: ended)
    return Shell()


@pytest.mark.parametrize(
    ("cell", "header", "text", "lines"),
    [
        ("a\nb", "%%dist_trace -x", "# %%dist_trace -x\na\nb", ["# %%dist_trace -x", "a"]),
        ("\n\na\nb", "%%dist_trace", "# %%dist_trace\n\n\na\nb", ["# %%dist_trace", ""]),
        ("\n  \na\nb", "", "a\nb", ["a", "b"]),
    ],
)
def test_lines_are_numbered_as_in_tracebacks(
    shell: Shell, cell: str, header: str, text: str, lines: list[str]
) -> None:
    found = trace_here(shell, cell, header=header)
    assert shell.ran == [text]
    assert [one.text for one in found.by_line] == lines
    assert (found.ranks, found.seconds) == ((0,), 2.0)


def test_a_step_has_the_line_of_its_head() -> None:
    step = {"step": StepOptions(data="xs")}
    assert trace(Cluster("jax"), "\na", options=step).by_line[0].text == ""
    assert trace(Cluster("jax"), "a", options=step).by_line[0].text == "a"


@pytest.mark.parametrize("is_syntax", [True, False])
def test_an_error_of_the_cell_in_this_kernel_is_raised_after_the_trace(
    shell: Shell, is_syntax: bool
) -> None:
    if is_syntax:
        shell.error_before_exec = ValueError("wrong")
    else:
        shell.fault = ValueError("wrong")
    shown: list[Trace] = []
    with pytest.raises(CellError, match=r"^ValueError on rank 0@.*: wrong$"):
        trace_here(shell, "x", show=shown.append)
    assert len(shown) == 1


def test_a_kernel_without_jax_or_with_another_trace_runs_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_trace, "begin", lambda: False)
    with pytest.raises(UsageError, match=r"^another trace is in progress, and JAX supports one"):
        trace_here(shell, "x")
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"^%%dist_trace needs JAX, but no workers run"):
        trace_here(shell, "x")
    assert shell.ran == []
