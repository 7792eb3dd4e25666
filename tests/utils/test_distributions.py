"""Installed distributions and their requirements, of this very environment."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from nbdist.utils import distributions

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_versions_have_normalized_names() -> None:
    found = distributions.installed()
    assert found["orbax-checkpoint"] == importlib.metadata.version("orbax-checkpoint")
    assert all(name == name.lower() and "_" not in name for name in found)


def test_owner_and_requirements_of_a_module() -> None:
    assert distributions.owners(["IPython", "nothing_of_this_name"]) == {"ipython"}
    needed = distributions.with_requirements({"ipython"})
    assert {"ipython", "traitlets", "prompt-toolkit", "wcwidth"} <= needed
    assert "matplotlib" not in needed, "only an extra of IPython requires it"
    assert "colorama" not in needed, "only required on Windows"


def test_a_distribution_that_is_installed_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert not distributions.owners(["aged_module"])
    (tmp_path / "aged-1.dist-info").mkdir()
    (tmp_path / "aged-1.dist-info" / "METADATA").write_text("Name: aged\nVersion: 1\n")
    (tmp_path / "aged-1.dist-info" / "top_level.txt").write_text("aged_module\n")
    assert distributions.owners(["aged_module"]) == {"aged"}


def test_lines_that_are_no_requirements_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aged-1.dist-info").mkdir()
    required = "".join(f"Requires-Dist: {line}\n" for line in ("numpy", "pytz (>dev)", "jax;"))
    metadata = f"Metadata-Version: 2.1\nName: aged\nVersion: 1\n{required}"
    (tmp_path / "aged-1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions.with_requirements({"aged"}) == {"aged", "numpy"}


def test_editable_installs_are_known() -> None:
    assert "nbdist" in distributions.editable()
    assert "numpy" not in distributions.editable()
