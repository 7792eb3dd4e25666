"""Gate for patches of libraries: only tested versions are patched."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


def is_tested(library: str, version: str, series: str, patched: str = "") -> bool:
    """Return True if a version belongs to the tested series. Log a warning if it does not.

    Args:
        library: name of the library.
        version: its installed version.
        series: beginning of the tested versions, such as `2.21.`.
        patched: the part of the library that stays as upstream (default: all that nbdist patches).
    """
    if version.startswith(series):
        return True
    part = f"{patched} of " if patched else ""
    _log.warning("nbdist does not patch %s%s %s: use %sx", part, library, version, series)
    return False
