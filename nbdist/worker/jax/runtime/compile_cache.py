"""Compilation cache of the cluster: a folder with JAX's compiled programs.

The cache serves replaced ranks, ranks with new collectives, and all ranks after a restart. JAX's
own cache has two problems. Only process 0 writes to it, although on CPUs each process looks for a
name of its own. And a process that is killed during a write leaves an unreadable file.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from nbdist.private_api.jax import CacheInterface, compilation_cache, compiler

if TYPE_CHECKING:
    from collections.abc import Sequence

_open_upstream = compilation_cache.get_file_cache
_write_upstream = compiler._cache_write
_folder = ""
_log = logging.getLogger(__name__)


def keep_in(folder: str) -> None:
    """Cache compiled programs in a folder, unless the user has set another one.

    Nobody else may write to the folder: processes execute the programs that they read from it.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    global _folder  # noqa: PLW0603 - JAX has one cache
    _folder = folder
    compilation_cache.get_file_cache = _open
    compiler._cache_write = _write
    jax.config.update("jax_compilation_cache_dir", folder)


class Folder(CacheInterface):  # type: ignore[misc]
    """Cache with one file per program, written atomically.

    If the user sets another folder later, JAX's own cache is used from the next program on.

    Args:
        path: Path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        if not _is_used():
            compilation_cache.reset_cache()
            return None
        try:
            return (self._path / key).read_bytes()
        except OSError:
            return None

    def put(self, key: str, value: bytes) -> None:
        draft = self._path / f"{key}.{os.getpid()}.{threading.get_ident()}"
        try:
            draft.write_bytes(value)
            draft.replace(self._path / key)
        finally:
            draft.unlink(missing_ok=True)


def _is_used() -> bool:
    return bool(jax.config.jax_compilation_cache_dir == _folder)


def _open(path: str) -> tuple[CacheInterface, str] | None:
    return (Folder(Path(path)), path) if _is_used() else _open_upstream(path)


def _write(
    key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Sequence[Any]
) -> None:
    """Write a program to the cache.

    From JAX 0.11 on, JAX passes no callbacks: it connects them again when it reads a program.
    """
    if not _is_used():
        _write_upstream(key, seconds, name, backend, executable, *callbacks)
        return
    if any(callbacks):  # the program contains a function of this process
        return
    try:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # noqa: BLE001 - disk full, or not serializable: compiled again
        _log.info("%s is not cached: %s", name, error)
