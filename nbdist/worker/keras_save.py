"""Saves of Keras 3.15 under the mirrored strategy (`worker/saves.py`).

Keras writes a file on every process that calls `save`, to the same path: HDF5's lock fails on all
but one (BlockingIOError), and a rank that loads finds a file that another one writes. Keras has no
setting for the writer. Wrapped are the functions that `save`, `save_weights`, `export` and
`ModelCheckpoint` end in, the loading functions, and the callbacks that write files themselves.
`tests/worker/test_saves.py` fails if the patch is no longer needed.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
from keras.src import export
from keras.src.callbacks.backup_and_restore import BackupAndRestore
from keras.src.callbacks.csv_logger import CSVLogger
from keras.src.callbacks.tensorboard import TensorBoard
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib

from nbdist.worker import keras_hdf5, saves
from nbdist.worker.chief_files import Answer
from nbdist.worker.local_variables import local_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.saves import Saves

PATCHED_SERIES = "3.15."
_log = logging.getLogger(__name__)
_EXPORTS = ("export_onnx", "export_openvino", "export_litert")
_upstream_begin = CSVLogger.on_train_begin
_upstream_end = CSVLogger.on_train_end
_upstream_set_model = TensorBoard.set_model
_upstream_logged = TensorBoard.on_train_end
_upstream_back_up = BackupAndRestore._save_model
_upstream_restore = BackupAndRestore.on_train_begin
_upstream_remove = BackupAndRestore.on_train_end


@functools.cache
def apply() -> None:
    """Patch Keras 3.15; leave other versions alone."""
    if not keras.__version__.startswith(PATCHED_SERIES):
        _log.warning(
            "Keras %s saves unpatched: only %sx was tested", keras.__version__, PATCHED_SERIES
        )
        return
    keras_hdf5.apply()
    saving_lib.save_model = _by_chief(saving_lib.save_model)
    saving_lib.save_weights_only = _by_chief(saving_lib.save_weights_only)
    legacy_h5_format.save_model_to_hdf5 = _by_chief(legacy_h5_format.save_model_to_hdf5)
    for name in _EXPORTS:
        setattr(export, name, _by_chief(getattr(export, name)))
    _replace(saving_api, "load_model", _seen(saving_api.load_model, 0))
    _replace(saving_api, "load_weights", _seen(saving_api.load_weights, 1))
    CSVLogger.on_train_begin = _begin_rows
    CSVLogger.on_train_end = _end_rows
    TensorBoard.set_model = _begin_events
    TensorBoard.on_train_end = _end_events
    BackupAndRestore._save_model = _back_up
    BackupAndRestore.on_train_begin = _restore
    BackupAndRestore.on_train_end = _remove


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function under each name that Keras gives it."""
    former = getattr(module, name)
    for each in [m for n, m in sys.modules.items() if n.partition(".")[0] == "keras"]:
        if vars(each).get(name) is former:
            setattr(each, name, function)


