"""Cells on real engines, started from plain Python."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import nbdist
from nbdist.views.run import metrics
from tests.runs import plain

# Variables and output of cells.


def test_every_rank_runs_the_cell_and_shows_its_value(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run("rank * 10 + world_size")
    assert run.results == {0: "3", 1: "13", 2: "23"}
    assert "Out: 13" in capsys.readouterr().out


def test_variables_persist_between_cells(cluster: nbdist.Cluster) -> None:
    cluster.run("kept = [rank]")
    assert cluster.run("kept").results == {0: "[0]", 1: "[1]", 2: "[2]"}


def test_cell_runs_on_selected_ranks(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank", ranks="0,2:").results == {0: "0", 2: "2"}


def test_value_is_hidden_after_a_semicolon_or_if_none(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank;").results == {}
    assert cluster.run("None").results == {}


def test_equal_output_of_ranks_is_merged(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    host = cluster.workers()[0].host
    cluster.run("import sys\nprint('same')\nprint('own', rank)\nprint('bad', file=sys.stderr)")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"[0-2@{host}] same",
        *(f"[{rank}@{host}] own {rank}" for rank in range(3)),
    ]
    assert shown.err == f"[0-2@{host}] bad\n"


def test_output_of_child_processes_is_shown(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import os\nprint('before')\nos.system('echo from a child')\nprint('after');"
    cluster.run(cell, ranks="1")
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines) == ["after", "before", "from a child"]


def test_ipython_syntax_works(cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run = cluster.run("words = !echo one two\n%time x = 1\nwords[0]")
    assert run.results[0] == "'one two'"
    assert "Wall time" in capsys.readouterr().out


def test_rich_displays_are_kept(cluster: nbdist.Cluster) -> None:
    run = cluster.run("from IPython.display import HTML\nHTML(f'<b>{rank}</b>')")
    assert run.results[0] == "<IPython.core.display.HTML object>"


def test_reports_become_metrics_of_the_run(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run("for e in (1, 2):\n    report(epoch=e, loss=rank + e, accuracy=0.5)")
    assert [m.own["loss"] for m in run.metrics if m.rank == 2] == [3.0, 4.0]
    assert run.last("loss") == 3.0
    assert "epoch 2  loss 3 [2 3 4]  accuracy 0.5" in capsys.readouterr().out
    assert run.table("loss").lines()[-1].split() == ["2", "3.000", "4.000"]
    with pytest.raises(KeyError, match="reported metrics: loss, accuracy"):
        run.table("nothing")


def test_report_of_a_non_scalar_points_at_the_line(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match=r"report\(loss='many'\): not a scalar") as error:
        cluster.run("x = 1\nreport(loss='many')")
    assert "line 2" in plain("\n".join(error.value.traceback))


def test_top_level_await_works(cluster: nbdist.Cluster) -> None:
    run = cluster.run("import asyncio\nawait asyncio.sleep(0.05)\nawait asyncio.sleep(0, rank)")
    assert run.results == {0: "0", 1: "1", 2: "2"}


def test_logs_contain_the_whole_text(cluster: nbdist.Cluster) -> None:
    cluster.run("for i in range(5000):\n    print('count', rank, i)", ranks="1", name="counting")
    lines = cluster.logs(1).splitlines()
    assert lines[lines.index("count 1 0") - 1] == "── counting ──"
    assert [line for line in lines if line.startswith("count")] == [
        f"count 1 {i}" for i in range(5000)
    ]


# Errors.


def test_first_error_ends_the_cell_on_all_ranks(cluster: nbdist.Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("import time\nif rank == 1:\n    1 / 0\ntime.sleep(60)")
    assert time.monotonic() - started < 30
    raised = error.value
    assert (raised.rank, raised.ename) == (1, "ZeroDivisionError")
    assert raised.notes == ("rank 0,2: stopped",)
    assert f"on rank 1@{cluster.workers()[1].host}: division by zero" in str(raised)
    assert cluster.run("rank").results[0] == "0"


def test_traceback_contains_only_user_frames(cluster: nbdist.Cluster) -> None:
    cluster.run("def helper(x):\n    return x['missing']")
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("a = 1\nhelper({})", label=12, header="%%dist_run -o x")
    shown = plain("\n".join(error.value._render_traceback_()))
    assert "Cell In[12], line 3" in shown
    assert "helper({})" in shown
    assert "KeyError: 'missing'" in shown
    assert "nbdist/worker" not in shown


TRACED_ERROR = """import tensorflow as tf
@tf.function
def f(x):
    return g(x)
def g(x):
    return tf.matmul(x, x)
