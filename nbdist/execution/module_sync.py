"""The user's own modules on the workers: they get the text that the notebook sees."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.cells.own_modules import OwnModuleFinder, imports_of_cell, imports_of_module
from nbdist.errors import TransferError, UsageError
from nbdist.records import ModuleFile, OwnModule, Sync
from nbdist.utils.files import replace_file
from nbdist.worker.remote import module_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.cells.own_modules import OwnModules
    from nbdist.cluster.worker_group import WorkerGroup
    from nbdist.records import PlacedModules

_FOLDER = "modules"
"""Folder of the modules in the cluster's folder, on the notebook's machine and on each host."""

_LIST = "modules.msgpack"


@dataclass(frozen=True)
class ProgramModules:
    """The user's own modules for an exported program.

    Attributes:
        files: file to copy, by its path beside the program.
        edited: paths of files that have changed since the workers read them.
        missing: names of modules that this process does not find.
    """

    files: dict[Path, Path]
    edited: list[str]
    missing: list[str]


class ModuleSync:
    """Modules of the user that cells import, found before each cell and sent after each change.

    Their texts are stored in the cluster's folder: a recovery sends those that the run began with.

    Args:
        worker_group: the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._folder = worker_group.engines.folder / _FOLDER
        sync = worker_group.engines.request.sync or Sync()
        self._finder = OwnModuleFinder(sync.folders, sync.exclude, self._store)
        self._modules: dict[str, OwnModule] = {}
        with contextlib.suppress(OSError):  # no cell has imported any
            content = (self._folder / _LIST).read_bytes()
            self._modules = msgspec.msgpack.decode(content, type=dict[str, OwnModule])
        self._version = 0
        self._sent: dict[int, tuple[str, int, int]] = {}  # host, pid and version of each rank

    def find(self, source: str) -> None:
        """Find the modules that a cell imports, and changes of those that earlier cells imported.

        Args:
            source: text of the cell.

        Raises:
            UsageError: a file cannot be read or stored, the files are too large, or a module has
                the name of an installed one.
        """
        self.find_named(imports_of_cell(source))

    def find_named(self, names: Sequence[str]) -> None:
        """Find modules of these names at the top level; see `find`. Deleted modules are left out.

        Raises:
            UsageError: see `find`.
        """
        request = self._worker_group.engines.request
        if request.sync is None:
            return
        if not names and not self._modules and not request.sync.folders:
            return
        self._finder.with_data = not request.is_local
        found = self._finder.find([*self._modules, *names])
        modules = {**_undeleted(self._modules), **_grouped(found)}
        if modules != self._modules:
            self._modules = modules
            self._version += 1
            self._keep_list()

    def of_program(self, names: Iterable[str]) -> ProgramModules:
        """Find the files of modules and of those that they import, with the texts of the workers.

        Files of packages that are no Python are those of this host, unless workers have copies.

        Args:
            names: modules that a program imports.

        Raises:
            UsageError: see `find`.
        """
        sync = self._worker_group.engines.request.sync or Sync()
        finder, names = OwnModuleFinder(sync.folders, sync.exclude), {*names}
        finder.with_data = True
        while True:
            found = finder.find(names)
            named = names | {place.parts[0].removesuffix(".py") for place in found.files}
            stale = {
                place: self._folder / file.digest
                for name in named & self._modules.keys()
                for place, file in self._modules[name].files.items()
                if (now := found.files.get(Path(place))) is None or now.digest != file.digest
            }
            texts = (path.read_bytes() for place, path in stale.items() if place.endswith(".py"))
            more = {name for text in texts for name in imports_of_module(text)} - named
            if not more:
                break
            names |= more
        files = {place: file.path for place, file in found.files.items()}
        files |= {Path(place): path for place, path in stale.items()}
        missing = [name for name in found.missing if name not in self._modules]
        return ProgramModules(files, sorted(stale), missing)

    def texts(self) -> dict[str, tuple[str, ...]]:
        """Return the texts of each module that the workers have."""
        return {
            name: tuple(
                (self._folder / file.digest).read_text(errors="replace")
                for place, file in module.files.items()
                if place.endswith(".py")
            )
            for name, module in self._modules.items()
        }

    def digests(self) -> dict[str, str]:
        """Return the digest of each module that the workers have."""
        return {name: module.digest for name, module in self._modules.items()}

    def others(self, names: Iterable[str]) -> list[str]:
        """Return the modules that are not the user's own."""
        return [name for name in names if name.partition(".")[0] not in self._modules]

    def send(self, ranks: Sequence[int]) -> None:
        """Send the modules to the ranks that lack them. Files are sent once to each host.

        Raises:
            TransferError: a host cannot store the files.
            WorkerError: a rank has died, or the controller has.
        """
        hellos = self._worker_group.hellos
        states = {rank: (hellos[rank].host, hellos[rank].pid, self._version) for rank in ranks}
        stale = [rank for rank, state in states.items() if self._sent.get(rank) != state]
        if not stale or not (self._modules or self._version):
            return
        engines = self._worker_group.engines
        hosts = {rank: engines.places.host(rank) for rank in stale}
        stores = {rank: f"{engines.fleet.folder(host)}/{_FOLDER}" for rank, host in hosts.items()}
        first = {host: rank for rank, host in reversed(hosts.items()) if host}
        placed = dict(zip(first, self._place(list(first.values()), stores), strict=True))
        folders = {rank: placed[host].folders if host else {} for rank, host in hosts.items()}
        modules = tuple(self._modules.values())
        engines.apply(module_files.use, modules, folders, stores, ranks=stale)
        self._sent.update({rank: states[rank] for rank in stale})

    def _place(self, ranks: list[int], stores: dict[int, str]) -> list[PlacedModules]:
        """Store on other hosts the files that they lack. Each rank represents its host."""
        if not ranks:
            return []
        apply, modules = self._worker_group.engines.apply, tuple(self._modules.values())
        placed: list[PlacedModules] = apply(module_files.place, modules, stores, ranks=ranks)
        lacking = {rank for rank, each in zip(ranks, placed, strict=True) if each.lacking}
        if lacking:
            digests = set(itertools.chain(*(each.lacking for each in placed)))
            contents = {digest: (self._folder / digest).read_bytes() for digest in digests}
            faults = apply(module_files.store, contents, stores, ranks=sorted(lacking))
            self._refuse(dict(zip(sorted(lacking), faults, strict=True)))
            placed = apply(module_files.place, modules, stores, ranks=ranks)
        self._refuse({rank: each.fault for rank, each in zip(ranks, placed, strict=True)})
        return placed

    def _refuse(self, faults: dict[int, str]) -> None:
        """Raise TransferError if a host cannot store files. The message contains all hosts."""
        hellos = self._worker_group.hellos
        lines = [f"  {hellos[rank].host}: {fault}" for rank, fault in faults.items() if fault]
        if lines:
            listed = "\n".join(lines)
            raise TransferError(
                f"your modules cannot be stored on all hosts:\n{listed}\nFree some space there, or "
                "leave large files out by `exclude` (docs/clusters.md)"
            )

    def _store(self, digest: str, content: bytes) -> None:
        """Store the content of a file in the cluster's folder."""
        if not (self._folder / digest).exists():
            self._write(digest, content)

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._folder / name, content, 0o600)
        except OSError as error:
            raise UsageError(
                f"your modules cannot be stored in {self._folder} ({error.strerror}): free some "
                "space, or use %dist_start --no-sync"
            ) from None

    def _keep_list(self) -> None:
        """Store the list of modules for a successor, and remove contents of no module."""
        files = (file for module in self._modules.values() for file in module.files.values())
        needed = {_LIST, *self._finder.digests(), *(file.digest for file in files)}
        self._write(_LIST, msgspec.msgpack.encode(self._modules))
        for path in self._folder.iterdir():
            if path.name not in needed:
                path.unlink()


def _undeleted(modules: Mapping[str, OwnModule]) -> dict[str, OwnModule]:
    """Return the modules that have files. Another notebook may not find their folders."""
    return {
        name: module
        for name, module in modules.items()
        if any(Path(file.source).exists() for file in module.files.values())
    }


def _grouped(found: OwnModules) -> dict[str, OwnModule]:
    """Return modules at the top level by name, with all their files."""
    files: dict[str, dict[str, ModuleFile]] = {}
    for beside, file in found.files.items():
        name = beside.parts[0].removesuffix(".py")
        files.setdefault(name, {})[str(beside)] = ModuleFile(
            source=str(file.path), digest=file.digest, size_bytes=file.size_bytes
        )
    return {name: OwnModule(name=name, files=own) for name, own in files.items()}
