"""The TypeScript's own tests, which Node runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXTENSION = Path(__file__).parents[2] / "labextension"


def test_the_run_view_passes_its_tests() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["jlpm", "test"],
        cwd=EXTENSION,
        env={**os.environ, "PATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# fail 0" in done.stdout
