"""Start of a program in several processes: `nbdist run`."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist import cli
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes
LIMIT_S = 60
SHOW = """
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], sys.argv[1:])
"""
WAIT = """
import os, time
print("pid", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""


def started(path: Path, source: str, *words: str) -> subprocess.Popen[str]:
    path.write_text(source)
    command = [sys.executable, "-m", "nbdist.cli", "run", str(path), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path.parent
    )


def test_each_process_knows_its_rank_and_the_arguments(tmp_path: Path) -> None:
    process = started(tmp_path / "show.py", SHOW, "--hosts", "2", "--epochs", "3")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    shown = [f"[{rank}] {rank} 2 127.0.0.1 ['--epochs', '3']" for rank in (0, 1)]
    assert sorted(out.splitlines()) == shown


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    source = f"import os, sys\nif os.environ['RANK'] == '1':\n    sys.exit(7)\n{WAIT}"
    process = started(tmp_path / "fail.py", source, "--hosts", "3")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7
    assert "rank 1 failed: its process ended with exit code 7. nbdist ended the other ranks" in err
    assert not any(psutil.pid_exists(int(line.split()[-1])) for line in out.splitlines())


def test_a_signal_ends_all_processes(tmp_path: Path) -> None:
    process = started(tmp_path / "wait.py", WAIT, "--hosts", "2")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.full  # rare
def test_a_second_signal_ends_processes_that_do_not_end(tmp_path: Path) -> None:
    handler = "lambda *_: print('no', flush=True)"
    source = f"import signal\nsignal.signal(signal.SIGTERM, {handler})\n{WAIT}"
    process = started(tmp_path / "wait.py", source, "--hosts", "2")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    assert {process.stdout.readline() for _ in range(2)} == {"[0] no\n", "[1] no\n"}
    assert all(map(psutil.pid_exists, pids))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, pids))


def test_status_of_a_program_that_continues_is_kept(tmp_path: Path) -> None:
    """A rank that still saves its checkpoint is not ended."""
    source = """
import os, sys, time
print("pid", os.getpid(), flush=True)
while os.environ["RANK"] == "1" and not os.path.exists("saved"):
    time.sleep(0.01)
sys.exit(75)
"""
    process = started(tmp_path / "stops.py", source, "--hosts", "2")
    assert process.stdout is not None
    pids = dict(process.stdout.readline().split(" pid ") for _ in range(2))
    assert repeat_until(lambda: not psutil.pid_exists(int(pids["[0]"])), LIMIT_S)
    (tmp_path / "saved").touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert "failed" not in err


def test_a_single_process_has_no_prefix_and_is_named_if_it_is_killed(tmp_path: Path) -> None:
    source = f"{SHOW}sys.stdout.flush()\nimport signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    process = started(tmp_path / "kill.py", source, "--hosts", "1")
    out, err = process.communicate(timeout=LIMIT_S)
    assert out == "0 1 127.0.0.1 []\n"
    assert "killed (SIGKILL)" in err
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "none.py is no file: name the program"),
        (["none.py", "--hosts", "0"], "--hosts 0: use a number from 1"),
        (["none.py", "--hosts", "x"], "--hosts x: use a number from 1"),
        (["none.py", "--hosts"], "--hosts : use a number from 1"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *words]) == 2
    assert message in capsys.readouterr().err
