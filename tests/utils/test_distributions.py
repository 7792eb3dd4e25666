"""Installed distributions and their requirements, of this very environment."""

from __future__ import annotations

import importlib.metadata

from nbdist.utils import distributions


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


def test_editable_installs_are_known() -> None:
    assert "nbdist" in distributions.editable()
    assert "numpy" not in distributions.editable()
