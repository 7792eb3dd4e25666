"""Run jlpm in labextension/ with a Node that is new enough: `python -m tools.jlpm lint:check`.

Node comes from the path, or from the wheel that `make` installs if the path has none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hatch_build import path_with_node

EXTENSION = Path(__file__).parents[1] / "labextension"


def main() -> int:
    """Pass the arguments to jlpm and return its exit status."""
    scripts = Path(sys.executable).parent
    return subprocess.run(
        [scripts / "jlpm", *sys.argv[1:]],
        check=False,
        cwd=EXTENSION,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{path_with_node()}"},
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
