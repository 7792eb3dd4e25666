"""Notebooks that run without a front end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from nbdist import cli
from nbdist.errors import UsageError
from nbdist.session import headless, notebook_client

LIMIT_S = 120
START = "%load_ext nbdist\n%dist_start 4 hosts --framework jax"
PARAMETERS = "%%dist_run\nrate = 0.5\nsteps, name = 2, 'a'"


def notebook(folder: Path, *cells: str, tagged: int = 1) -> Path:
    """Write a notebook whose cell number `tagged` has the tag of parameters."""
    made = [new_code_cell(cell) for cell in cells]
    if tagged < len(made):
        made[tagged].metadata["tags"] = ["parameters"]
    path = folder / "train.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Title"), *made]), path)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1e-3", -1e-3),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ("None", None),
        ("null", None),
        ("adam", "adam"),
        ("data/train.csv", "data/train.csv"),
        ("'3'", "3"),
    ],
)
def test_text_of_a_parameter_becomes_a_value(text: str, value: object) -> None:
    found = headless.parsed(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        ((START, "rate = 1"), {"parameters": {"rte": "2"}}, "-p rte: the cell .* assigns rate"),
        ((START,), {"parameters": {"rate": "2"}}, 'no cell has the tag "parameters"'),
        (("1 + 1",), {"hosts": 2}, "no cell of the notebook has a line with %dist_start"),
    ],
)
def test_bad_request_is_refused(
    tmp_path: Path, cells: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    path = notebook(tmp_path, *cells)
    with pytest.raises(UsageError, match=message):
        headless.run(path, **{"parameters": {}, **options})
    assert [found.name for found in tmp_path.iterdir()] == ["train.ipynb"]


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.ipynb").write_text("text")
    with pytest.raises(UsageError, match="is no notebook"):
        headless.run(tmp_path / "train.ipynb", parameters={})


@pytest.mark.parametrize("words", [("--hosts", "0", "NOTEBOOK"), ("NOTEBOOK", "--hosts", "0")])
def test_zero_hosts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    path = str(notebook(tmp_path, START))
    assert cli.main(["run", *(path if word == "NOTEBOOK" else word for word in words)]) == 2
    assert "--hosts 0: use a number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%dist_start 4 hosts -f jax", "%dist_start 2 hosts -f jax"),
        ("%dist_start gpu1 gpu2:8", "%dist_start 2 hosts"),
        ("  %dist_start -n 4 --seed 1", "  %dist_start 2 hosts --seed 1"),
        ("%dist_start", "%dist_start 2 hosts"),
        ("%dist_stop\n%dist_start 3", "%dist_stop\n%dist_start 2 hosts"),
    ],
)
def test_hosts_are_replaced(line: str, expected: str) -> None:
    made = new_notebook(cells=[new_code_cell(line)])
    headless._replace_hosts(made, 2)
    assert made.cells[0].source == expected


def command(path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "nbdist.cli", "run", str(path), *words]


@pytest.mark.processes
def test_notebook_runs_with_parameters_on_other_hosts(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        START,
        PARAMETERS,
        "%%dist_run\nprint('rank', rank, 'of', world_size, rate, steps, name)",
    )
    words = ("--hosts", "2", "-p", "rate", "0.25", "-p", "name", "b")
    done = subprocess.run(
        command(path, *words), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/4] %load_ext nbdist  (+1 line)" in done.stdout
    assert "nbdist: 2 workers are ready" in done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2 0.25 2 b" in done.stdout
    assert "nbdist: 4 cells finished" in done.stdout
    cells = nbformat.read(tmp_path / "train-executed.ipynb", as_version=4).cells
    assert cells[3].source == "%%dist_run\nrate = 0.25\nname = 'b'"
    assert cells[3].metadata["tags"] == ["injected-parameters"]
    assert "rank 1 of 2" in "".join(out.get("text", "") for out in cells[4].outputs)


@pytest.mark.processes
def test_failed_cell_is_the_exit_status_and_ends_the_workers(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        START.replace("4", "1"),
        "%%dist_run\nimport os\nprint('pid', os.getpid())\n1 / 0",
        "print('not reached')",
    )
    done = subprocess.run(
        command(path, "-o", str(tmp_path / "out.ipynb")),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stdout
    assert "nbdist: cell 2 failed after" in done.stdout
    assert "[3/3]" not in done.stdout
    assert (tmp_path / "out.ipynb").is_file()
    pid = int(done.stdout.partition("] pid ")[2].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.processes
@pytest.mark.full  # rare
def test_sigterm_interrupts_the_cell_and_ends_the_workers(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        START.replace("4", "1"),
        "%%dist_run\nimport os, time\nprint('pid', os.getpid())\ntime.sleep(600)",
    )
    running = subprocess.Popen(command(path), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    while "] pid " not in (line := running.stdout.readline()):
        assert line, "the notebook ended"
    pid = int(line.partition("] pid ")[2].split()[0])
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 128 + signal.SIGTERM, output
    assert "nbdist: stopped by SIGTERM in cell 2 after" in output
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.processes
@pytest.mark.full  # rare
def test_signal_before_a_cell_begins_is_not_lost(tmp_path: Path) -> None:
    path = notebook(tmp_path, "print('begun')", "import time\ntime.sleep(600)")
    running = subprocess.Popen(command(path), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    while running.stdout.readline() != "begun\n":
        pass
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 128 + signal.SIGINT, output
    assert "nbdist: stopped by SIGINT in cell" in output


@pytest.mark.parametrize("ends_after", [2, 100])
def test_a_kernel_that_loses_the_reply_of_a_cell_is_killed(
    monkeypatch: pytest.MonkeyPatch, ends_after: int
) -> None:
    monkeypatch.setattr(notebook_client, "AGAIN_S", 0)
    calls: list[str] = []
    progress = notebook_client.Progress(new_notebook(), lambda: None)
    progress.runs = True

    class Kernel:
        """Double of a kernel's manager: the real race is rare."""

        async def interrupt_kernel(self) -> None:
            calls.append("interrupt")
            progress.runs = len(calls) < ends_after

        async def shutdown_kernel(self, *, now: bool) -> None:
            calls.append(f"shutdown now={now}")

    client = notebook_client.PrintingClient(new_notebook(), Path(), progress)
    client.km = Kernel()
    asyncio.run(client._interrupt_until_the_cell_ends())
    most = notebook_client.MOST_INTERRUPTS
    expected = ["interrupt"] * 2 if ends_after == 2 else ["interrupt"] * most
    assert calls == [*expected, *["shutdown now=True"] * (ends_after > most)]
