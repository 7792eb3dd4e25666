"""Layouts of the cells of a program, which stand in files beside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from nbdist.errors import UsageError
from nbdist.worker.script.layouts import options_for

if TYPE_CHECKING:
    from pathlib import Path


def test_file_of_a_layout_is_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may have changed its folder before."""
    program = str(tmp_path / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", program, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir("/")
    with pytest.raises(UsageError, match=str(tmp_path / "plan.json")):
        options_for({"data": "x", "batch": 4, "plan": "plan.json"}, 2)
