"""Detection of the framework that a notebook's cells use. Workers load no other one."""

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
"""Environment variable in which Jupyter gives a kernel the path of its notebook."""

_USES: dict[Framework, re.Pattern[str]] = {
    "tensorflow": re.compile(r"\b(tensorflow|keras|mirrored)\b|\btf\.", re.IGNORECASE),
    "jax": re.compile(r"\b(jax|flax|equinox|optax|orbax|pjrt|PjRTStrategy)\b"),
}
"""Words that indicate a framework. Keras runs on TensorFlow if it is installed."""


def framework() -> str | None:
    """Return the only framework that this kernel's notebook uses, and print a message on it.

    Returns:
        None if only one framework is installed, the notebook is unknown, or its cells use none or
        several frameworks.
    """
    if len(resources.choose_frameworks(None)) < len(_USES):
        return None
    texts = _cells(os.environ.get(NOTEBOOK_VARIABLE, ""))
    used = [name for name, words in _USES.items() if any(map(words.search, texts))]
    if len(used) != 1:
        return None
    sys.stdout.write(
        f"nbdist: loading only {used[0]}, which this notebook uses; use --framework both for all\n"
    )
    return used[0]


def _cells(path: str) -> list[str]:
    """Return the code of a notebook's cells. Empty if the file is not a readable notebook."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError):
        return []
