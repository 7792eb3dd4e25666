"""`%%dist_trace` on real engines and in a plain kernel: times by line and by device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.errors import CellError, UsageError, WorkerError
from nbdist.records import HOST_COPIES, StepOptions, Trace
from nbdist.session.tracing import TRACED_STEPS, trace_on
from tests import clusters
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.records import LineTime

SLEEP_S = 0.4
SETUP = """
import time
import jax, jax.numpy as jnp, numpy as np

x = jax.make_array_from_callback(
    (400, 400), jax.NamedSharding(mesh, jax.P("data")), lambda index: np.ones((100, 400), "float32")
)
w = jnp.ones((400, 400))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
def earlier(part):
    return jax.lax.psum(part, "data")

earlier(x).block_until_ready()
"""
PRODUCT_AND_SUM = """
def product(a, b):
    return a @ b
y = jax.jit(product)(x, w)
def total(part):
    return jax.lax.psum(
        part, "data")
z = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))(y)
"""
PRODUCT, SUM = 2, 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, devices_per_host=2, framework="jax") as running:
        running.run(SETUP)
        yield running


@pytest.fixture(scope="module")
def plain_kernel() -> Iterator[Kernel]:
    """Kernel without workers."""
    with Kernel() as running:
        running.run("%load_ext nbdist\nimport jax, jax.numpy as jnp\nw = jnp.ones((300, 300))")
        yield running


def line_time(trace: Trace, number: int) -> LineTime:
    return next(one for one in trace.by_line if one.line == number and not one.cell)


def collective_s(trace: Trace) -> float:
    return sum(one.collective_s for one in trace.by_line)


def totals_agree(trace: Trace) -> bool:
    """Return True if all tables contain the same total seconds for each kind."""
    device_totals = [
        sum(one.compute_s for one in trace.by_device),
        sum(one.collective_s for one in trace.by_device),
        sum(one.to_device_s + one.to_host_s for one in trace.by_device),
    ]
    line_totals = [
        sum(one.compute_s for one in trace.by_line),
        sum(one.collective_s for one in trace.by_line),
        sum(one.transfer_s for one in trace.by_line),
    ]
    operation_totals = [
        sum(one.seconds for one in trace.by_operation if one.kind in kinds)
        for kinds in (("compute",), ("collective",), ("to_device", "to_host"))
    ]
    return device_totals == pytest.approx(line_totals) and device_totals == pytest.approx(
        operation_totals
    )


@pytest.fixture(scope="module")
def trace(cluster: nbdist.Cluster) -> Trace:
    """Provide a trace of a cell with a product and a sum over all ranks."""
    return cluster.trace(PRODUCT_AND_SUM)


def test_each_line_has_the_time_of_its_operations(trace: Trace) -> None:
    product, total = line_time(trace, PRODUCT), line_time(trace, SUM)
    assert product.text == "return a @ b"
    assert total.text == "return jax.lax.psum("
    assert product.compute_s > 0
    assert product.collective_s == 0
    assert total.compute_s == 0
    assert total.collective_s == pytest.approx(collective_s(trace))
    assert total.collective_s > 0
    assert not any(one.cell for one in trace.by_line)


def test_tables_have_equal_totals(trace: Trace) -> None:
    assert totals_agree(trace)
    devices = [one for one in trace.by_device if one.device != HOST_COPIES]
    assert [(one.rank, one.device) for one in devices] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in trace.ranks:
        first, second = (
            one.compute_s + one.collective_s + one.idle_s for one in devices if one.rank == rank
        )
        assert first == pytest.approx(second)
        assert first <= trace.seconds * 1.000001
    names = {one.name: one for one in trace.by_operation}
    assert names["all-reduce"].count == 4
    assert names["all-reduce"].kind == "collective"
    assert any("dot" in name for name in names)


def test_timeline_has_the_busy_times_of_the_devices(trace: Trace) -> None:
    lanes = {(one.rank, one.device, one.kind): one for one in trace.timeline.lanes}
    for one in trace.by_device:
        for kind, seconds in (("compute", one.compute_s), ("collective", one.collective_s)):
            lane = lanes.get((one.rank, one.device, kind))  # type: ignore[call-overload]
            assert (lane is not None) == (seconds > 0)
            assert sum(lane.lengths_us if lane else ()) >= 0.9e6 * seconds - 1
    assert 0 < trace.timeline.end_us < 1e6 * trace.seconds + 1e5


@pytest.mark.usefixtures("trace")
def test_repeated_trace_gives_the_same_lines(cluster: nbdist.Cluster) -> None:
    """The second trace must not reuse the cached programs of the first."""
    repeated = cluster.trace(PRODUCT_AND_SUM)
    assert line_time(repeated, PRODUCT).compute_s > 0
    assert line_time(repeated, SUM).collective_s == pytest.approx(collective_s(repeated))


def test_cached_program_counts_at_the_launching_line(
    cluster: nbdist.Cluster,
) -> None:
    trace = cluster.trace("first = w @ w\nsecond = first @ w\nfor _ in range(3):\n    w @ w\n")
    assert line_time(trace, 1).compute_s > 0
    assert line_time(trace, 2).compute_s > 0
    assert line_time(trace, 4).compute_s > 0
    assert {one.line for one in trace.by_line if one.compute_s} == {1, 2, 4}


@pytest.mark.full  # test_trace_tables.py covers it
def test_function_of_an_earlier_cell_counts_at_its_call(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace("a = 1\ntotal = earlier(x)\n")
    assert line_time(trace, 2).collective_s == pytest.approx(collective_s(trace))
    assert collective_s(trace) > 0


def test_wait_for_a_sleeping_rank_counts_as_collective(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace(f"if rank == 0:\n    time.sleep({SLEEP_S})\nearlier(x)\n")
    waited = dict.fromkeys(trace.ranks, 0.0)
    for one in trace.by_device:
        waited[one.rank] += one.collective_s / 2
    assert waited[1] > SLEEP_S / 2
    assert waited[0] < SLEEP_S / 2
    assert trace.seconds > SLEEP_S
    assert line_time(trace, 3).collective_s == pytest.approx(sum(waited.values()) * 2)


def test_copies_count_at_their_lines(cluster: nbdist.Cluster) -> None:
    cell = "b = np.ones((500, 500))\nc = jax.device_put(b, jax.local_devices()[1])\n"
    trace = cluster.trace(f"{cell}c.block_until_ready()\nd = jax.device_get(c)\n")
    assert line_time(trace, 2).transfer_s > 0
    assert line_time(trace, 4).transfer_s > 0
    assert not any(one.transfer_s for one in trace.by_line if one.line == 1)
    assert {one.device for one in trace.by_device if one.to_device_s} == {HOST_COPIES}


def test_step_is_traced_by_line(cluster: nbdist.Cluster) -> None:
    cluster.run("data = [np.ones((8, 16), 'float32')] * 50\nv = jnp.ones((16, 16))")
    step = (
        "\nhidden = jnp.tanh(batch @ v)\nloss = jnp.mean(hidden ** 2)\nv = v - 0.1 * loss\nloss\n"
    )
    trace = cluster.trace(step, step=StepOptions(data="data"))
    assert len(cluster.last_run.loss) == TRACED_STEPS
    assert line_time(trace, 3).text == "hidden = jnp.tanh(batch @ v)"
    assert line_time(trace, 3).compute_s > 0
    assert line_time(trace, 4).collective_s > 0
    assert totals_agree(trace)
    waits = [one for one in trace.timeline.lanes if one.kind == "input"]
    assert [(one.rank, one.device) for one in waits] == [(0, HOST_COPIES), (1, HOST_COPIES)]
    assert all(len(one.gaps_us) >= TRACED_STEPS - 1 for one in waits)


def test_selected_ranks_are_traced(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace("w @ w", ranks="1")
    assert trace.ranks == (1,)
    assert {one.rank for one in trace.by_device} == {1}


def test_trace_of_a_failing_cell_is_shown(cluster: nbdist.Cluster) -> None:
    shown: list[Trace] = []
    with pytest.raises(CellError, match="ZeroDivisionError"):
        trace_on(cluster, "w @ w\n1 / 0", show=shown.append)
    assert line_time(shown[0], 1).compute_s > 0
    assert cluster.trace("w @ w").by_line  # the profiler is available again


@pytest.mark.full  # rare
def test_pending_work_is_awaited(cluster: nbdist.Cluster) -> None:
    cell = f"""
