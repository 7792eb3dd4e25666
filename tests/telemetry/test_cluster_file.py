from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.records import ClusterState
from nbdist.telemetry.cluster_file import ClusterFile
from nbdist.utils.files import PLACEMENT_FILE, LateFiles, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_FILES = Path("/proc/self/fd")


@pytest.fixture
def files() -> Iterator[LateFiles]:
    late = LateFiles()
    yield late
    late.close()


def written(folder: Path, files: LateFiles) -> ClusterState:
    files.settle()
    return msgspec.json.decode((folder / "cluster.json").read_bytes(), type=ClusterState)


def test_the_shown_placement_is_kept_with_its_time(tmp_path: Path, files: LateFiles) -> None:
    file = ClusterFile(tmp_path, ("jax",), files)
    file.begin("one", ())
    assert written(tmp_path, files).placement is None
    before = time.time()
    file.show(("params", "state"), "<p>größer</p>")
    file.begin("two", ())
    state = written(tmp_path, files)
    assert state.run == "two"
    assert state.placement is not None
    assert state.placement.names == ("params", "state")
    assert before <= state.placement.at <= time.time()
    assert state.placement.pids == ()
    assert (tmp_path / PLACEMENT_FILE).read_text("utf-8") == "<p>größer</p>"


IN_A_TERMINAL = """
from pathlib import Path
from nbdist.telemetry import frontend_request
from nbdist.telemetry.cluster_file import ClusterFile
from nbdist.utils.files import LateFiles
files = LateFiles()
ClusterFile(Path("."), ("jax",), files)
files.close()
print("request", repr(frontend_request.this_request().id))
"""


@pytest.mark.processes
def test_a_cluster_starts_in_the_ipython_terminal(tmp_path: Path) -> None:
    """The terminal application of IPython differs from that of a kernel."""
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", IN_A_TERMINAL]
    done = subprocess.run(
        command, cwd=tmp_path, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.stdout == "request ''\n", done.stdout + done.stderr


def test_a_placement_that_cannot_be_written_is_left_out(tmp_path: Path, files: LateFiles) -> None:
    file = ClusterFile(tmp_path, ("jax",), files)
    file.write((), run="")
    (tmp_path / PLACEMENT_FILE).mkdir()
    file.show(("params",), "<p>lost</p>")
    assert written(tmp_path, files).placement is None


def test_a_file_is_read_up_to_its_limit_and_not_through_links(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(b"12345")
    assert read_file(folder / "file", 5) == b"12345"
    (folder / "link").symlink_to(folder / "file")
    (tmp_path / "elsewhere").symlink_to(folder)
    descriptors = len(list(OWN_FILES.iterdir()))
    for path in (folder / "link", tmp_path / "elsewhere" / "file", folder / "none", folder):
        with pytest.raises(OSError, match=r"symbolic|directory|No such"):
            read_file(path, 5)
    with pytest.raises(OSError, match="too large"):
        read_file(folder / "file", 4)
    assert len(list(OWN_FILES.iterdir())) == descriptors
