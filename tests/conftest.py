"""Real engines, shared by the tests of a module; what a module leaves behind fails it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbdist.session import discovery
from tests import clusters, training
from tests.clusters import Held, kept, stop_all
from tests.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

PR_SET_CHILD_SUBREAPER = 36
CELL_ENDS_S = 30.0

QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
}
"""JAX compiles in a fraction of the time, here and on engines, and the numbers are the same.

The first leaves out LLVM's expensive passes, which XLA's fusion emitters run all the same; the
second has it do without them. JAX reads the first as it is imported, which tests do at once.
`tests/end_to_end/test_step_options.py` sets both back, and has all that XLA does for a user.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="also what repeats at other sizes, frameworks, and rarer faults",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A shell has what it runs in the background ignore SIGINT, and with it all that we start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(QUICK)
    # A machine that is busy is no failure.
    examples = 100 if config.getoption("--full") else 25
    hypothesis.settings.register_profile("nbdist", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("nbdist")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        repeated = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=repeated)
        items[:] = [item for item in items if item not in repeated]


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Apart from the clusters of other tests, which this process has; a failure leaves nothing."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path / "runs"))
    yield
    discovery.stop_all()


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind() -> Iterator[None]:
    """No process, thread or socket of ours outlives the module that made it, but kept clusters."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
    before = Held.now()
    yield
    deadline = time.monotonic() + 5
    while (left := _left_behind(before)) and time.monotonic() < deadline:
        time.sleep(0.05)  # ZeroMQ closes its sockets on a thread of its own
    assert not left, f"left behind: {left}"


def _left_behind(before: Held) -> list[object]:
    now, known = Held.now().beyond(before), kept()
    ours = now.processes().difference(*(held.processes() for held in known))
    _, running = psutil.wait_procs(ours, timeout=0)
    return [
        *running,
        *now.threads.difference(*(held.threads for held in known)),
        *now.sockets.difference(*(held.sockets for held in known)),
    ]


@pytest.fixture
def bounded() -> Iterator[None]:
    """A cell whose end is lost fails its test, and does not hang it."""
    with clusters.bounded(CELL_ENDS_S):
        yield


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
        stop_all()


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    """Three light workers, shared by the module's tests: most need no TensorFlow."""
    with clusters.cluster(hosts=3, framework="jax") as running:
        yield running


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Of what `make` has built; it takes no Node."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, *command, str(folder), str(root)], check=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as built:
        yield built


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
        running.run("%load_ext nbdist\n%dist_start 2 --framework jax --seed 7").check()
        yield running


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest) -> training.Form:
    """The form that `training.forms` asks for."""
    return training.FORMS[request.param]
