"""Folder of an exported program."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from nbdist.cells.plan_options import read_plan
from nbdist.errors import UsageError
from nbdist.jobs import folder
from nbdist.jobs.data import JobData
from nbdist.jobs.program import Program
from nbdist.records import ClusterRequest, Host
from tests import plans

CLUSTER = ClusterRequest(hosts=(Host(), Host()), frameworks=("jax",), env={"SECRET": "value"})


@pytest.fixture
def program() -> Program:
    data = JobData("data", "args.data", str)
    data.assignments({"x": np.arange(3)})
    layouts = {"plan.json": plans.made("both")}
    modules, flags = ("json", "optax"), {"--epochs": "Passes."}
    return Program("pass\n", data, modules, frozenset(), flags, 7, "pjrt", layouts)


def test_files_of_the_folder(tmp_path: Path, program: Program) -> None:
    folder.write(tmp_path / "train", program, CLUSTER, ["cell [2] drew"], {})
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        *("README.md", "data.npz", "plan.json", "requirements.txt", "train.py")
    ]
    lines = (tmp_path / "train/requirements.txt").read_text().splitlines()
    named = [line.split("==")[0] for line in lines]
    assert named == ["jax", "nbdist", "numpy", "optax"]
    text = (tmp_path / "train/README.md").read_text()
    assert "- `--epochs`: Passes." in text
    assert "variables: `SECRET`" in text
    assert "value" not in text
    assert "\nCell [2] drew.\n" in text
    assert "`plan.json` is the layout of a cell on 8 devices (data 4 x tensor 2, ZeRO-1)" in text
    assert read_plan(str(tmp_path / "train/plan.json")) == program.plans["plan.json"]
    assert np.load(tmp_path / "train/data.npz")["x"].tolist() == [0, 1, 2]


def test_modules_stand_beside_the_program(tmp_path: Path, program: Program) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    modules = dict.fromkeys((Path("own.py"), Path("models/a/b.py")), tmp_path / "own.py")
    folder.write(tmp_path / "train", program, CLUSTER, [], modules)
    for place in modules:
        assert (tmp_path / "train" / place).read_text() == "x = 1\n"


def test_module_with_the_name_of_the_program_is_refused(tmp_path: Path, program: Program) -> None:
    with pytest.raises(UsageError, match="rename the module"):
        folder.write(tmp_path / "train", program, CLUSTER, [], {Path("train.py"): tmp_path})
    assert not list(tmp_path.iterdir())


def test_existing_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists: choose another folder"):
        folder.check_target(str(tmp_path))
    with pytest.raises(UsageError, match="does not exist: create it first"):
        folder.check_target(str(tmp_path / "a" / "b"))
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists"):
        folder.check_target(str(link))


def test_disk_without_space_is_refused(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1000))
    with pytest.raises(UsageError, match=r"has 1,000 B free, and the program needs 1\.0 MiB"):
        folder.write(tmp_path / "train", program, CLUSTER, ["cell [2] drew"], {})
    assert not list(tmp_path.iterdir())


def test_failed_write_leaves_nothing(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: JobData, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JobData, "write", full)
    with pytest.raises(UsageError, match="No space left on device; nothing is left of it"):
        folder.write(tmp_path / "train", program, CLUSTER, ["cell [2] drew"], {})
    assert not list(tmp_path.iterdir())
