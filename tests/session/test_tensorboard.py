from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nbdist.errors import StartError, UsageError
from nbdist.session.tensorboard import Board, Boards
from tests.kernels import Kernel
from tests.runs import losses, new_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

pytestmark = pytest.mark.processes

TIMEOUT_S = 120


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NBDIST_RUNS_FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def boards() -> Iterator[Boards]:
    running = Boards()
    yield running
    running.close()


def response(address: str, path: str, wanted: str) -> Any:
    """Return the response of TensorBoard once it contains `wanted`.

    It rereads files periodically.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with urllib.request.urlopen(f"{address}{path}", timeout=TIMEOUT_S) as reply:
            text = reply.read().decode()
        if wanted in text:
            return json.loads(text)
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def test_tensorboard_shows_one_run_or_all_runs(root: Path, boards: Boards) -> None:
    run = new_run(root)
    run.take(losses(1, 3))
    run.close()
    name = run.state.id
    one, every = boards.open(name), boards.open()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", one.address)
    tags = response(one.address, "data/plugin/scalars/tags", "rank-0")
    assert tags.keys() == {"all", "rank-0"}
    values = response(one.address, "data/plugin/scalars/scalars?run=rank-0&tag=loss", "")
    assert [value[1:] for value in values] == [[1, 1], [2, 2], [3, 3]]
    assert f"{name}/events/all" in response(every.address, "data/plugin/scalars/tags", name)
    assert boards.open(name).address == one.address != every.address
    assert one.address in one.html()


@pytest.mark.full  # rare
def test_an_ended_tensorboard_is_started_again(root: Path, boards: Boards) -> None:
    before = boards.open()
    mine = psutil.process_iter(["ppid", "cmdline"])
    (process,) = (
        p for p in mine if p.info["ppid"] == os.getpid() and str(root) in (p.info["cmdline"] or ())
    )
    process.kill()
    process.wait(TIMEOUT_S)
    assert boards.open().address != before.address


def test_a_failed_start_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="TensorBoard did not start; its output"):
        Board(tmp_path, timeout_s=0)


def test_a_missing_run_or_package_is_reported(
    root: Path, boards: Boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"no run 20260101-000000-abcdef"):
        boards.open("20260101-000000-abcdef")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"run %pip install tensorboard"):
        boards.open()


def test_the_magic_shows_a_link(
    root: Path, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("dist_tensorboard", "")
    assert f"TensorBoard on the runs in {root}: http://127.0.0.1:" in capsys.readouterr().out


def test_tensorboard_ends_with_a_killed_kernel() -> None:
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist\n%dist_tensorboard").check()
        pid = int(kernel.run("import os; print(os.getpid())").check().stdout)
        family = psutil.Process(pid).children(recursive=True)
        assert any(sys.executable in process.cmdline() for process in family)
        psutil.Process(pid).kill()
        _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
