"""The browser's part in the wheel, and what is said where it cannot be built."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nbdist.records import RUN_MIME

if TYPE_CHECKING:
    import zipfile

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What is in the repository, nothing of it built."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BUILD, str(folder / "dist")],
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_without_node_it_says_what_to_install(checkout: Path, tmp_path: Path) -> None:
    ended = build(checkout, str(tmp_path / "nothing"))
    assert ended.returncode != 0
    assert "nbdist: there is no Node.js" in ended.stderr
    assert "conda install -c conda-forge 'nodejs>=22.12'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("version", ["18.20.1", "20.18.3", "21.7.0", "22.11.0"])
def test_an_old_node_is_named(checkout: Path, tmp_path: Path, version: str) -> None:
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text(f"#!/bin/sh\necho v{version}\n")
    node.chmod(0o755)
    ended = build(checkout, str(node.parent))
    assert ended.returncode != 0
    assert f"Node.js {version.rpartition('.')[0]} is too old" in ended.stderr


def test_the_wheel_installs_the_extension_and_switches_it_on(wheel: zipfile.ZipFile) -> None:
    names = {name.partition(".data/data/")[2]: name for name in wheel.namelist()}
    package = json.loads(
        wheel.read(names["share/jupyter/labextensions/nbdist/package.json"]).decode()
    )
    remote = package["jupyterlab"]["_build"]["load"]
    assert f"share/jupyter/labextensions/nbdist/{remote}" in names
    assert "share/jupyter/labextensions/nbdist/install.json" in names
    switch = json.loads(wheel.read(names["etc/jupyter/jupyter_server_config.d/nbdist.json"]))
    assert switch["ServerApp"]["jpserver_extensions"] == {"nbdist": True}


def test_the_extension_ships_once_and_the_widget_with_it(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert not [name for name in names if name.startswith("nbdist/labextension")]
    assert len([name for name in names if "remoteEntry" in name]) == 1
    assert "nbdist/static/widget.js" in names


@pytest.mark.parametrize(
    ("scripts", "most_bytes"),
    [("share/jupyter/labextensions/nbdist/static/", 150_000), ("nbdist/static/widget.js", 60_000)],
)
def test_the_browser_has_little_to_load(
    wheel: zipfile.ZipFile, scripts: str, most_bytes: int
) -> None:
    """Of the extension all chunks together, of which a page may want each; as gzip sends them."""
    loaded = [name for name in wheel.namelist() if scripts in name and name.endswith(".js")]
    sizes = {name: len(gzip.compress(wheel.read(name))) for name in loaded}
    assert 0 < sum(sizes.values()) <= most_bytes, sizes


def test_the_mime_type_is_the_records(wheel: zipfile.ZipFile) -> None:
    scripts = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".js")]
    assert any(RUN_MIME in script for script in scripts)


def test_no_file_of_the_build_holds_an_address() -> None:
    for name in ("yarn.lock", ".yarnrc.yml"):
        assert "://" not in (ROOT / "labextension" / name).read_text(), name
