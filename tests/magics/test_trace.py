"""Traces in the notebook's kernel, and checks of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist

if TYPE_CHECKING:
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

CELL = "import jax.numpy as jnp\n(jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()"


def test_a_trace_in_this_kernel_is_returned(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = shell.run_cell_magic("dist_trace", "", CELL)
    assert capsys.readouterr().out.count("%%dist_trace: ") == 1
    assert trace.trace.ranks == (0,)
    assert [operation.name for operation in trace] == trace.to_dataframe()["name"].tolist()


def refused(shell: InteractiveShell, line: str) -> list[str]:
    """Return the lines of the error of a trace."""
    with pytest.raises(nbdist.UsageError) as error:
        shell.run_cell_magic("dist_trace", line, "raise SystemExit")
    return str(error.value).splitlines()


def test_all_wrong_options_of_a_trace_are_refused_at_once(
    shell: InteractiveShell, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refused(shell, f"-o 1x --keep {file} --batch 4 --steps 2") == [
        "-o 1x: use a name that Python accepts",
        f"--keep {file} is a file: use a folder",
        "--batch, --steps without --data: name the data set of the step",
    ]
    assert refused(shell, "-o 1x") == ["-o 1x: use a name that Python accepts"]
    assert refused(shell, "--steps 2") == ["--steps without --data: name the data set of the step"]


def test_a_trace_in_this_kernel_has_no_options_of_workers(shell: InteractiveShell) -> None:
    (line,) = refused(shell, "--ranks 0 --strategy pjrt --data rows --batch 4")
    assert line == (
        "--ranks, --strategy, --data, --batch: no workers are running: run %dist_start 4 hosts "
        "first, or trace in this kernel without these options"
    )


def test_a_trace_is_stored_under_a_name_and_in_a_folder(
    shell: InteractiveShell, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    trace = shell.run_cell_magic("dist_trace", f"-o kept --keep {folder}", CELL)
    assert shell.user_ns["kept"] is trace.trace
    assert trace.trace.folder == str(folder)
    assert any(folder.rglob("*.xplane.pb"))
