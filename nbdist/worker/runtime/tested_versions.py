"""Gate for patches of libraries: only tested versions are patched, and only they are trained."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from nbdist.errors import StrategyError

if TYPE_CHECKING:
    from nbdist.records import StrategyName

TESTED = {
    "TensorFlow": ("2.19.", "2.20.", "2.21."),
    "Keras": ("3.13.", "3.14.", "3.15."),
    "JAX": ("0.8.", "0.9.", "0.10.", "0.11.", "0.12."),
    "Orbax": ("0.12.",),
    "ipykernel": ("6.29.", "6.30.", "6.31.", "7.0.", "7.1.", "7.2.", "7.3.", "7.4."),
}
"""Beginnings of the tested versions of each library, oldest first."""

_FRAMEWORKS: dict[StrategyName, str] = {"mirrored": "TensorFlow", "pjrt": "JAX"}

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
    text = "%s %s is not tested with nbdist: %s. Use %s"
    _log.warning(text, library, version, effect, _series(library))
    return False


def check_strategy(strategy: StrategyName) -> None:
    """Refuse a strategy if its framework has an untested version.

    Raises:
        StrategyError: the patches of nbdist may not fit, so that numbers may differ.
    """
    library = _FRAMEWORKS[strategy]
    version = importlib.import_module(library.lower()).__version__
    if not version.startswith(TESTED[library]):
        raise untested_error(f"the {strategy} strategy", library, version)


def untested_error(feature: str, library: str, version: str) -> StrategyError:
    """Return the error for a feature that an untested version of a library does not get."""
    return StrategyError(
        f"{feature} needs {library} {_series(library)}, and {version} is installed: install "
        f'"{library.lower()}=={TESTED[library][-1]}*" for the workers, then start them again '
        "(%dist_stop, %dist_start)"
    )


def _series(library: str) -> str:
    return ", ".join(f"{one}x" for one in TESTED[library])
