"""Program that installs an environment on a host, run as a process with pipes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster.remote_host import host_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

BUILD = {"op": "build", "wheels": {}, "requirements": "", "probe": "", "env": {}, "offline": True}


class Program:
    """The running program."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, content: bytes = b"", **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(message)}\n".encode() + content)
        self._process.stdin.flush()
        while True:
            line = self._process.stdout.readline().decode()
            answer: dict[str, Any] = json.loads(line.removeprefix(host_program.MARK))
            if "progress" not in answer:
                return answer


@contextlib.contextmanager
def started(cache: Path) -> Iterator[tuple[Program, dict[str, Any]]]:
    """Start the program, and return it with its first answer."""
    command = [sys.executable, str(host_program.__file__)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        program = Program(process)
        yield program, program.ask(env={"XDG_CACHE_HOME": str(cache)}, digest="d1")


def test_failure_of_uv_without_output_leaves_no_environment(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nexit 3\n")  # double: it ends as if it was killed
    uv.chmod(0o755)
    with started(tmp_path) as (program, state):
        assert program.ask(**BUILD, uv=str(uv)) == {"fault": "uv ended with status 3"}
    names = {path.name for path in (tmp_path / "nbdist/environments").iterdir()}
    assert names == {"wheels", next(name for name in names if name.endswith(".lock"))}
    assert state["folder"] == str(tmp_path / "nbdist/environments")


def test_files_that_arrived_in_part_are_continued(tmp_path: Path) -> None:
    content = b"some bytes of a wheel"
    name = hashlib.sha256(content).hexdigest()
    folder = tmp_path / "nbdist/environments"
    with started(tmp_path) as (program, _):
        assert program.ask(op="lacking", names=[name]) == {"lacking": {name: 0}}
        part = next(folder.glob("*.lock")).with_suffix(f".{name}.part")
        part.write_bytes(content[:5])
        assert program.ask(op="lacking", names=[name]) == {"lacking": {name: 5}}
        store = {"op": "store", "name": name, "offset": 5, "bytes": len(content) - 5}
        assert program.ask(content[5:], **store) == {"stored": True}
        assert program.ask(op="lacking", names=[name]) == {"lacking": {}}
        wrong = {"op": "store", "name": "0" * 64, "offset": 0, "bytes": 3}
        assert "arrived with other content" in program.ask(b"abc", **wrong)["error"]
    assert (folder / "wheels" / name).read_bytes() == content


def test_folder_that_cannot_be_written_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "nbdist").write_text("a file")
    with started(tmp_path) as (_, answer):
        assert answer["error"].startswith(f"{tmp_path}/nbdist/environments/wheels: Not a directory")
        assert "XDG_CACHE_HOME" in answer["error"]


def test_environments_and_wheels_that_nothing_uses_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "nbdist/environments"
    (folder / "wheels").mkdir(parents=True)
    before = time.time() - host_program.KEPT_S - 60

    def age(*paths: Path) -> None:
        for path in paths:
            os.utime(path, (before, before))

    for digest in ("recent", "old", "running", "locked"):
        python = folder / f"{digest}-linux" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to("/bin/sleep")  # double: the environment's Python
        (folder / f"{digest}-linux.lock").touch()
    age(*(folder / f"{digest}-linux.lock" for digest in ("old", "running", "locked")))
    for name in ("old", "recent"):
        (folder / "wheels" / name).write_text(name)
    age(folder / "wheels" / "old")
    running = folder / "running-linux" / "bin" / "python"
    with subprocess.Popen([str(running), "60"]) as process:
        try:
            with (folder / "locked-linux.lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                with started(tmp_path):
                    pass
            left = {path.name for path in folder.iterdir() if path.is_dir()}
        finally:
            process.kill()
    assert left == {"recent-linux", "running-linux", "locked-linux", "wheels"}
    assert {path.name for path in (folder / "wheels").iterdir()} == {"recent"}


def test_wheels_that_a_start_uses_are_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "nbdist/environments/wheels/used"
    wheel.parent.mkdir(parents=True)
    with started(tmp_path) as (program, _):
        wheel.write_text("wheel")
        before = time.time() - host_program.KEPT_S - 60
        os.utime(wheel, (before, before))
        assert program.ask(op="lacking", names=["used"]) == {"lacking": {}}
    with started(tmp_path):
        pass
    assert wheel.exists()
