"""Where in the user's code an operation of a jaxpr comes from."""

from __future__ import annotations

import linecache
import sysconfig
from pathlib import Path
from typing import Any

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    dict.fromkeys((_PATHS["purelib"], _PATHS["platlib"], _PATHS["stdlib"], _PATHS["platstdlib"]))
)
_OURS = str(Path(__file__).parents[1])
_MOST = 60
"""Letters of a line that are shown."""


def told(eqn: Any) -> str:
    """An operation in words, as in ``sort (line 3: `x = jnp.sort(x, axis=0)`)``."""
    name, traceback = eqn.primitive.name, eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith((*_LIBRARIES, _OURS)):
            text = linecache.getline(frame.file_name, frame.line_num).strip()
            shown = text if len(text) <= _MOST else f"{text[:_MOST]}..."
            return f"{name} (line {frame.line_num}{': `' + shown + '`' if shown else ''})"
    return str(name)