def nap(value):
    time.sleep({SLEEP_S})
    return value
late = jax.jit(lambda a: jax.pure_callback(nap, jax.ShapeDtypeStruct((), "float32"), a[0, 0]))
here = late(w)
"""
    trace = cluster.trace(cell)
    assert trace.seconds > SLEEP_S
    assert line_time(trace, 4).compute_s > SLEEP_S


def test_dead_rank_loses_its_trace(cluster: nbdist.Cluster) -> None:
    shown: list[Trace] = []
    with pytest.raises(WorkerError, match="rank 1"):
        trace_on(cluster, "import os\nif rank:\n    os._exit(3)\nearlier(x)\n", show=shown.append)
    assert shown == [Trace(ranks=(), seconds=0.0)]
    cluster.restart()
    cluster.run(SETUP)
    assert cluster.trace("w @ w").ranks == (0, 1)


def test_cell_without_device_work_is_noted(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace("answer = 42")
    assert trace.by_operation == ()
    assert [note.partition(":")[0] for note in trace.notes] == ["nothing ran on a device"]
    assert {one.compute_s for one in trace.by_device} == {0.0}


@pytest.mark.full  # tests/session/test_tracing.py covers it
def test_trace_in_progress_is_refused(cluster: nbdist.Cluster) -> None:
    cluster.run("import tempfile\nif rank: jax.profiler.start_trace(tempfile.mkdtemp())")
    with pytest.raises(UsageError, match="another trace is in progress on rank 1"):
        cluster.trace("w @ w")
    cluster.run("if rank: jax.profiler.stop_trace()")
    assert cluster.trace("w @ w").ranks == (0, 1)


@pytest.mark.full  # rare
def test_cell_may_stop_the_profiler(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace("(w @ w).block_until_ready()\njax.profiler.stop_trace()\nw.T @ w")
    assert sum(one.seconds for one in trace.by_line) > 0
    assert cluster.trace("w @ w").ranks == (0, 1)


@pytest.mark.full  # rare
def test_active_debugger_is_noted(cluster: nbdist.Cluster) -> None:
    trace = cluster.trace("import sys\nsys.settrace(None)\nw @ w")
    assert any("lines" in note for note in trace.notes)


@pytest.mark.full  # tests/session/test_tracing.py covers it
def test_trace_under_tensorflow_is_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(UsageError, match="TensorFlow's own profiler does not work in workers"):
        cluster.trace("w @ w", strategy="mirrored")


def test_files_of_all_ranks_are_kept(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    trace = cluster.trace("w @ w", keep=str(tmp_path / "kept"))
    assert trace.folder == str(tmp_path / "kept")
    files = sorted((tmp_path / "kept").rglob("*.xplane.pb"))
    assert [file.name for file in files] == ["rank-0.xplane.pb", "rank-1.xplane.pb"]
    assert all(file.stat().st_size for file in files)


@pytest.mark.full  # rare
def test_compilation_cache_is_enabled_after_a_trace(cluster: nbdist.Cluster) -> None:
    cluster.trace("w @ w")
    assert cluster.run("jax.config.jax_enable_compilation_cache").results[0] == "True"
    assert cluster.run("import sys\nsys.gettrace() is None").results[1] == "True"


def test_kernel_without_workers_traces_itself(plain_kernel: Kernel) -> None:
    done = plain_kernel.run("%%dist_trace -o t\ny = w @ w\nz = jnp.tanh(y)\n").check()
    shown = "\n".join(done.plain)
    assert "%%dist_trace: " in shown
    assert "y = w @ w" in shown
    assert "every operation over time" in shown
    lines = "[(one.line, one.text) for one in t.by_line if one.compute_s]"
    (value,) = plain_kernel.run(lines).check().plain
    assert value == "[(2, 'y = w @ w'), (3, 'z = jnp.tanh(y)')]"


@pytest.mark.full  # tests/session/test_tracing.py covers it
def test_error_without_workers_is_shown_with_the_trace(plain_kernel: Kernel) -> None:
    done = plain_kernel.run("%%dist_trace\ny = w @ w\nraise KeyError('lost')\n")
    assert done.status == "error"
    assert "KeyError" in done.traceback
    assert "y = w @ w" in "\n".join(done.plain)
    assert plain_kernel.run("%%dist_trace\nw @ w\n").check().plain


@pytest.mark.full  # tests/magics/test_trace.py covers them
def test_invalid_options_without_workers_are_all_named(plain_kernel: Kernel) -> None:
    done = plain_kernel.run("%%dist_trace --steps 3 -o 1x\nw @ w\n")
    assert "--steps without --data" in done.traceback
    assert "-o 1x" in done.traceback
    done = plain_kernel.run("%%dist_trace --keep /dev/null\nw @ w\n")
    assert "--keep /dev/null is a file: use a folder" in done.traceback
    done = plain_kernel.run("%%dist_trace --ranks 0 --strategy pjrt\nw @ w\n")
    assert "--ranks, --strategy: no workers are running" in done.traceback


def test_magic_traces_the_ranks_of_a_cluster(kernel: Kernel) -> None:
    kernel.run("%%dist_run\nimport jax.numpy as jnp\nw = jnp.ones((100, 100))").check()
    done = kernel.run("%%dist_trace -o t\nw @ w\n").check()
    assert any("on rank 0-1" in text for text in done.plain)
    (value,) = kernel.run("t.ranks, [one.line for one in t.by_line if one.compute_s]").check().plain
    assert value == "((0, 1), [2])"


@pytest.mark.full  # the method traces a step too
def test_magic_traces_a_step(kernel: Kernel) -> None:
    kernel.run("import numpy as np\nrows = [np.ones((4, 100), 'float32')] * 9").check()
    step = "hidden = batch @ w\nloss = (hidden ** 2).mean()\nloss\n"
    kernel.run(f"%%dist_trace --data rows --steps 5 -o t\n{step}").check()
    expression = "t.ranks, [one.text for one in t.by_line if one.line == 2]"
    (shown,) = kernel.run(expression).check().plain
    assert shown == "((0, 1), ['hidden = batch @ w'])"
