"""Notebooks of `tests/notebooks_brought`, in the manner of public tutorials.

Each file is a notebook in percent format. Its second line names the expressions to compare.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

FOLDER = Path(__file__).parent / "notebooks_brought"
NOTEBOOKS = {f"{path.parent.name}/{path.stem}": path for path in sorted(FOLDER.glob("*/*.py"))}
FLAT = """
def _is_flat(tree):
    import numpy
    parts = [part for part in tree if not isinstance(part, (dict, list, tuple, str))]
    return tree and len(parts) == len(tree) and all(numpy.ndim(part) == 0 for part in parts)
def _flat(tree):
    import numpy
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    if isinstance(tree, (list, tuple)) and not _is_flat(tree):
        return [leaf for part in tree for leaf in _flat(part)]
    return [numpy.asarray(tree).tolist()]
outcome = _flat({text})
"""


class Notebook:
    """A notebook: its code cells, and the expression whose value is compared."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
        (compare,) = re.findall(r"^# compare: (.*)$", parts[0], re.MULTILINE)
        cells = zip(parts[1::2], parts[2::2], strict=True)
        self.cells = [cell for head, cell in cells if "[markdown]" not in head and cell.strip()]
        self.expression = f"[{', '.join(compare.split('; '))}]"

    @property
    def is_double(self) -> bool:
        """True if the notebook computes in float64."""
        return any(re.search(r"jax_enable_x64|set_floatx", cell) for cell in self.cells)

    @property
    def outcome(self) -> str:
        """Return the cell that assigns the compared values to `outcome`."""
        return FLAT.format(text=self.expression)

    @property
    def program(self) -> str:
        """Return the notebook as one program whose functions have sources."""
        cells = [*self.cells, self.outcome]
        return textwrap.dedent(f"""
            import linecache
            for number, cell in enumerate({cells!r}):
                name = f"<cell {{number}}>"
                linecache.cache[name] = len(cell), None, cell.splitlines(True), name
                exec(compile(cell, name, "exec"), globals())
        """)
