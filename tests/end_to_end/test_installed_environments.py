"""Environments that `--install` makes on hosts with disks of their own.

The notebook's environment contains nbdist and its requirements only, as it would be too large else.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from nbdist.cluster.remote_host import environment_lock
from nbdist.utils import distributions
from nbdist.utils.polling import repeat_until
from tests import exact
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nbdist.utils.wheels import Wheel
    from tests import netns

pytestmark = [
    needs_hosts,
    pytest.mark.processes,
    pytest.mark.skipif(not environment_lock.find_uv(), reason="uv is not installed"),
]

CACHE = Path.home() / ".cache"
FOLDER = CACHE / "nbdist/environments"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PROGRAM_S = 240.0
END_S = 30.0

CLOSED = "http://127.0.0.1:1/"
"""Index that nobody can reach."""


VALUE = "value "
"""Start of a line with a value as JSON."""

START = """
with nbdist.Cluster(hosts=HOSTS, framework="none", install=True) as cluster:
    cell = "import sys, numpy, nbdist\\nsys.prefix, nbdist.__file__, numpy.__version__"
    give(list(cluster.run(cell).results.values()))
"""


class Output(NamedTuple):
    """Output of a program, and the values that it has given."""

    text: str
    error: str
    values: list[Any]


class Notebook:
    """A small environment of Python with nbdist, and programs that run in it.

    Args:
        folder: its folder.
        *libraries: further distributions in the environment.

    Attributes:
        wheels: the wheels that it was installed from.
    """

    def __init__(self, folder: Path, *libraries: str) -> None:
        self._folder = folder
        installed = distributions.found()
        names = distributions.with_requirements({"nbdist", *libraries})
        chosen = {name: installed[name] for name in sorted(names)}
        self.wheels: dict[str, Wheel] = environment_lock.pack(chosen, folder / "packed")
        uv = environment_lock.find_uv()
        subprocess.run([uv, "venv", "--quiet", str(folder / "environment")], check=True)
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--offline", "--no-index"]
        for wheel in self.wheels.values():
            install += ["--find-links", str(wheel.path.parent)]
        pins = [f"{name}=={chosen[name].version}" for name in self.wheels]
        subprocess.run([*install, "--python", self._python, *pins], check=True)

    @property
    def _python(self) -> str:
        return str(self._folder / "environment/bin/python")

    def start(
        self, network: Hosts, source: str, index: str = CLOSED, **env: str
    ) -> subprocess.Popen[str]:
        """Start a program."""
        environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {
            "PYTHONUNBUFFERED": "1",
            "NBDIST_SSH_CONFIG": str(network.ssh_config),
            "JUPYTER_RUNTIME_DIR": str(self._folder / "runtime"),
            "NBDIST_RUNS_FOLDER": str(self._folder / "runs"),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "UV_DEFAULT_INDEX": index,
            "PATH": f"{Path(environment_lock.find_uv()).parent}{os.pathsep}{os.environ['PATH']}",
        }
        head = (
            f"import json, nbdist\nHOSTS = {network.names!r}\n"
            f"def give(value):\n    print({VALUE!r} + json.dumps(value))\n"
        )
        return subprocess.Popen(
            [self._python, "-c", head + textwrap.dedent(source)],
            env=environment | env,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, network: Hosts, source: str, index: str = CLOSED, **env: str) -> Output:
        """Run a program."""
        return ended(self.start(network, source, index, **env))


def ended(program: subprocess.Popen[str]) -> Output:
    """Wait for the end of a program."""
    try:
        text, error = program.communicate(timeout=PROGRAM_S)
    finally:
        program.kill()
    return Output(text, error, values_of(text.splitlines()))


def values_of(lines: Iterable[str]) -> list[Any]:
    """Return the values that a program has given in lines of its output."""
    return [json.loads(line.removeprefix(VALUE)) for line in lines if line.startswith(VALUE)]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    return Notebook(tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(2) as network:
        yield network


@pytest.fixture
def apart(network: Hosts) -> Hosts:
    """Hosts with folders of caches of their own, which are empty."""
    CACHE.mkdir(exist_ok=True)
    for host in network.each:
        host.power_off()
        host.power_on()
        host.own_disk(CACHE)
    return network


def on(host: netns.Host, *command: str) -> str:
    """Run a command with the disks of a host, and return its output."""
    first = next(p for p in host.processes() if "sshd" in p.name())
    enter = ["nsenter", "-t", str(first.pid), "-m", *command]
    return subprocess.run(enter, check=True, capture_output=True, text=True).stdout


def files(host: netns.Host) -> list[str]:
    """Return the names in the folder of environments."""
    return on(host, "ls", str(FOLDER)).split()


def test_wheels_are_sent_to_hosts_without_an_index(apart: Hosts, notebook: Notebook) -> None:
    seen = notebook.run(
        apart,
        START
        + """
    give([row.what for row in cluster.examine(modules=["numpy", "msgspec"])])
    kill_fork_server = "import os, signal\\nos.kill(os.getppid(), signal.SIGKILL)"
    try:
        cluster.run(kill_fork_server)
    except nbdist.errors.WorkerError:
        pass
    cluster.restart()
    give(list(cluster.run(cell).results.values()))
