"""Decisions in a file that several processes share, and files that are unusable."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.parallel.autoplace.cache import Choices
from nbdist.records.autoplace import Decision, LeftOut, Timed
from nbdist.settings import Settings

PROCESSES, WRITES = 8, 25
WRITER = """
import sys
from pathlib import Path
from nbdist.parallel.autoplace.cache import Choices
from nbdist.records.autoplace import Decision
kept = Choices(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[3])):
    for print_of in (f"{sys.argv[2]} {i}", f"shared {i}"):
        kept.put(Decision(function="f", fingerprint=print_of, inputs="x", chosen="batch",
                          why=sys.argv[2], made=float(i)))
        assert kept.get(print_of) is not None
"""


def decision(fingerprint: str = "p", function: str = "m.f", made: float = 1.5) -> Decision:
    timed = Timed(name="default", words="here", median_s=0.5, spread_s=0.1, rounds=5, note="n")
    return Decision(
        function=function,
        fingerprint=fingerprint,
        inputs="float32[8]",
        chosen="default",
        why="nothing is faster",
        made=made,
        timed=(timed,),
        left_out=(LeftOut(name="model", why="nothing to shard"),),
    )


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    return Choices(tmp_path / "deep" / "down" / "p.sqlite")


def test_a_decision_is_available_to_other_processes(choices: Choices) -> None:
    assert choices.get("p") is None
    assert choices.of("m.f") == []
    choices.put(decision())
    other = Choices(choices.path)
    assert other.get("p") == decision()
    assert other.get("q") is None


def test_the_latest_decision_of_a_fingerprint_counts(choices: Choices) -> None:
    choices.put(decision(made=1.0))
    choices.put(decision(made=2.0))
    assert [one.made for one in choices.of("m.f")] == [2.0]


def test_forget_removes_all_decisions_of_one_function(choices: Choices) -> None:
    choices.forget("m.f")  # the file does not exist yet
    assert not choices.path.exists()
    for fingerprint, function in (("a", "m.f"), ("b", "m.f"), ("c", "m.g")):
        choices.put(decision(fingerprint, function))
    choices.forget("m.f")
    assert choices.of("m.f") == []
    assert choices.get("c") is not None


@pytest.mark.full
def test_eight_processes_write_at_once(choices: Choices) -> None:
    command = [sys.executable, "-W", "error", "-c", WRITER, str(choices.path)]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(
            [*command, str(number), str(WRITES)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        for number in range(PROCESSES)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES, ended
    assert not any(errors for _, errors in ended), ended
    assert len(choices.of("f")) == PROCESSES * WRITES + WRITES


def _not_a_database(path: Path) -> None:
    path.write_bytes(b"this is no database, but long enough to look at" * 100)


def _a_folder(path: Path) -> None:
    path.mkdir()


def _other_columns(path: Path) -> None:
    with sqlite3.connect(path) as opened:
        opened.execute("CREATE TABLE decisions_1 (something TEXT)")
    opened.close()


@pytest.mark.parametrize("broken", [_not_a_database, _a_folder, _other_columns])
def test_an_unusable_file_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: object
) -> None:
    path = tmp_path / "p.sqlite"
    assert callable(broken)
    broken(path)
    choices = Choices(path)
    with caplog.at_level(logging.WARNING):
        choices.put(decision())
        assert choices.get("p") is None
        assert choices.of("m.f") == []
        choices.forget("m.f")
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "set NBDIST_PLACEMENTS to another path" in record.getMessage()


def test_a_folder_that_cannot_be_created_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        Choices(tmp_path / "file" / "p.sqlite").put(decision())
    assert len(caplog.records) == 1


def test_a_read_only_file_is_read(
    choices: Choices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens the file as read-only, because tests may run as root."""
    choices.put(decision())
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **k: connect(f"file:{path}?mode=ro", uri=True, **k)
    )
    with caplog.at_level(logging.WARNING):
        assert choices.get("p") == decision()
        assert not caplog.records
        choices.put(decision("q"))
        assert choices.get("q") is None
    assert len(caplog.records) == 1


def test_a_row_of_another_version_is_ignored(
    choices: Choices, caplog: pytest.LogCaptureFixture
) -> None:
    choices.put(decision())
    with sqlite3.connect(choices.path) as opened:
        opened.execute("UPDATE decisions_1 SET body = ?", (b'{"function": 3}',))
    opened.close()
    with caplog.at_level(logging.WARNING):
        assert choices.get("p") is None
    assert len(caplog.records) == 1


def test_the_path_of_the_file_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_PLACEMENTS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    at_home = Path.home() / ".cache" / "nbdist" / "placements.sqlite"
    assert Settings.from_environment().placements_path == at_home
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert Settings.from_environment().placements_path == Path("/c/nbdist/placements.sqlite")
    monkeypatch.setenv("NBDIST_PLACEMENTS", "/a/b")
    assert Settings.from_environment().placements_path == Path("/a/b")
