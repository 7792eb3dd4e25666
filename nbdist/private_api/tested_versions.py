"""Versions of the libraries with which nbdist is tested."""

from __future__ import annotations

import functools
import logging

from nbdist.errors import LibraryVersionError

TESTED = {
    "TensorFlow": ("2.19.", "2.20.", "2.21."),
    "Keras": ("3.13.", "3.14.", "3.15."),
    "JAX": ("0.8.", "0.9.", "0.10.", "0.11.", "0.12."),
    "Orbax": ("0.12.",),
    "PyArrow": ("24.", "25.", "26."),
    "grain": ("0.2.",),
    "ipykernel": ("6.29.", "6.30.", "6.31.", "7.0.", "7.1.", "7.2.", "7.3.", "7.4."),
}
"""Beginnings of the tested versions of each library, oldest first."""

_DISTRIBUTIONS = {"Orbax": "orbax-checkpoint"}

_log = logging.getLogger(__name__)


def is_in_series(library: str, version: str) -> bool:
    """Return True if a version belongs to a tested series.

    Args:
        library: name of the library, a key of `TESTED`.
        version: its installed version.
    """
    return version.startswith(TESTED[library])


def is_tested(library: str, version: str, effect: str = "it stays as upstream") -> bool:
    """Return True if a version belongs to a tested series. Log a warning if it does not.

    Args:
        library: name of the library, a key of `TESTED`.
        version: its installed version.
        effect: consequence for the user, because nbdist does not patch this part of the library.
    """
    if is_in_series(library, version):
        return True
    text = "%s %s is not tested with nbdist: %s. Use %s"
    _log.warning(text, library, version, effect, _series(library))
    return False


@functools.cache
def warn_if_untested(library: str, version: str) -> None:
    """Log once that nbdist uses an untested version, because its private names exist."""
    is_tested(library, version, "nbdist refuses features that only tests can confirm")


def untested_error(
    feature: str, library: str, version: str, instead: str = ""
) -> LibraryVersionError:
    """Return the error for a feature that an untested version of a library does not get.

    Args:
        feature: name of the feature.
        library: name of the library.
        version: its installed version.
        instead: another remedy.
    """
    return LibraryVersionError(
        f"nbdist supports {feature} with {library} {_series(library)}, and {version} is "
        f"installed: {remedy(library)}{instead and ', or '}{instead}"
    )


def remedy(library: str) -> str:
    """Return the instruction that installs a tested version."""
    distribution = _DISTRIBUTIONS.get(library, library.lower())
    return (
        f'install "{distribution}=={TESTED[library][-1]}*" for the workers, then start them again '
        "(%dist_stop, %dist_start)"
    )


def _series(library: str) -> str:
    return ", ".join(f"{one}x" for one in TESTED[library])