f(tf.zeros((2, 3)))"""


def test_error_of_traced_code_names_cells_in_place_of_files(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError) as error:
        cluster.run(TRACED_ERROR, label=7)
    shown = plain("\n".join(error.value._render_traceback_()))
    assert "Cell In[7], line 6, in g" in shown
    assert "ipykernel_" not in shown
    assert "site-packages" not in shown
    assert shown.count("Dimensions must be equal") == 1


def test_equal_errors_are_counted_and_shown_once(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("raise ValueError(f'on {rank}')")
    shown = "\n".join(error.value._render_traceback_())
    assert any("the same error" in note for note in error.value.notes)
    assert len([line for line in plain(shown).splitlines() if "raise ValueError" in line]) == 1


def test_different_errors_are_distinguished(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("import time\ntime.sleep(30 * rank)\n[1/0 if rank else {}['k']]", ranks="0:2")
    assert error.value.ename == "KeyError"
    assert error.value.notes == ("rank 1: stopped",)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        *(pytest.param(code, marks=pytest.mark.full) for code in ("raise SystemExit", "exit()")),
    ],
)
def test_cell_cannot_end_its_engine(cluster: nbdist.Cluster, code: str) -> None:
    with pytest.raises(nbdist.CellError, match="SystemExit"):
        cluster.run(code)
    assert cluster.run("rank").results[0] == "0"


def test_exception_with_a_failing_str_is_reported(cluster: nbdist.Cluster) -> None:
    cell = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Odd"
    with pytest.raises(nbdist.CellError, match=r"Odd on rank .* could not be shown"):
        cluster.run(cell)


def test_cell_with_a_syntax_error_does_not_run(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.UsageError, match="line 2"):
        cluster.run("ran = True\nfor")
    assert cluster.run("'ran' in globals()").results[0] == "False"


def test_interrupt_stops_every_rank(cluster: nbdist.Cluster) -> None:
    """The kernel interrupts with SIGINT to the process that waits for the cell."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import time\nstopped = True\ntime.sleep(60)\nstopped = False")
    assert set(cluster.run("stopped").results.values()) == {"True"}


@pytest.mark.full  # the test with blocking code interrupts such a cell
def test_interrupt_stops_an_awaiting_cell(cluster: nbdist.Cluster) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import asyncio\nawait asyncio.sleep(60)")
    assert cluster.run("rank").results[0] == "0"


@pytest.mark.parametrize(
    "cell",
    ["rank", pytest.param("import asyncio\nawait asyncio.sleep(0, rank)", marks=pytest.mark.full)],
)
def test_cell_is_not_skipped_after_a_failed_request(cluster: nbdist.Cluster, cell: str) -> None:
    """After an error ipykernel aborts queued requests, and ipyparallel reports success."""
    view = cluster._worker_group.engines._view([0])
    failing = view.execute("import time; time.sleep(0.5); raise ValueError", silent=False)
    assert cluster.run(cell, ranks="0").results == {0: "0"}
    assert failing.wait(10)


@pytest.mark.full  # a test of ipyparallel
def test_ipyparallel_still_reports_success_for_skipped_cells(
    cluster: nbdist.Cluster,
) -> None:
    """This behaviour is the reason for our own dispatcher (`cluster/dispatcher.py`)."""
    view = cluster._worker_group.engines._view([0])
    failing = view.execute("import time; time.sleep(0.5); raise ValueError", silent=False)
    skipped = view.execute("1", silent=False)
    skipped.get(timeout=10)
    assert skipped.successful()
    assert skipped.status == ["aborted"]
    failing.wait(10)


@pytest.mark.parametrize(
    "cell",
    [
        "if rank == 1:\n    raise KeyboardInterrupt",
        "import asyncio\nawait asyncio.sleep(0)\nraise asyncio.CancelledError",
    ],
)
def test_unrequested_interrupt_is_an_error(cluster: nbdist.Cluster, cell: str) -> None:
    with pytest.raises(nbdist.CellError, match=r"KeyboardInterrupt|CancelledError"):
        cluster.run(cell)


def test_invalid_utf_8_is_replaced(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("print('odd \\udc80 name')", ranks="0")
    assert "odd ? name" in capsys.readouterr().out
    with pytest.raises(nbdist.CellError, match=r"ValueError .* \?"):
        cluster.run("raise ValueError('\\udc80')")
    with pytest.raises(nbdist.CellError, match="takes str, not bytes"):
        cluster.run("import sys\nsys.stdout.write(b'x')")


def test_blocking_code_in_an_awaiting_cell_is_interrupted(cluster: nbdist.Cluster) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import asyncio, time\nawait asyncio.sleep(0)\ntime.sleep(60)")
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_late_rank_is_stopped_with_the_others(cluster: nbdist.Cluster) -> None:
    late = cluster.workers()[1].pid
    os.kill(late, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (late, signal.SIGCONT)).start()
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run("if rank == 0:\n    raise ValueError\nimport time\ntime.sleep(60)")
    assert error.value.notes == ("rank 1-2: stopped",)


def test_stderr_of_child_processes_is_shown(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import subprocess, sys\nsubprocess.run(['ls', '/no_such_place'])\n"
    cluster.run(cell + "subprocess.run(['echo', 'named'], stdout=sys.stdout);", ranks="1")
    shown = capsys.readouterr()
    assert "no_such_place" in shown.err
    assert "named" in shown.out


def test_reports_of_a_failed_cell_are_kept(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError):
        cluster.run("report(epoch=1, loss=rank)\nraise ValueError")
    assert cluster.last_run.last("loss") == 1.0


def test_report_of_one_rank_is_shown_live(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line waits for the other ranks only for some time."""
    monkeypatch.setattr(metrics, "WAIT_S", 0.5)
    cell = "import time\nif rank == 0:\n    report(epoch=1, loss=1)\n    report(epoch=1, acc=2)\n"
    cluster.run(cell + "time.sleep(1.6)\nprint('end')")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1  loss 1  acc 2")


def test_full_disk_does_not_stop_the_cell(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log files that raise OSError stand in for a full disk."""

    class FullFile:
        def write(self, _text: str) -> None:
            raise OSError("No space left on device")

        flush = close = lambda self: None

    monkeypatch.setattr(cluster._lifecycle.logs, "_files", dict.fromkeys(range(3), FullFile()))
    monkeypatch.setattr(cluster._lifecycle.logs, "fault", "")
    cluster.run("print('shown')")
    assert "shown" in capsys.readouterr().out
    assert "cannot store all text of the ranks: No space left" in cluster.logs(0)
