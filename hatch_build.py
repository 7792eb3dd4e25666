"""Looks for Node before the browser's part is built, and says what to do where it is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatch_jupyter_builder.utils import is_stale, should_skip
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NEEDED = "20.19 or later of the 20s, or 22.12 or later"
"""What @rspack/core 2 runs on."""


class NodeCheck(BuildHookInterface[Any]):
    """Ends the build where there is something to build and nothing to build it with."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Look for Node where hatch-jupyter-builder is about to use it.

        Raises:
            SystemExit: there is none, or it is too old; its text is all that pip shows.
        """
        found = node_version()
        if self._builds(version) and not is_new_enough(found):
            raise SystemExit(complaint(found))

    def _builds(self, version: str) -> bool:
        builder = self.build_config.build_config["hooks"]["jupyter-builder"]
        if version != "editable":
            return not should_skip(builder["skip-if-exists"])
        editable = builder["editable-build-kwargs"]
        return bool(is_stale(Path(editable["build_dir"]), Path(editable["source_dir"])))


def node_version() -> tuple[int, int] | None:
    """Major and minor version of the Node on the path; None where there is none."""
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        return None
    said = subprocess.run(
        [node, "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    match = re.match(r"v(\d+)\.(\d+)", said.stdout)
    return (int(match[1]), int(match[2])) if match else None


def is_new_enough(found: tuple[int, int] | None) -> bool:
    """Whether Node of this version runs the builder."""
    if found is None:
        return False
    return found >= (22, 12) or (found[0] == 20 and found[1] >= 19)


def complaint(found: tuple[int, int] | None) -> str:
    """What is missing, which version is needed, and what to type."""
    what = f"Node.js {found[0]}.{found[1]} is too old" if found else "there is no Node.js"
    return (
        f"nbdist: {what} to build the JupyterLab extension with; it takes Node.js {NEEDED}.\n"
        "Install it (`conda install -c conda-forge 'nodejs>=22.12'`, or your system's package) and"
        "\nrepeat the command, or install a released wheel: it is built already and needs no Node."
    )
