"""Tests without the mark `processes` cannot start processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = [sys.executable, "-c", "pass"]


def test_a_process_is_refused_without_the_mark() -> None:
    with pytest.raises(RuntimeError, match="a test without the mark `processes` starts one"):
        subprocess.run(PROGRAM, check=True)


def test_git_may_be_called_without_the_mark() -> None:
    subprocess.run(["git", "--version"], check=True, capture_output=True)


@pytest.mark.processes
def test_a_process_starts_with_the_mark() -> None:
    subprocess.run(PROGRAM, check=True)
