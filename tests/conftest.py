"""Real engines, shared by the tests of a module; what a module leaves behind fails it."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbdist
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """No process, thread or socket of ours outlives the module that made it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    sockets = _listening()
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    _, left = psutil.wait_procs(left, timeout=5)
    assert not left, f"processes left behind: {left}"
    threads = [t.name for t in threading.enumerate() if t.name.startswith("nbdist")]
    assert not threads, f"threads left behind: {threads}"
    assert _listening() <= sockets, "sockets left listening"


def _listening() -> set[Any]:
    connections = psutil.Process().net_connections()
    return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True, scope="session")
def own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Clusters and runs of the tests keep their files apart from the user's."""
    folder = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
        patch.setenv("NBDIST_RUNS_FOLDER", str(folder / "runs"))
        patch.setenv("NBDIST_KEPT_RUNS", "0")  # what is removed is said, and tests listen
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def quick_compilations() -> Iterator[None]:
    """JAX compiles in a fraction of the time, and the numbers are the same.

    The first variable leaves out LLVM's expensive passes, which XLA's fusion emitters run all the
    same; the second has it do without them. `tests/test_step_options.py` sets both back, and has
    all that XLA does for a user.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Three light workers, shared by the module's tests: most need no TensorFlow."""
    with nbdist.Cluster(hosts=3, framework="jax") as running:
        yield running


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """An IPython shell, without a kernel, in which the extension is loaded."""
    InteractiveShell.clear_instance()
    running = InteractiveShell.instance()
    running.run_line_magic("load_ext", "nbdist")
    yield running
    running.run_line_magic("unload_ext", "nbdist")
    running.restore_sys_module_state()
    running.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A real notebook kernel in a process of its own, with two workers started in it."""
    with Kernel() as running:
        running.run("%load_ext nbdist\n%dist_start 2 --framework jax").check()
        yield running