""",
    )
    assert seen.values[1] == [], seen
    assert seen.values[0] == seen.values[2]
    assert len(seen.values[0]) == 2
    numpy = notebook.wheels["numpy"].path.name.split("-")[1]
    for result in seen.values[0]:
        prefix, package, version = ast.literal_eval(result)
        assert Path(prefix).parent == FOLDER
        assert Path(package).is_relative_to(prefix)
        assert version == numpy
    assert f"environment of {len(notebook.wheels)} packages, " in seen.text
    assert f"{apart.names[0]} installed it from " in seen.text
    assert "of wheels" in seen.text
    again = notebook.run(apart, START)
    assert again.values[0] == seen.values[0]
    assert all(f"{name} reuses it" in again.text for name in apart.names)


CHANGED = """
import pathlib, time
cell = "import sys, numpy, nbdist\\nsys.prefix, nbdist.__file__, numpy.__version__"
with nbdist.Cluster(hosts=HOSTS[:1], framework="none", install=True) as cluster:
    give(list(cluster.run(cell).results.values()))
    cluster.resize(HOSTS)
    give(list(cluster.run(cell).results.values()))
    end = time.monotonic() + 60
    while not pathlib.Path(GO).exists() and time.monotonic() < end:
        time.sleep(0.05)
    cluster.restart()
    give(list(cluster.run(cell).results.values()))
"""


def test_new_and_replaced_hosts_get_the_environment_of_the_start(
    apart: Hosts, notebook: Notebook, tmp_path: Path
) -> None:
    """A resize adds a host, and a restart finds another machine with the name of a lost one."""
    go = tmp_path / "go"
    program = notebook.start(apart, f"GO = {str(go)!r}\n{CHANGED}")
    assert program.stdout is not None
    lines: list[str] = []
    while len(values_of(lines)) < 2:
        lines.append(program.stdout.readline())
        assert lines[-1], (lines, ended(program))
    replaced = apart.each[1]
    replaced.power_off()
    replaced.power_on()
    replaced.own_disk(CACHE)
    go.touch()
    rest = ended(program)
    one, two, three = [*values_of(lines), *rest.values]
    assert one * 2 == two == three, (lines, rest)
    assert Path(ast.literal_eval(one[0])[0]).name in files(replaced)


RECOVERED = f"""
from nbdist.records import Saving, StepOptions
with nbdist.Cluster(hosts=HOSTS, framework="jax", install=True) as cluster:
    cluster.run({exact.setup(exact.BATCH)!r})
    cluster.run(HELD)
    options = StepOptions(data="held", steps=STEPS)
    run = cluster.run({exact.STEP!r}, step=options, saving=Saving(folder=SAVED, every_steps=20))
    give(run.loss.tolist())
    give([[list(recovery.ranks), recovery.step] for recovery in run.recoveries])
    give(list(cluster.run("import sys, jax\\nsys.prefix, jax.__file__").results.values()))
