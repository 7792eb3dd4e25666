from __future__ import annotations

from nbdist.records import Device, Phase, WorkerState
from nbdist.views.cluster.workers import StartPicture, StatusPicture

GPU = Device(platform="gpu", kind="NVIDIA <H200>", name="gpu:0")


def worker(rank: int, python: str = "3.11") -> WorkerState:
    return WorkerState(
        rank=rank, host="a", pid=7, versions={"python": python}, devices=(GPU, GPU), state="busy"
    )


def test_a_start_shows_finished_and_current_phases() -> None:
    picture = StartPicture("t", (Phase(name="one", seconds=1.25, detail="<x>"),), "two")
    assert picture.lines() == ["t", "  ✓ one                             1.25 s  <x>"]
    assert "…</span><span>two</span>" in picture.html()
    assert "&lt;x&gt;" in picture.html()


def test_a_failed_start_shows_its_phase() -> None:
    picture = StartPicture("t", (), "two", failed=True)
    assert picture.lines() == ["t", "  ✗ two"]
    assert "✗</span><span>two</span>" in picture.html()


def test_devices_are_counted_by_kind() -> None:
    picture = StatusPicture("t", (worker(0),))
    assert "2 x gpu (NVIDIA <H200>)" in picture.lines()[3]
    assert "2 x gpu (NVIDIA &lt;H200&gt;)" in picture.html()


def test_different_versions_are_listed_by_rank() -> None:
    picture = StatusPicture("t", (worker(0), worker(1, "3.12"), worker(2)))
    assert picture.lines()[-1] == "versions differ: rank 0,2: python 3.11; rank 1: python 3.12"
