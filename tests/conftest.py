"""Real engines that the tests of a module share. A module that leaves resources behind fails."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
import zipfile
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from packaging.version import Version

from nbdist.session import discovery
from tests import clusters, references, training, without_tensorflow
from tests.clusters import Held, kept, stop_all
from tests.kernels import Kernel
from tests.site import sitecustomize

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

TESTS = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36
CELL_ENDS_S = 30.0

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
if Version(importlib.metadata.version("jax")) < Version("0.11"):
    QUICK["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
"""Options that make JAX compile faster, here and on engines, with the same numbers.

The first option skips LLVM's expensive passes, but XLA's fusion emitters run them anyway. The
second option turns these emitters off; from JAX 0.11 on, XLA does not have it and would end the
process. JAX reads the first option at its import, which happens at the start of the tests.
`tests/end_to_end/test_step_options.py` resets both and tests the full pipeline of XLA.
"""


STARTING = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
"""Audit events of a process that starts another one."""

ALLOWED = ("git", "uname")
"""Programs that any test may start. TensorFlow's import calls `uname`."""

FOLDERS = ("browser", "end_to_end")
"""Folders in which every test has the mark `processes`."""

FIXTURES = frozenset({"cluster", "kernel", "wheel"})
"""Fixtures that start processes: tests that use them have the mark `processes`."""


class ProcessGuard:
    """Audit hook that fails a test of `make test-unit` if the test starts a process.

    These tests have neither the mark `processes` nor the mark `full`. Teardowns may start
    processes: the last test of a module ends fixtures that other tests have set up.

    Attributes:
        is_strict: True while such a test is set up or runs.
    """

    def __init__(self) -> None:
        self.is_strict = False
        self._pid = os.getpid()
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_strict or event not in STARTING or os.getpid() != self._pid:
            return
        if event != "subprocess.Popen" or Path(str(arguments[0])).name not in ALLOWED:
            raise RuntimeError(
                f"a test without the mark `processes` starts one: {event} {arguments[:2]}"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._guarded(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._guarded(item))

    def _guarded(self, item: pytest.Item) -> Iterator[None]:
        self.is_strict = not any(map(item.get_closest_marker, ("processes", "full")))
        try:
            return (yield)
        finally:
            self.is_strict = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also run repetitions at other sizes, in other frameworks, and rare faults",
    )
    parser.addoption("--unit", action="store_true", help="run only the tests that start no process")
    parser.addoption(
        "--processes", action="store_true", help="run only the tests that `--unit` leaves out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Restore SIGINT: a shell ignores it in background jobs and in all their children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until the end of the collection, which creates millions of permanent objects
    os.environ.update(QUICK)
    python_path = [str(Path(sitecustomize.__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    # No deadline: a busy machine is not a failure.
    examples = 100 if config.getoption("--full") else 25
    hypothesis.settings.register_profile("nbdist", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("nbdist")
    config.pluginmanager.register(ProcessGuard())
    without_tensorflow.register(config.pluginmanager)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the folders of `FOLDERS` with `--unit`. Their import alone takes seconds."""
    skipped = config.getoption("--unit") and collection_path in map(TESTS.joinpath, FOLDERS)
    return True if skipped else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start processes by their folder or fixtures, and deselect tests."""
    left_out = set() if config.getoption("--full") else {"full"}
    if config.getoption("--unit"):
        left_out = {"full", "processes"}
    needs_processes = config.getoption("--processes")
    kept, deselected = [], []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDERS or not FIXTURES.isdisjoint(fixtures):
            item.add_marker("processes")
        marks = {mark.name for mark in item.iter_markers()}
        is_unit = marks.isdisjoint({"full", "processes"})
        is_kept = left_out.isdisjoint(marks) and not (needs_processes and is_unit)
        (kept if is_kept else deselected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Exclude the objects of the collection from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use separate folders from those of other clusters, and stop clusters after a failure."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path / "runs"))
    yield
    discovery.stop_all()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """Check that no process, thread or socket outlives its module, except kept clusters."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    before = Held.now()
    yield
    deadline = time.monotonic() + 30
    while (left := _left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.05)  # ZeroMQ closes its sockets on its own thread
    assert not left, f"left behind: {left}"


def _left_behind(before: Held) -> list[object]:
    now, known = Held.now().beyond(before), kept()
    ours = now.processes().difference(
        references.server_processes(), *(held.processes() for held in known)
    )
    # Python's own process, which locks of `multiprocessing` start from Python 3.14 on.
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    ours = {process for process in ours if process.pid != tracker}
    _, running = psutil.wait_procs(ours, timeout=0)
    return [
        *running,
        *now.threads.difference(*(held.threads for held in known)),
        *now.sockets.difference(*(held.sockets for held in known)),
    ]


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fail the test if a cell does not end, instead of a hang."""
    with clusters.bounded(CELL_ENDS_S):
        yield


@pytest.fixture(autouse=True, scope="session")
def own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Separate the files of the tests' clusters and runs from the user's."""
    folder = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
        patch.setenv("NBDIST_RUNS_FOLDER", str(folder / "runs"))
        patch.setenv(
            "NBDIST_KEPT_RUNS", "0"
        )  # nbdist reports removed runs, and tests check its output
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield folder
        stop_all()
        references.stop_servers()


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Provide three lightweight workers to the module's tests. Most need no TensorFlow."""
    with clusters.cluster(hosts=3, framework="jax") as running:
        yield running


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build a wheel from the output of `make`. This needs no Node."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run(
        [sys.executable, *command, str(folder), str(TESTS.parent)], check=True, timeout=120
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as built:
        yield built


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """Provide an IPython shell without a kernel that has the extension loaded."""
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
    """Provide a real notebook kernel in its own process, with two workers."""
    with Kernel() as running:
        running.run("%load_ext nbdist\n%dist_start 2 --framework jax --seed 7").check()
        yield running


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> training.Form:
    """Return the form that `training.forms` requests."""
    return training.FORMS[request.param]
