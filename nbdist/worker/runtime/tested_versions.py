"""Gate for patches of libraries: only tested versions are patched."""

from __future__ import annotations

import logging

TESTED = {
    "TensorFlow": ("2.19.", "2.20.", "2.21."),
    "Keras": ("3.13.", "3.14.", "3.15."),
    "JAX": ("0.8.", "0.9.", "0.10."),
    "Orbax": ("0.12.",),
    "ipykernel": ("6.29.", "6.30.", "6.31.", "7.0.", "7.1.", "7.2.", "7.3.", "7.4."),
}
"""Beginnings of the tested versions of each library, oldest first."""

_log = logging.getLogger(__name__)


def is_tested(library: str, version: str, effect: str = "it stays as upstream") -> bool:
    """Return True if a version belongs to a tested series. Log a warning if it does not.

    Args:
        library: name of the library, a key of `TESTED`.
        version: its installed version.
        effect: consequence for the user, because nbdist does not patch this part of the library.
    """
    if version.startswith(TESTED[library]):
        return True
    series = ", ".join(f"{one}x" for one in TESTED[library])
    _log.warning("%s %s is not tested with nbdist: %s. Use %s", library, version, effect, series)
    return False
