"""Import of the user's own modules with the text of the notebook, and their use from other disks.

The code of a module keeps the path of the notebook's file, so tracebacks show that path. Its
`__file__` is a file on this host, with the data files of its package beside it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cells.own_modules import digest_of
from nbdist.utils.installed import is_users_file
from nbdist.worker.runtime import import_hooks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from types import CodeType, ModuleType

    from nbdist.records import OwnModule


class ModuleText(NamedTuple):
    """Text of a module.

    Attributes:
        name: its full name.
        source: path of the notebook's file.
        file: path of the file on this host.
        digest: digest of the text.
        text: content of the file.
        is_package: True for `__init__.py`.
    """

    name: str
    source: str
    file: str
    digest: str
    text: bytes
    is_package: bool


class OwnLoader(SourceFileLoader):
    """Loader of a module with the text of the notebook.

    Attributes:
        module: the text.
    """

    def __init__(self, module: ModuleText) -> None:
        super().__init__(module.name, module.file)
        self.module = module

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the text. Errors and tracebacks show the path of the notebook's file."""
        lines = self.get_source(fullname).splitlines(keepends=True)
        path = self.module.source
        linecache.cache[path] = len(self.module.text), None, lines, path
        code: CodeType = self.source_to_code(self.module.text, path)
        return code

    def get_source(self, fullname: str) -> str:
        """Return the text."""
        del fullname
        return importlib.util.decode_source(self.module.text)


class OwnFinder:
    """Finder of the user's own modules, for `sys.meta_path`.

    Attributes:
        texts: text of each module, by its full name.
        deleted: loaded modules at the top level whose files the notebook no longer finds.
    """

    def __init__(self) -> None:
        self.texts: dict[str, ModuleText] = {}
        self.deleted: list[str] = []
        self._folders: dict[str, list[str]] = {}  # of packages without `__init__.py`
        self._elsewhere: set[str] = set()

    def use(self, module: OwnModule, texts: Iterable[ModuleText]) -> None:
        """Use these texts from now on, in place of earlier ones of the module."""
        self._forget(module.name)
        for text in texts:
            self.texts[text.name] = text
            self._note_folders(text)
        for name, loaded, text in self.loaded():
            if self.texts[name].file != text.file:
                loaded.__file__ = self.texts[name].file
                if text.is_package:
                    loaded.__path__ = [str(Path(loaded.__file__).parent)]

    def forget_others(self, names: Collection[str]) -> None:
        """Forget all modules except these. Loaded modules stay loaded, as in the notebook."""
        known = {name.partition(".")[0] for name in (*self.texts, *self._folders)}
        for name in sorted(known.difference(names)):
            self._forget(name)
            if name in sys.modules:
                self.deleted.append(name)

    def _forget(self, module: str) -> None:
        for names in (self.texts, self._folders):
            for name in [name for name in names if name.partition(".")[0] == module]:
                del names[name]

    def _note_folders(self, text: ModuleText) -> None:
        folder = Path(text.file).parent
        name = text.name if text.is_package else text.name.rpartition(".")[0]
        while name:
            known = self._folders.setdefault(name, [])
            if str(folder) not in known:
                known.append(str(folder))
            name, folder = name.rpartition(".")[0], folder.parent

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module. See `importlib.abc.MetaPathFinder.find_spec`."""
        del path, target
        text = self.texts.get(name)
        if text is not None:
            inside = [str(Path(text.file).parent)] if text.is_package else None
            return importlib.util.spec_from_file_location(
                name, text.file, loader=OwnLoader(text), submodule_search_locations=inside
            )
        if name in self._folders:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = list(self._folders[name])
            return spec
        self._elsewhere.add(name)
        return None

    def loaded(self) -> Iterator[tuple[str, ModuleType, ModuleText]]:
        """Yield the loaded modules: name, module, and the text that it has run.

        A module that was imported from this host's disk before has the text of its file.
        """
        for name, text in self.texts.items():
            module = sys.modules.get(name)
            if module is None:
                continue
            loader = vars(module).get("__loader__")
            if not isinstance(loader, OwnLoader):
                loader = OwnLoader(_on_disk(module, text))
                module.__loader__ = loader
            yield name, module, loader.module

    def from_disk(self) -> dict[str, str]:
        """Return digests of the user's modules that were imported from this host's disk.

        Modules of earlier calls are left out.
        """
        names, self._elsewhere = self._elsewhere, set()
        found = {}
        for name in names:
            module = sys.modules.get(name)
            file = None if module is None else vars(module).get("__file__")
            if isinstance(file, str) and file.endswith(".py") and is_users_file(name, file):
                with contextlib.suppress(OSError):  # it has been removed
                    found[name] = digest_of(Path(file).read_bytes())
        return found


def _on_disk(module: ModuleType, text: ModuleText) -> ModuleText:
    """Return the text of a module that another loader has loaded; empty without a file."""
    file, content = str(vars(module).get("__file__")), b""
    with contextlib.suppress(OSError):
        content = Path(file).read_bytes()
    return text._replace(file=file, digest=digest_of(content), text=content)


def install() -> OwnFinder:
    """Return the finder of this process. The first call installs it."""
    if not _installed:
        _installed.append(OwnFinder())
        import_hooks.search_first(_installed[0])
    return _installed[0]


_installed: list[OwnFinder] = []
