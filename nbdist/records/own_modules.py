"""The user's own modules on the workers."""

from __future__ import annotations

import hashlib

import msgspec

from nbdist.records.base import Record


class Sync(Record, frozen=True):
    """Choice of the user's own modules that nbdist sends to the workers.

    Attributes:
        folders: further folders with modules. All their modules are sent.
        exclude: patterns of names and paths in packages, such as `*.bin` or `package/data`, that
            are not sent.
    """

    folders: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class ModuleFile(Record, frozen=True):
    """A file of a module.

    Attributes:
        source: path on the notebook's machine.
        digest: digest of its content.
        size_bytes: its size.
    """

    source: str
    digest: str
    size_bytes: int


class OwnModule(Record, frozen=True):
    """A module at the top level that belongs to no installed package.

    Attributes:
        name: its name.
        files: its file, or all files of a package, by the path beside the notebook.
    """

    name: str
    files: dict[str, ModuleFile]

    @property
    def digest(self) -> str:
        """Digest of the names and contents of its files."""
        listed = "".join(f"{path}\0{file.digest}\0" for path, file in sorted(self.files.items()))
        return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


class PlacedModules(Record, frozen=True):
    """Modules on a host.

    Attributes:
        folders: folder that contains each module; empty for the files of the notebook.
        lacking: digests of the files that the host lacks.
        fault: the reason why files cannot be stored; empty if they can.
    """

    folders: dict[str, str] = msgspec.field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    fault: str = ""
