"""Exact environments of Python, which hosts install."""

from __future__ import annotations

import hashlib

import msgspec

from nbdist.records.base import Record


class LockedPackage(Record, frozen=True):
    """A distribution of the notebook.

    Attributes:
        name: its normalized name.
        version: its version.
        size_bytes: size of its installed files.
        wheel: SHA-256 of the wheel with its files, for a distribution that no index has.
    """

    name: str
    version: str
    size_bytes: int
    wheel: str = ""

    @property
    def pin(self) -> str:
        """Requirement of exactly this version."""
        return f"{self.name}=={self.version}"


class EnvironmentLock(Record, frozen=True):
    """All distributions of the notebook, with their versions.

    Attributes:
        python: version of Python.
        platform: operating system and processor.
        packages: the distributions, by name.
        requirements: pins with the hashes of the index; empty if it is unknown.
        fault: the reason why the hashes of the index are unknown; empty if they are known.
        index: environment variables that select the index.
        left_out: distributions that cannot be installed, each with the reason.
    """

    python: str
    platform: str
    packages: tuple[LockedPackage, ...]
    requirements: str = ""
    fault: str = ""
    index: dict[str, str] = msgspec.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Size of all installed files."""
        return sum(package.size_bytes for package in self.packages)

    @property
    def minor(self) -> str:
        """Version of Python without its last number."""
        return ".".join(self.python.split(".")[:2])

    @property
    def digest(self) -> str:
        """Digest of the versions, and of the wheels that no index has."""
        lines = [self.minor, *(f"{package.pin} {package.wheel}" for package in self.packages)]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=10).hexdigest()
