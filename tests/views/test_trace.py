"""View of a trace."""

from __future__ import annotations

from nbdist.records import HOST_COPIES, DeviceTime, LineTime, OperationTime, Trace, TracedRank
from nbdist.session.tracing import merged
from nbdist.views.trace import SHOWN_LINES, SHOWN_OPERATIONS, TracePicture


def device(number: int, *, rank: int = 0, idle_s: float = 0.0) -> DeviceTime:
    times = {"compute_s": 0.002, "collective_s": 0.001, "to_device_s": 0.0, "to_host_s": 0.0}
    return DeviceTime(rank=rank, device=number, idle_s=idle_s, **times)


def line(number: int, text: str = "", cell: str = "", seconds: float = 0.002) -> LineTime:
    return LineTime(
        cell=cell, line=number, text=text, compute_s=seconds, collective_s=0.001, transfer_s=0.0
    )


def operation(name: str, seconds: float) -> OperationTime:
    return OperationTime(name=name, kind="compute", seconds=seconds, count=3)


TRACE = Trace(
    ranks=(0, 1),
    seconds=0.0125,
    by_operation=(operation("dot", 0.003), operation("all-reduce", 0.001)),
    by_device=(device(0, idle_s=0.0095), device(HOST_COPIES, rank=1)),
    by_line=(line(3, "y = <x> @ x"), line(5, "def f(): pass", "Cell In[2]"), line(0)),
    notes=("something else",),
)


def test_the_three_tables_are_shown() -> None:
    text = TracePicture(TRACE, "more elsewhere").lines()
    assert text[0] == "%%dist_trace: 12.5 ms on rank 0-1"
    rows = [row.split() for row in text]
    assert ["dot", "3.000", "75%", "3"] in rows
    assert ["0", "0", "2.000", "1.000", "-", "-", "9.500"] in rows
    assert ["1", "host", "2.000", "1.000", "-", "-"] in rows
    assert ["3", "y", "=", "<x>", "@", "x", "2.000", "1.000", "-"] in rows
    assert any("Cell In[2]: def f(): pass" in row for row in text)
    assert any("(no line)" in row for row in text)
    assert text[-3:] == [
        "host: copies that are visible only on the host, not per device",
        "something else",
        "more elsewhere",
    ]


def test_the_page_has_the_same_content_and_no_scripts() -> None:
    page = TracePicture(TRACE, "more elsewhere").html()
    for text in ("12.5 ms on rank 0-1", "all-reduce", "Cell In[2]", "more elsewhere"):
        assert text in page
    assert "&lt;x&gt; @ x" in page
    assert "<x>" not in page


def test_the_longest_lines_are_shown_in_the_order_of_the_code() -> None:
    lines = tuple(line(n, seconds=n / 1000) for n in range(1, SHOWN_LINES + 4))
    operations = tuple(operation(f"op{n}", 1.0) for n in range(SHOWN_OPERATIONS + 1))
    trace = Trace(ranks=(0,), seconds=1.0, by_operation=operations, by_line=lines)
    text = TracePicture(trace).lines()
    numbers = [int(row.split()[0]) for row in text[-SHOWN_LINES - 2 : -2]]
    assert numbers == list(range(4, SHOWN_LINES + 4))
    assert text[-2:] == ["not shown: 1 operation", "not shown: 3 lines"]


def test_an_empty_trace_states_that_it_is_empty() -> None:
    empty = Trace(ranks=(0,), seconds=0.001, notes=("nothing ran on a device",))
    assert TracePicture(empty).lines() == [
        "%%dist_trace: 1.0 ms on rank 0",
        "nothing ran on a device",
    ]
    (title,) = TracePicture(Trace(ranks=(), seconds=0.0)).lines()
    assert title.endswith("the workers were restarted, or one of them is gone")


def test_times_of_ranks_are_added_up() -> None:
    traced = TracedRank(
        seconds=1.0,
        by_operation=(operation("dot", 0.5),),
        by_device=(device(0, rank=-1),),
        by_line=(line(2), line(4, "earlier", "Cell In[1]"), line(0)),
        notes=("alone",),
    )
    quiet = TracedRank(seconds=2.0, by_operation=(), by_device=(device(0, rank=-1),), by_line=())
    trace = merged({2: traced, 0: traced, 1: quiet}, ["first", "  second"])
    assert trace.ranks == (0, 1, 2)
    assert trace.seconds == 2.0
    assert trace.by_operation == (OperationTime(name="dot", kind="compute", seconds=1.0, count=6),)
    assert [one.rank for one in trace.by_device] == [0, 1, 2]
    assert [(one.cell, one.line, one.text, one.compute_s) for one in trace.by_line] == [
        ("", 2, "second", 0.004),
        ("Cell In[1]", 4, "earlier", 0.004),
        ("", 0, "", 0.004),
    ]
    assert trace.notes == ("rank 0,2: alone",)
