"""Cells on real engines, from plain Python."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import nbdist
from nbdist.cluster.launch import repeat_until
from nbdist.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Light workers: what is tested here needs no TensorFlow."""
    with nbdist.Cluster(hosts=3, framework="jax") as running:
        yield running


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# What a cell finds and shows.


def test_every_rank_runs_the_cell_and_shows_its_value(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run = cluster.run("rank * 10 + world_size")
    assert run.results == {0: "3", 1: "13", 2: "23"}
    assert "Out: 13" in capsys.readouterr().out


def test_names_stay_between_cells(cluster: nbdist.Cluster) -> None:
    cluster.run("kept = [rank]")
    assert cluster.run("kept").results == {0: "[0]", 1: "[1]", 2: "[2]"}


def test_a_cell_on_some_ranks(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank", ranks="0,2:").results == {0: "0", 2: "2"}


def test_a_value_is_not_shown_after_a_semicolon_or_when_none(cluster: nbdist.Cluster) -> None:
    assert cluster.run("rank;").results == {}
    assert cluster.run("None").results == {}


def test_output_of_all_ranks_is_folded(
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


def test_what_child_processes_print_is_shown(
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
    with pytest.raises(KeyError, match="there are: loss, accuracy"):
        run.table("nothing")


def test_a_report_that_is_no_scalar_points_at_the_line(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError, match=r"report\(loss='many'\): not a scalar") as error:
        cluster.run("x = 1\nreport(loss='many')")
    assert "line 2" in plain("\n".join(error.value.traceback))


def test_top_level_await(cluster: nbdist.Cluster) -> None:
    run = cluster.run("import asyncio\nawait asyncio.sleep(0.05)\nawait asyncio.sleep(0, rank)")
    assert run.results == {0: "0", 1: "1", 2: "2"}


def test_the_whole_text_is_in_the_logs(cluster: nbdist.Cluster) -> None:
    cluster.run("for i in range(5000):\n    print('count', rank, i)", ranks="1")
    lines = cluster.logs(1).splitlines()
    assert [line for line in lines if line.startswith("count")] == [
        f"count 1 {i}" for i in range(5000)
    ]


# Errors.


def test_the_first_error_ends_the_cell_for_all(cluster: nbdist.Cluster) -> None:
    started = time.monotonic()
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("import time\nif rank == 1:\n    1 / 0\ntime.sleep(60)")
    assert time.monotonic() - started < 2
    raised = error.value
    assert (raised.rank, raised.ename) == (1, "ZeroDivisionError")
    assert raised.notes == ("rank 0,2: stopped",)
    assert f"on rank 1@{cluster.workers()[1].host}: division by zero" in str(raised)
    assert cluster.run("rank").results[0] == "0"


def test_the_traceback_is_the_users(cluster: nbdist.Cluster) -> None:
    cluster.run("def helper(x):\n    return x['missing']")
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("a = 1\nhelper({})", label=12, header="%%dist_run -o x")
    shown = plain("\n".join(error.value._render_traceback_()))
    assert "Cell In[12], line 3" in shown
    assert "helper({})" in shown
    assert "KeyError: 'missing'" in shown
    assert "nbdist/worker" not in shown


def test_the_same_error_of_others_is_counted_not_repeated(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("raise ValueError(f'on {rank}')")
    shown = "\n".join(error.value._render_traceback_())
    assert any("the same error" in note for note in error.value.notes)
    assert len([line for line in plain(shown).splitlines() if "raise ValueError" in line]) == 1


def test_different_errors_are_told_apart(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError) as error:
        cluster.run("import time\ntime.sleep(0.3 * rank)\n[1/0 if rank else {}['k']]", ranks="0:2")
    assert error.value.ename == "KeyError"
    assert error.value.notes == ("rank 1: stopped",)


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit", "exit()"])
def test_a_cell_cannot_end_its_engine(cluster: nbdist.Cluster, code: str) -> None:
    with pytest.raises(nbdist.CellError, match="SystemExit"):
        cluster.run(code)
    assert cluster.run("rank").results[0] == "0"


def test_an_exception_that_cannot_be_shown_is_shown(cluster: nbdist.Cluster) -> None:
    cell = "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Odd"
    with pytest.raises(nbdist.CellError, match=r"Odd on rank .* could not be shown"):
        cluster.run(cell)


def test_nothing_runs_of_a_cell_that_is_no_python(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.UsageError, match="line 2"):
        cluster.run("ran = True\nfor")
    assert cluster.run("'ran' in globals()").results[0] == "False"


def test_an_interrupt_stops_every_rank(cluster: nbdist.Cluster) -> None:
    """As the kernel does it: SIGINT to the process that waits for the cell."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import time\nstopped = True\ntime.sleep(60)\nstopped = False")
    assert set(cluster.run("stopped").results.values()) == {"True"}


def test_an_interrupt_stops_an_awaiting_cell(cluster: nbdist.Cluster) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import asyncio\nawait asyncio.sleep(60)")
    assert cluster.run("rank").results[0] == "0"


@pytest.mark.parametrize("cell", ["rank", "import asyncio\nawait asyncio.sleep(0, rank)"])
def test_a_cell_is_not_skipped_because_something_else_failed(
    cluster: nbdist.Cluster, cell: str
) -> None:
    """After an error, ipykernel aborts what is queued; ipyparallel calls that a success."""
    view = cluster._engines._view([0])
    failing = view.execute("import time; time.sleep(0.5); raise ValueError", silent=False)
    assert cluster.run(cell, ranks="0").results == {0: "0"}
    assert failing.wait(10)


def test_ipyparallels_own_answer_to_a_skipped_cell_is_still_success(
    cluster: nbdist.Cluster,
) -> None:
    """The trap itself: what our own way to the engines (`cluster/dispatch.py`) spares us."""
    view = cluster._engines._view([0])
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
def test_an_interrupt_that_nobody_asked_for_is_an_error(cluster: nbdist.Cluster, cell: str) -> None:
    with pytest.raises(nbdist.CellError, match=r"KeyboardInterrupt|CancelledError"):
        cluster.run(cell)


def test_text_that_is_no_utf_8_does_no_harm(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("print('odd \\udc80 name')", ranks="0")
    assert "odd ? name" in capsys.readouterr().out
    with pytest.raises(nbdist.CellError, match=r"ValueError .* \?"):
        cluster.run("raise ValueError('\\udc80')")
    with pytest.raises(nbdist.CellError, match="takes str, not bytes"):
        cluster.run("import sys\nsys.stdout.write(b'x')")


def test_python_in_a_cell_that_awaits_is_interrupted_too(cluster: nbdist.Cluster) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.run("import asyncio, time\nawait asyncio.sleep(0)\ntime.sleep(60)")
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_a_rank_that_begins_late_is_stopped_all_the_same(cluster: nbdist.Cluster) -> None:
    late = cluster.workers()[1].pid
    os.kill(late, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (late, signal.SIGCONT)).start()
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run("if rank == 0:\n    raise ValueError\nimport time\ntime.sleep(60)")
    assert error.value.notes == ("rank 1-2: stopped",)


def test_what_child_processes_say_on_standard_error_is_shown(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import subprocess, sys\nsubprocess.run(['ls', '/no_such_place'])\n"
    cluster.run(cell + "subprocess.run(['echo', 'named'], stdout=sys.stdout);", ranks="1")
    shown = capsys.readouterr()
    assert "no_such_place" in shown.err
    assert "named" in shown.out


def test_what_a_failed_cell_reported_is_kept(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.CellError):
        cluster.run("report(epoch=1, loss=rank)\nraise ValueError")
    assert cluster.last_run.last("loss") == 1.0


def test_a_report_of_one_rank_is_live(
    cluster: nbdist.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "import time\nif rank == 0:\n    report(epoch=1, loss=1)\n    report(epoch=1, acc=2)\n"
    cluster.run(cell + "time.sleep(1.6)\nprint('end')")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1  loss 1  acc 2")


def test_a_full_disk_stops_nothing(
    cluster: nbdist.Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log files refuse to be written: a stand-in for a disk that is full."""

    class Full:
        def write(self, _text: str) -> None:
            raise OSError("No space left on device")

        flush = close = lambda self: None

    monkeypatch.setattr(cluster._logs, "_files", dict.fromkeys(range(3), Full()))
    monkeypatch.setattr(cluster._logs, "_fault", "")
    cluster.run("print('shown')")
    assert "shown" in capsys.readouterr().out
    assert "could be kept: No space left" in cluster.logs(0)


# Objects.


def test_objects_go_there_and_come_back(cluster: nbdist.Cluster) -> None:
    cluster.push({"a": np.arange(3), "f": lambda x: x + 1})
    cluster.run("b = f(a) * rank")
    pulled = cluster.pull(["a", "b"])
    assert [objects["b"].tolist() for objects in pulled.values()] == [
        [0, 0, 0],
        [1, 2, 3],
        [2, 4, 6],
    ]
    assert list(cluster.pull(["b"], ranks="2")) == [2]


def test_arrays_of_jax_come_as_numpy(cluster: nbdist.Cluster) -> None:
    cluster.run(
        "import jax\nimport jax.numpy as jnp\nlocal = {'w': jnp.ones(3)}\n"
        "whole = jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, jax.P()))\n"
        "split = jax.device_put(jnp.arange(6.0), jax.NamedSharding(mesh, jax.P('data')))"
    )
    pulled = cluster.pull(["local", "whole"], ranks="1")[1]
    assert type(pulled["local"]["w"]) is np.ndarray
    assert pulled["whole"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(nbdist.TransferError, match="split over ranks"):
        cluster.pull(["split"])
    assert "jax" not in sys.modules


def test_a_name_that_is_not_there(cluster: nbdist.Cluster) -> None:
    cluster.run("only_on_two = 1", ranks="2")
    with pytest.raises(nbdist.TransferError, match="rank 0: only_on_two; rank 1: only_on_two"):
        cluster.pull(["only_on_two"])


def test_what_cannot_be_pickled_is_named_and_nothing_is_pushed(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.TransferError) as error:
        cluster.push({"good": 1, "lock": threading.Lock()})
    assert "lock (lock) cannot be pickled" in str(error.value)
    assert cluster.run("'good' in globals()").results[0] == "False"
    cluster.run("import threading\nlock = threading.Lock()")
    with pytest.raises(nbdist.TransferError, match="rank 0: TypeError: cannot pickle"):
        cluster.pull(["lock"])


def test_an_object_of_a_framework_does_not_load_it_here(cluster: nbdist.Cluster) -> None:
    cluster.run("import keras\nhistory = keras.callbacks.History()")
    with pytest.raises(nbdist.TransferError, match=r"needs keras.*\.history"):
        cluster.pull(["history"], ranks="0")
    assert "keras" not in sys.modules


# The cluster.


def test_the_status_tells_of_every_worker(cluster: nbdist.Cluster) -> None:
    status = cluster.status()
    assert status.title == "nbdist: 3 workers, 3 idle"
    pids = [worker.pid for worker in status.workers]
    assert all(psutil.Process(pid).is_running() for pid in pids)
    assert all(str(pid) in "\n".join(status.lines()) for pid in pids)
    assert all(worker.memory_bytes > 50e6 for worker in status.workers)
    assert "jax 0.10" in status.html()


def test_logs_of_a_rank_that_is_not_there(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.UsageError, match="no rank 3: ranks are 0 to 2"):
        cluster.logs(3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": "2"}, "hosts '2': type a whole number"),
        ({"hosts": 2.5}, "hosts 2.5"),
        ({"hosts": 1, "env": {"A": 1}}, "env 'A'=1: both must be text"),
    ],
)
def test_what_is_of_another_type_starts_nothing(options: dict[str, object], says: str) -> None:
    with pytest.raises(nbdist.UsageError, match=says):
        nbdist.Cluster(framework="jax", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "says"),
    [("mirrored", "needs tensorflow.*--framework both"), ("magic", "choose from mirrored, pjrt")],
)
def test_a_strategy_that_is_not_there(cluster: nbdist.Cluster, strategy: str, says: str) -> None:
    with pytest.raises(nbdist.UsageError, match=says):
        cluster.run("1", strategy=strategy)


def test_cells_leave_no_books_in_the_client(cluster: nbdist.Cluster) -> None:
    before = len(cluster._engines._client.history)
    for _ in range(5):
        cluster.run("1")
    assert len(cluster._engines._client.history) == before


def test_a_rank_stuck_in_a_collective_and_the_way_out(cluster: nbdist.Cluster) -> None:
    """Rank 0 waits for all others in an all-reduce that they never join."""
    cell = """
import jax, jax.numpy as jnp
ones = jax.jit(lambda: jnp.ones(world_size), out_shardings=jax.NamedSharding(mesh, jax.P("data")))()
total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P())).lower(ones).compile()
if rank > 0:
    import time
    time.sleep(1)
    raise ValueError("left")
total(ones).block_until_ready()
"""
    with pytest.raises(nbdist.CellError, match="ValueError") as error:
        cluster.run(cell)
    assert "rank 0: still running" in error.value.notes[-1]
    assert [worker.state for worker in cluster.workers()] == ["busy", "idle", "idle"]
    with pytest.raises(nbdist.WorkerError, match="rank 0 is still in an earlier cell"):
        cluster.run("1")
    before = {worker.pid for worker in cluster.workers()}
    cluster.restart()
    assert before.isdisjoint(worker.pid for worker in cluster.workers())
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


def test_a_rank_that_dies_ends_the_cell(cluster: nbdist.Cluster) -> None:
    with pytest.raises(nbdist.WorkerError, match=r"rank 1 died in the cell.*%dist_restart"):
        cluster.run("import os, time\nif rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert [worker.state for worker in cluster.workers()] == ["idle", "dead", "idle"]
    with pytest.raises(nbdist.WorkerError, match="rank 1 is dead"):
        cluster.run("1")
    assert cluster.run("rank", ranks="0").results == {0: "0"}
    cluster.restart()
    assert cluster.run("rank").results == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize("part", ["seed", "controller"])
def test_a_restart_when_the_parts_behind_the_workers_are_gone(
    own_runtime_folder: Path, part: str
) -> None:
    with nbdist.Cluster(hosts=1, framework="jax") as running:
        engines = running._engines
        pid = engines._seed.pid if part == "seed" else engines._cluster.controller.pid
        os.kill(pid, signal.SIGKILL)
        assert repeat_until(lambda: not engines.can_restart(), 10)
        running.restart()
        assert running.run("rank").results == {0: "0"}


# Starts that fail.


def test_a_start_that_fails_leaves_nothing(own_runtime_folder: Path) -> None:
    (own_runtime_folder / "nbdist").mkdir(exist_ok=True)
    folders = set((own_runtime_folder / "nbdist").iterdir())
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(nbdist.NbdistError):
        nbdist.Cluster(hosts=1, framework="jax", env={"JAX_PLATFORMS": "no_such_platform"})
    left = set(psutil.Process().children(recursive=True)) - before
    assert not psutil.wait_procs(list(left), timeout=5)[1]
    assert set((own_runtime_folder / "nbdist").iterdir()) == folders


def test_stopping_twice_is_fine(own_runtime_folder: Path) -> None:
    running = nbdist.Cluster(hosts=1, framework="jax", cpus_per_worker=1, env={"SAID": "yes"})
    run = running.run("import os\nos.environ['SAID'], len(os.sched_getaffinity(0))")
    assert run.results[0] == "('yes', 1)"
    running.stop()
    running.stop()
    assert not psutil.pid_exists(running._hellos[0].pid)


def test_virtual_devices(own_runtime_folder: Path) -> None:
    with nbdist.Cluster(hosts=2, framework="jax", devices_per_host=3) as running:
        assert [len(worker.devices) for worker in running.workers()] == [3, 3]
        assert running.run("mesh.size, strategy.num_replicas_in_sync").results[1] == "(6, 6)"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_START_TIMEOUT_S", "2.5")
    assert Settings.from_environment().start_timeout_s == 2.5
    monkeypatch.setenv("NBDIST_START_TIMEOUT_S", "soon")
    with pytest.raises(nbdist.UsageError, match="start_timeout_s"):
        Settings.from_environment()


def test_errors_travel_between_processes() -> None:
    error = nbdist.UsageError("what to type")
    assert str(pickle.loads(pickle.dumps(error))) == "what to type"
