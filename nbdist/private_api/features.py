"""Features of nbdist, and the private names of libraries that each of them needs."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from nbdist.errors import LibraryVersionError
from nbdist.private_api import tested_versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MISSING = object()
_log = logging.getLogger(__name__)


class Library:
    """Private names of a library.

    Nothing is imported before a name is looked up.

    Args:
        name: name of the library, a key of `tested_versions.TESTED`.
        package: package with its version.
        paths: the path of each name: a module, or an object of one after a colon. Several paths,
            the newest first, are those of different versions.
        since: first minor version with a name, for names that older versions neither have nor need.
    """

    def __init__(
        self,
        name: str,
        package: str,
        paths: Mapping[str, str | tuple[str, ...]],
        since: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.name = name
        self.features: list[Feature] = []
        self._package = package
        self._paths = {
            each: (found,) if isinstance(found, str) else found for each, found in paths.items()
        }
        self._since = since or {}

    @property
    def version(self) -> str:
        """Installed version."""
        found: str = importlib.import_module(self._package).__version__
        return found

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._paths)

    def feature(self, purpose: str, *uses: str, is_tested_only: bool = False) -> Feature:
        """Add a feature; the arguments are those of `Feature`."""
        made = Feature(self, purpose, uses, is_tested_only)
        self.features.append(made)
        return made

    def is_newer(self, name: str) -> bool:
        """Return True if only newer versions than the installed one need a name."""
        return name in self._since and _minor(self.version) < self._since[name]

    def path(self, name: str) -> str:
        """Return the path of a module, without an import."""
        return self._paths[name][0]

    def loaded(self, name: str) -> Any:
        """Return a module if the process has imported it, else None."""
        return sys.modules.get(self.path(name))

    def find(self, name: str) -> Any:
        """Import the object behind a name.

        Raises:
            AttributeError: the name is not listed.
            LibraryVersionError: the installed version does not have the object.
        """
        if name not in self._paths:
            raise AttributeError(name)
        for path in self._paths[name]:
            found = _object(path)
            if found is not _MISSING:
                return found
        users = [feature.purpose for feature in self.features if feature.needs(name)]
        raise self.missing(self._paths[name][0], users)

    def missing(self, path: str, purposes: list[str]) -> LibraryVersionError:
        """Return the error for an object that the installed version does not have."""
        return LibraryVersionError(
            f"{self.name} {self.version} has no {path.replace(':', '.')}, which nbdist needs for "
            f"{', '.join(purposes)}: {tested_versions.remedy(self.name)}"
        )


@dataclass(frozen=True)
class Feature:
    """Part of nbdist that relies on private names of a library.

    Attributes:
        library: the library.
        purpose: name of the feature for messages.
        uses: names of the library, with their attributes, such as `mlir.lower_fun`. The attributes
            of a class include those that its methods assign.
        is_tested_only: True if names are not enough: the feature relies on behaviour that only
            tests can confirm, so that another version might give wrong numbers or files.
    """

    library: Library
    purpose: str
    uses: tuple[str, ...]
    is_tested_only: bool

    def needs(self, name: str) -> bool:
        """Return True if the feature uses a name of the library or an attribute of it."""
        return any(use.partition(".")[0] == name for use in self.uses)

    def check(self, *, is_confirmed: bool = False, instead: str = "") -> None:
        """Refuse the feature if the installed version does not support it.

        An untested version with all names is accepted with a warning, unless the feature is for
        tested versions only.

        Args:
            is_confirmed: True if the results are compared, so that they confirm the version.
            instead: another remedy for the message.

        Raises:
            LibraryVersionError: a name is missing, or the version must be a tested one.
        """
        library, version = self.library, self.library.version
        needs_tested = self.is_tested_only and not is_confirmed
        if needs_tested and not tested_versions.is_in_series(library.name, version):
            raise tested_versions.untested_error(self.purpose, library.name, version, instead)
        for use in self.uses:
            self._resolve(use)
        tested_versions.warn_if_untested(library.name, version)

    def is_supported(self, effect: str) -> bool:
        """Return True if `check` passes. Log a warning if it does not.

        Args:
            effect: consequence for the user.
        """
        library, version = self.library, self.library.version
        if self.is_tested_only and not tested_versions.is_tested(library.name, version, effect):
            return False
        if fault := self.fault():
            _log.warning("%s, because %s", effect, fault)
        return not fault

    def fault(self) -> str:
        """Return the message of the error that `check` raises; empty if it passes."""
        try:
            self.check()
        except LibraryVersionError as error:
            return str(error)
        return ""

    def _resolve(self, use: str) -> None:
        name, *attributes = use.split(".")
        if self.library.is_newer(name):
            return
        found = self.library.find(name)
        for attribute in attributes:
            if not (hasattr(found, attribute) or _is_assigned(found, attribute)):
                path = ".".join((self.library.path(name), *attributes))
                raise self.library.missing(path, [self.purpose])
            found = getattr(found, attribute, None)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _is_assigned(owner: Any, attribute: str) -> bool:
    """Return True if a method of a class, or of its bases, has the name of an attribute."""
    if not isinstance(owner, type):
        return False
    methods = (inspect.unwrap(each) for kind in owner.__mro__ for each in _functions(kind))
    return any(attribute in method.__code__.co_names for method in methods)


def _functions(kind: type) -> Iterator[FunctionType]:
    return (each for each in vars(kind).values() if isinstance(each, FunctionType))


def _object(path: str) -> Any:
    """Import the object at a path. Return `_MISSING` if the library does not have it."""
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a dependency of the module is missing
        return _MISSING
    return getattr(found, attribute, _MISSING) if attribute else found
