"""Frameworks that the cells of a notebook use, from its file. Workers load no other."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cluster import resources

if TYPE_CHECKING:
    from nbdist.records import Framework

NOTEBOOK_VARIABLE = "JPY_SESSION_NAME"
"""In which Jupyter tells a kernel the path of its notebook."""

_USES: dict[Framework, re.Pattern[str]] = {
    "tensorflow": re.compile(r"\b(tensorflow|keras|mirrored)\b|\btf\.", re.IGNORECASE),
    "jax": re.compile(r"\b(jax|flax|equinox|optax|orbax|pjrt|PjRTStrategy)\b"),
}
"""Words that say it; Keras runs on TensorFlow where that is there."""


def framework() -> str | None:
    """The only one that the cells of this kernel's notebook use, where more are installed.

    None where the notebook is not known, or says nothing, or uses several; who asks is told which
    it is, and how to have others.
    """
    if len(resources.choose_frameworks(None)) < len(_USES):
        return None
    texts = _cells(os.environ.get(NOTEBOOK_VARIABLE, ""))
    used = [name for name, words in _USES.items() if any(map(words.search, texts))]
    if len(used) != 1:
        return None
    sys.stdout.write(f"{used[0]} alone, as in this notebook's cells: --framework both loads more\n")
    return used[0]


def _cells(path: str) -> list[str]:
    """The code of a notebook's cells; none where it is no notebook that can be read."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError):
        return []
