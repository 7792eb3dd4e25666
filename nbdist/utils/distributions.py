"""Installed distributions: their versions, and those that modules need."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


def found() -> dict[str, importlib.metadata.Distribution]:
    """Return the installed distributions that imports find, by their normalized names."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a broken installation has none
            found.setdefault(canonicalize_name(name), distribution)
    return found


def installed() -> dict[str, str]:
    """Return the version of each installed distribution, by its normalized name."""
    return {name: distribution.version for name, distribution in found().items()}


def described() -> dict[str, str]:
    """Return the versions as text, by normalized name. Editable installs are marked."""
    marked = editable()
    return {
        name: f"{version} (editable)" if name in marked else version
        for name, version in installed().items()
    }


def editable() -> set[str]:
    """Return the normalized names of distributions installed with `pip install -e`."""
    return {
        name
        for name, distribution in found().items()
        if '"editable"' in (origin := distribution.read_text("direct_url.json") or "")
        and json.loads(origin).get("dir_info", {}).get("editable")
    }


def owners(modules: Iterable[str]) -> set[str]:
    """Return the normalized names of the distributions that contain modules at the top level."""
    known = _distributions_of_modules(tuple(_metadata_folders()))
    return {canonicalize_name(name) for module in modules for name in known.get(module, ())}


def _metadata_folders() -> Iterator[tuple[Path, int]]:
    """Yield the folders of metadata on the path of imports, with the times of their changes."""
    for folder in map(Path, sys.path):
        for path in sorted((*folder.glob("*.dist-info"), *folder.glob("*.egg-info"))):
            with contextlib.suppress(FileNotFoundError):  # pip removes it now
                yield path, path.stat().st_mtime_ns


@lru_cache(maxsize=1)
def _distributions_of_modules(_key: tuple[tuple[Path, int], ...]) -> Mapping[str, Sequence[str]]:
    """Return the distributions of each module at the top level. Reading them takes a second."""
    return importlib.metadata.packages_distributions()


def with_requirements(names: Iterable[str]) -> set[str]:
    """Return distributions and those that they require here, by their normalized names.

    Requirements of extras, and requirements that are not installed, are left out.
    """
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            try:
                required = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            found.add(name)
            waiting.extend(_required(required))
    return found


def _required(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        with contextlib.suppress(InvalidRequirement):  # of an old distribution
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield canonicalize_name(requirement.name)
