"""Hosts of another platform or with another Python, which `--install` cannot use."""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
from pathlib import Path
from typing import IO

import msgspec
import pytest

from nbdist.cluster.remote_host import environment_lock
from nbdist.cluster.remote_host.environment_install import HostEnvironments
from nbdist.errors import StartError
from nbdist.records import EnvironmentLock, Host, LockedPackage

pytestmark = pytest.mark.processes

LOCK = EnvironmentLock(
    python="3.11.7",
    platform=sysconfig.get_platform(),
    packages=(LockedPackage(name="numpy", version="2.4.6", size_bytes=1),),
    fault="error: Failed to fetch: connection refused",
)


def refusal(folder: Path, lock: EnvironmentLock) -> str:
    """Return the error of an installation on this machine as if it had another processor."""
    (folder / "environment.msgpack").write_bytes(msgspec.msgpack.encode(lock))
    uv = Path(environment_lock.find_uv()).parent
    env = {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",  # double: Python reports another platform
        "XDG_CACHE_HOME": str(folder),
        "HOME": str(folder),
        "PATH": f"{uv}{os.pathsep}{os.environ['PATH']}",
    }

    def start(command: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(["sh", "-c", command], env=env, stdin=pipe, stdout=pipe, stderr=log)

    with pytest.raises(StartError) as caught:
        HostEnvironments(folder, folder / "packed").python_on(Host(name="other"), start)
    return str(caught.value)


@pytest.mark.skipif(not environment_lock.find_uv(), reason="uv is not installed")
def test_another_platform_needs_the_index(tmp_path: Path) -> None:
    text = refusal(tmp_path, msgspec.structs.replace(LOCK, python=platform.python_version()))
    assert "its platform is linux-aarch64, so it needs the wheels of the index" in text
    assert "error: Failed to fetch: connection refused: give it access to the index" in text


def test_another_python_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, msgspec.structs.replace(LOCK, python="3.2.0"))
    assert "no Python 3.2 there: install it, or use --python PATH" in text
