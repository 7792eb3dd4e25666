"""Files of the user's own modules on this host: calls of the notebook through ipyparallel."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cells.own_modules import digest_of
from nbdist.records import PlacedModules
from nbdist.worker.own_modules.finder import ModuleText, install
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.records import ModuleFile, OwnModule


def place(modules: Sequence[OwnModule], stores: Mapping[int, str]) -> PlacedModules:
    """Find or create a folder with the files of each module on this host.

    A module whose files have the same content at the notebook's paths is used from there. Contents
    that no module needs are removed once the host lacks none.

    Args:
        modules: the modules.
        stores: folder for copies on the host of each rank.
    """
    store = Path(stores[context.current().rank])
    folders, lacking = {}, dict[str, None]()
    try:
        for module in modules:
            if all(_is_same(Path(file.source), file) for file in module.files.values()):
                folders[module.name] = ""
                continue
            missing = [f.digest for f in module.files.values() if not (store / f.digest).exists()]
            lacking |= dict.fromkeys(missing)
            if not missing:
                folders[module.name] = str(_tree(module, store))
        if not lacking:
            _remove_others(modules, folders, store)
    except OSError as error:
        return PlacedModules(fault=_fault(error, store))
    return PlacedModules(folders=folders, lacking=tuple(lacking))


def store(contents: Mapping[str, bytes], stores: Mapping[int, str]) -> str:
    """Store contents of files by their digests. Return the reason if that fails, else empty."""
    rank = context.current().rank
    folder = Path(stores[rank])
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for digest, content in contents.items():
            temporary = folder / f".{digest}.{rank}"
            try:
                temporary.write_bytes(content)
                temporary.chmod(0o400)
                temporary.replace(folder / digest)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        return _fault(error, folder)
    return ""


def use(
    modules: Sequence[OwnModule],
    folders: Mapping[int, Mapping[str, str]],
    stores: Mapping[int, str],
) -> None:
    """Use these modules from now on, and no others.

    The next cell reloads those that are loaded with another text.

    Args:
        modules: the modules.
        folders: folder of each module on the host of each rank, as `place` returns it.
        stores: folder for copies on the host of each rank.
    """
    rank = context.current().rank
    for module in modules:
        folder = folders[rank].get(module.name, "")
        install().use(module, _texts(module, folder, Path(stores[rank])))
    install().forget_others([module.name for module in modules])


def _texts(module: OwnModule, folder: str, store: Path) -> Iterator[ModuleText]:
    for beside, file in module.files.items():
        *above, last = Path(beside).with_suffix("").parts
        is_package = last == "__init__"
        name = ".".join(above if is_package else (*above, last))
        if not beside.endswith(".py") or not name.replace(".", "_").isidentifier():
            continue
        path = str(Path(folder, beside)) if folder else file.source
        known = install().texts.get(name)
        if known is not None and (known.file, known.digest) == (path, file.digest):
            yield known
        else:
            text = _content(Path(path), file, store)
            yield ModuleText(name, file.source, path, file.digest, text, is_package)


def _content(path: Path, file: ModuleFile, store: Path) -> bytes:
    """Return the content of a file as the notebook has read it; it may have changed since."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if digest_of(content) == file.digest:
            return content
    return (store / file.digest).read_bytes()


def _is_same(path: Path, file: ModuleFile) -> bool:
    """Return True if a file has the notebook's content."""
    try:
        if path.stat().st_size != file.size_bytes:
            return False
        return digest_of(path.read_bytes()) == file.digest
    except OSError:
        return False


def _tree(module: OwnModule, store: Path) -> Path:
    """Return a folder with all files of a module. Its path is the same after each change.

    Modules that are not reloaded thus find their new data files.
    """
    folder = store / module.name
    for beside, file in module.files.items():
        path, content = folder / beside, store / file.digest
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.samefile(content)):
            draft = path.with_name(f".{path.name}.{context.current().rank}")
            draft.unlink(missing_ok=True)
            draft.hardlink_to(content)
            draft.replace(path)
    for path in folder.rglob("*"):
        if str(path.relative_to(folder)) not in module.files and _is_copy(path):
            path.unlink()
    return folder


def _is_copy(path: Path) -> bool:
    """Return True for a link to a stored content, False for a file that a program has written."""
    return not path.is_symlink() and path.is_file() and path.stat().st_nlink > 1


def _remove_others(modules: Sequence[OwnModule], folders: Mapping[str, str], store: Path) -> None:
    """Remove contents of earlier texts, and folders of modules that are not used from here."""
    needed = {name for name, folder in folders.items() if folder}
    needed |= {file.digest for module in modules for file in module.files.values()}
    for path in store.iterdir() if store.exists() else ():
        if path.name in needed or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fault(error: OSError, folder: Path) -> str:
    return f"{folder}: {error.strerror or error}"