def _by_chief(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def wrapped(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        own = saves.current()
        if own is None or not own.applies(filepath):
            return write(model, filepath, *args, **kwargs)

        def write_to(path: str) -> Any:
            with local_variables():
                return write(model, path, *args, **kwargs)

        return own.one_path(filepath, write_to, swapped=_is_one_file(str(filepath), args, kwargs))

    return wrapped


def _is_one_file(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    sharded = kwargs.get("max_shard_size") or (
        args and path.endswith((".weights.json", ".weights.h5"))
    )
    return path.endswith((".keras", ".h5", ".hdf5")) and not sharded


def _seen(load: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Have what is loaded from the path at `place` copied from rank 0 first, if it is not here."""

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        own = saves.current()
        if own is not None:
            own.see(args[place] if len(args) > place else kwargs.get("filepath"))
        return load(*args, **kwargs)

    return wrapped


def _others(path: object) -> Saves | None:
    """The saves of this rank, if it is not rank 0 and `path` is one of all ranks."""
    own = saves.current()
    return own if own is not None and not own.is_chief and own.applies(path) else None


def _chief(path: object) -> Saves | None:
    own = saves.current()
    return own if own is not None and own.is_chief and own.applies(path) else None


def _begin_rows(self: Any, logs: Any = None) -> None:
    others, typed = _others(self.filename), self.filename
    self._nbdist_scratch = None
    if others is None:
        _upstream_begin(self, logs)
        return
    self._nbdist_scratch = others.scratch()
    self.filename = str(self._nbdist_scratch / Path(typed).name)
    if self.append and Path(typed).is_file():
        shutil.copyfile(typed, self.filename)
    try:
        _upstream_begin(self, logs)
    finally:
        self.filename = typed


def _end_rows(self: Any, logs: Any = None) -> None:
    chief = _chief(self.filename)
    if chief is not None:
        with chief.announced(self.filename):
            _upstream_end(self, logs)
        return
    _upstream_end(self, logs)
    if self._nbdist_scratch is not None:
        _settle(self._nbdist_scratch, self.filename, Path(self.filename).absolute().parent)


def _begin_events(self: Any, model: Any) -> None:
    others, typed = _others(self.log_dir), self.log_dir
    self._nbdist_scratch = None
    if others is None:
        _upstream_set_model(self, model)
        return
    self._nbdist_scratch = others.scratch()
    self.log_dir = str(self._nbdist_scratch)
    try:
        _upstream_set_model(self, model)
    finally:
        self.log_dir = typed


def _end_events(self: Any, logs: Any = None) -> None:
    """TensorBoard reads the folder of rank 0, so nothing is copied."""
    chief = _chief(self.log_dir)
    if chief is not None:
        with chief.announced(self.log_dir) as entry:
            _upstream_logged(self, logs)
            entry.answer = Answer()
        return
    _upstream_logged(self, logs)
    if self._nbdist_scratch is not None:
        _settle(self._nbdist_scratch, self.log_dir, Path(self.log_dir))


def _settle(scratch: Path, path: str, folder: Path) -> None:
    """Wait for rank 0, and keep this rank's files in `folder` if rank 0 writes none."""
    own = saves.current()
    assert own is not None
    try:
        if own.await_chief(path).status == "alone":
            saves.move(scratch, folder)
    finally:
        own.discard(scratch)


def _back_up(self: Any) -> None:
    own = saves.current()
    if own is None or not own.applies(self.backup_dir):
        _upstream_back_up(self)
        return
    paths = vars(self).copy()
    typed = str(self.backup_dir)

    def write(path: str) -> None:
        for name, value in paths.items():
            if name.endswith("_path") or name == "backup_dir":
                setattr(self, name, path + str(value)[len(typed) :])
        try:
            with local_variables():
                _upstream_back_up(self)
        finally:
            vars(self).update(
                {name: paths[name] for name in paths if name.endswith(("_path", "_dir"))}
            )

    own.one_path(typed, write)


def _restore(self: Any, logs: Any = None) -> None:
    own = saves.current()
    if own is not None:
        own.see(self.backup_dir, always=True)  # all ranks have to begin with the same epoch
    _upstream_restore(self, logs)


def _remove(self: Any, logs: Any = None) -> None:
    """Each rank removes the folder that it sees; Keras's own way fails if two do at once."""
    typed = f"{self.backup_dir} (removal)"
    chief, others = _chief(typed), _others(typed)
    if not self.delete_checkpoint or (chief is None and others is None):
        _upstream_remove(self, logs)
    elif chief is not None:
        with chief.announced(typed) as entry:
            _upstream_remove(self, logs)
            entry.answer = Answer()
    elif others is not None:
        others.await_chief(typed)
        if os.path.isdir(self.backup_dir):  # noqa: PTH112 - as it was typed
            shutil.rmtree(self.backup_dir, ignore_errors=True)
