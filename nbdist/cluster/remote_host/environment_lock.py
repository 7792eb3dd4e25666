"""Lock of the notebook's environment: exact versions, with the hashes of the index."""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from packaging.utils import canonicalize_name

from nbdist.errors import UsageError
from nbdist.records import EnvironmentLock, LockedPackage
from nbdist.utils import distributions, wheels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from importlib.metadata import Distribution

_OWN = "nbdist"
_COMPILE = ("pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate")
_COMPILE_S = 120.0
_TRIES = 10
"""Calls of uv. Each finds one or several distributions that the index lacks."""

_INDEX = re.compile(r"UV_\w*INDEX\w*|UV_HTTP_TIMEOUT", re.ASCII)


def find_uv() -> str:
    """Return the path of the notebook's uv; empty without one."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("uv", path=os.pathsep.join([scripts, os.environ.get("PATH", "")])) or ""


def lock(folder: Path) -> EnvironmentLock:
    """Lock the distributions of this process.

    Args:
        folder: folder of packed wheels, for distributions that no index has.

    Raises:
        UsageError: a distribution cannot be packed, or nbdist is not installed.
    """
    installed = distributions.found()
    if _OWN not in installed:
        raise UsageError("--install needs an installed nbdist: run %pip install nbdist")
    editable = distributions.editable()
    left_out = [f"{name} (editable)" for name in sorted(editable & installed.keys() - {_OWN})]
    packages: dict[str, LockedPackage] = {}
    for name in sorted(installed.keys() - (editable - {_OWN})):
        size = wheels.recorded_bytes(installed[name])
        if size is None:
            left_out.append(f"{name} (no list of its files)")
        else:
            version = installed[name].version
            packages[name] = LockedPackage(name=name, version=version, size_bytes=size)
    local = {n for n in packages if n == _OWN or installed[n].read_text("direct_url.json")}
    requirements, fault, unknown = _compiled([packages[n] for n in packages if n not in local])
    packed = pack({n: installed[n] for n in packages if n in local | unknown}, folder)
    return EnvironmentLock(
        python=platform.python_version(),
        platform=sysconfig.get_platform(),
        packages=tuple(
            structs.replace(package, wheel=packed[name].sha256 if name in packed else "")
            for name, package in packages.items()
        ),
        requirements=requirements,
        fault=fault,
        index={name: value for name, value in os.environ.items() if _INDEX.fullmatch(name)},
        left_out=tuple(left_out),
    )


def pack(
    installed: dict[str, Distribution],
    folder: Path,
    show: Callable[[str], None] = lambda _: None,
) -> dict[str, wheels.Wheel]:
    """Pack distributions into wheels, by their names.

    Args:
        installed: the distributions.
        folder: folder of packed wheels.
        show: receives progress as text, also from other threads. An error of it ends the packing.

    Raises:
        UsageError: distributions cannot be packed. The message contains each.
    """
    numbers = itertools.count(1)

    def attempt(name: str) -> wheels.Wheel | str:
        show(f"waits for wheel {next(numbers)} of {len(installed)}")
        try:
            if name == _OWN and name in distributions.editable():
                return wheels.pack_package(installed[name], Path(__file__).parents[2], folder)
            return wheels.pack(installed[name], folder)
        except (ValueError, OSError) as error:
            return f"  {name} {installed[name].version}: {error}"

    # The largest wheel takes most of the time, and one thread: it begins first.
    order = sorted(installed, key=lambda name: -(wheels.recorded_bytes(installed[name]) or 0))
    with ThreadPoolExecutor(os.cpu_count(), "nbdist-wheels") as pool:
        outcomes = dict(zip(order, pool.map(attempt, order), strict=True))
    if faults := [fault for name in installed if isinstance(fault := outcomes[name], str)]:
        listed = "\n".join(faults)
        raise UsageError(f"--install: packages of the notebook cannot be sent:\n{listed}")
    return {n: one for n in installed if isinstance(one := outcomes[n], wheels.Wheel)}


def wheels_of(
    packages: Collection[LockedPackage], folder: Path, show: Callable[[str], None]
) -> dict[str, wheels.Wheel]:
    """Pack distributions of a lock into wheels, by the names of the distributions; see `pack`.

    Raises:
        UsageError: distributions cannot be packed, or have changed since the lock.
    """
    installed = distributions.found()
    changed = [
        package.pin
        for package in packages
        if package.name not in installed or installed[package.name].version != package.version
    ]
    packed: dict[str, wheels.Wheel] = {}
    if not changed:
        packed = pack({one.name: installed[one.name] for one in packages}, folder, show)
        changed = [one.pin for one in packages if one.wheel not in ("", packed[one.name].sha256)]
    if changed:
        raise UsageError(
            f"the notebook's packages have changed since the start ({', '.join(changed)}): run "
            "%dist_stop, then %dist_start with --install"
        )
    return packed


def _compiled(packages: Iterable[LockedPackage]) -> tuple[str, str, set[str]]:
    """Ask the index for the hashes of exact versions.

    Returns:
        Pins with hashes, the error of uv if it gives none, and the names that the index lacks.
    """
    pins = {package.name: package.pin for package in packages}
    unknown: set[str] = set()
    command = [find_uv(), *_COMPILE, "--no-build", "--quiet"]
    command += ["--python-version", platform.python_version(), "--python", sys.executable]
    fault = ""
    for _ in range(_TRIES):
        text = "\n".join(pin for name, pin in pins.items() if name not in unknown)
        if not text:
            return "", "it has none of the packages", set()
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=_COMPILE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return "", f"the index did not respond within {_COMPILE_S:g} s", set()
        if done.returncode == 0:
            return done.stdout, "", unknown
        fault = done.stderr.strip()
        lacking = _named(fault, pins.keys() - unknown)
        if not lacking:
            break
        unknown |= lacking
    return "", fault, set()


def _named(fault: str, names: Collection[str]) -> set[str]:
    """Return the distributions that an error of uv names as missing in the index."""
    words = re.findall(r"([\w.-]+) was not found in|no version of ([\w.-]+)==|([\w.-]+)==", fault)
    found: set[str] = {canonicalize_name(word) for group in words for word in group if word}
    return found & set(names) if "No solution found" in fault else set()