"""


@pytest.mark.full  # a minute and a half: the environment contains JAX
def test_a_host_that_is_replaced_during_a_cell_gets_the_environment(
    apart: Hosts, tmp_path: Path
) -> None:
    """Another machine with the name of the lost one has an empty disk."""
    steps, go, replaced = exact.HELD_STEP + 18, tmp_path / "go", apart.each[1]
    held = exact.HELD.format(batch=exact.BATCH, step=exact.HELD_STEP, path=str(go))
    known = f"HELD, STEPS, SAVED = {held!r}, {steps}, {str(tmp_path / 'saved')!r}\n"
    notebook = Notebook(tmp_path, "jax", "orbax-checkpoint")
    program = notebook.start(apart, known + RECOVERED)
    try:
        reported = exact.FAULT_STEP * len(apart.each)
        assert repeat_until(lambda: exact.steps_of(tmp_path) >= reported, PROGRAM_S)
        replaced.power_off()
        replaced.power_on()
        replaced.own_disk(CACHE)
        go.touch()
    finally:
        seen = ended(program)
    losses, recovered, packages = seen.values
    np.testing.assert_array_equal(losses, exact.losses(steps))
    assert recovered == [[[1], exact.FAULT_STEP]]
    for package in map(ast.literal_eval, packages):
        assert Path(package[0]).parent == FOLDER
        assert Path(package[1]).is_relative_to(package[0])
    assert Path(package[0]).name in files(replaced)


@pytest.mark.full
def test_an_environment_without_python_is_built_again(apart: Hosts, notebook: Notebook) -> None:
    seen = notebook.run(apart, START)
    (place,) = [
        name for name in files(apart.each[0]) if name not in ("wheels",) and "." not in name
    ]
    on(apart.each[0], "rm", str(FOLDER / place / "bin" / "python"))
    repaired = notebook.run(apart, START)
    assert repaired.values[0] == seen.values[0]
    assert f"{apart.names[0]} installed it from 0 B of wheels" in repaired.text


def test_hosts_that_reach_the_index_use_it(apart: Hosts, notebook: Notebook) -> None:
    with index(notebook, apart.address, leave_out={"msgspec", "nbdist"}) as url:
        seen = notebook.run(apart, START, url)
    assert len(seen.values[0]) == 2, seen
    assert all(f"{name} installed it from the index" in seen.text for name in apart.names), (
        seen.text
    )
    wheels = on(apart.each[0], "ls", str(FOLDER / "wheels")).split()
    assert notebook.wheels["msgspec"].sha256 in wheels
    assert notebook.wheels["numpy"].sha256 not in wheels


@pytest.mark.full
def test_two_starts_at_the_same_time_build_once(apart: Hosts, notebook: Notebook) -> None:
    both = [notebook.start(apart, START, JUPYTER_RUNTIME_DIR=f"runtime{n}") for n in range(2)]
    texts = [ended(program) for program in both]
    first = apart.names[0]
    assert sorted(f"{first} reuses it" in seen.text for seen in texts) == [False, True], texts
    assert texts[0].values[0] == texts[1].values[0]


@pytest.mark.full
def test_an_interrupt_leaves_no_incomplete_environment(apart: Hosts, notebook: Notebook) -> None:
    host = apart.each[0]
    host.throttle("40mbit")
    try:
        program = notebook.start(apart, START)
        assert program.stdout is not None
        while "receives file 3" not in program.stdout.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        interrupted = ended(program)
    finally:
        host.throttle("")
    assert "KeyboardInterrupt" in interrupted.error
    assert repeat_until(lambda: not any("nbdist" in text for text in commands(host)), END_S)
    assert not any(name.endswith(("_64", ".new")) for name in files(host))
    again = notebook.run(apart, START)
    assert again.values, (again.text, again.error)


def commands(host: netns.Host) -> list[str]:
    """Return the command lines of programs that nbdist runs on a host."""
    return [
        f"nbdist {process.cmdline()}"
        for process in host.processes()
        if "sshd" not in process.name() and process.name() not in ("unshare", "ip", "sh")
    ]


def test_hosts_that_cannot_be_used_are_named_with_the_remedy(
    apart: Hosts, notebook: Notebook, tmp_path: Path
) -> None:
    full, other = apart.each
    on(full, "mkdir", "-p", str(FOLDER))
    on(full, "mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", str(FOLDER))
    foreign = tmp_path / "python"
    base = f"{sys.base_prefix}/bin/python{VERSION}"
    platform = "_PYTHON_HOST_PLATFORM=linux-riscv64"  # double: Python reports another platform
    foreign.write_text(f'#!/bin/sh\n{platform} exec {base} "$@"\n')
    foreign.chmod(0o755)
    start = """
def refused(*hosts):
    try:
        nbdist.Cluster(hosts=hosts, framework="none", install=True)
    except nbdist.errors.StartError as error:
        give(str(error))
from nbdist.records import Host
"""
    seen = notebook.run(
        apart,
        f"""{start}
refused(HOSTS[0], Host(name=HOSTS[1], python="/bin/false"))
refused(Host(name=HOSTS[1], python={str(foreign)!r}))
""",
    )
    both, unlike = seen.values
    assert "2 of the hosts cannot be used" in both
    assert f"{full.name}: the environment needs " in both
    assert f"in {FOLDER}, and 60.0 MiB are free: free space there" in both
    assert f"{other.name}: no Python {VERSION} there: install it, or use --python PATH" in both
    assert f"{other.name}: uv is not installed there, and the notebook's runs on linux-" in unlike
    assert "not on linux-riscv64: install uv there" in unlike
    assert not commands(full) + commands(other)
    assert not any(name.endswith(("_64", ".new")) for name in files(full))


@contextlib.contextmanager
def index(notebook: Notebook, address: str, leave_out: set[str]) -> Iterator[str]:
    """Serve an index with the wheels of the notebook."""
    with tempfile.TemporaryDirectory() as folder:
        for name, wheel in notebook.wheels.items():
            if name not in leave_out:
                page = Path(folder, "simple", name)
                page.mkdir(parents=True)
                (page / wheel.path.name).symlink_to(wheel.path)
                link = f'<a href="{wheel.path.name}#sha256={wheel.sha256}">{wheel.path.name}</a>'
                (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
        handler = functools.partial(QuietHandler, directory=folder)
        with http.server.ThreadingHTTPServer((address, 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://{address}:{server.server_port}/simple/"
            finally:
                server.shutdown()
                thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Server of a folder without a log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        del format, args
