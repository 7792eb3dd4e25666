"""Saves of Keras 3.15 under the mirrored strategy (`worker/tensorflow/saving/coordination.py`).

Keras writes a file to the same path on every process that calls `save`. HDF5's lock then fails on
all but one (BlockingIOError), and a rank may load a file that another rank still writes. Keras has
no setting for the writing process. This module wraps the functions behind `save`, `save_weights`,
`export` and `ModelCheckpoint`, the loading functions, and the callbacks that write files
themselves. `tests/worker/tensorflow/saving/test_coordination.py` fails if the patch is no longer
needed.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.private_api.keras import (
    BackupAndRestore,
    CSVLogger,
    TensorBoard,
    export,
    legacy_h5_format,
    saving_api,
    saving_lib,
)
from nbdist.worker.keras import hdf5
from nbdist.worker.tensorflow.saving import coordination as saving
from nbdist.worker.tensorflow.saving.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    *((export, f"export_{kind}") for kind in ("onnx", "openvino", "litert")),
)
_upstream_begin = CSVLogger.on_train_begin
_upstream_end = CSVLogger.on_train_end
_upstream_set_model = TensorBoard.set_model
_upstream_logged = TensorBoard.on_train_end
_upstream_back_up = BackupAndRestore._save_model
_upstream_restore = BackupAndRestore.on_train_begin
_upstream_remove = BackupAndRestore.on_train_end


@functools.cache
def apply() -> None:
    """Patch the functions of Keras that write files."""
    hdf5.apply()
    for module, name in _WRITERS:
        setattr(module, name, saving.by_chief(getattr(module, name), _is_one_file))
    _replace(saving_api, "load_model", saving.seen(saving_api.load_model, 0, "filepath"))
    _replace(saving_api, "load_weights", saving.seen(saving_api.load_weights, 1, "filepath"))
    CSVLogger.on_train_begin = _begin_rows
    CSVLogger.on_train_end = _end_rows
    TensorBoard.set_model = _begin_events
    TensorBoard.on_train_end = _end_events
    BackupAndRestore._save_model = _back_up
    BackupAndRestore.on_train_begin = _restore
    BackupAndRestore.on_train_end = _remove


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in every Keras module that refers to it."""
    original = getattr(module, name)
    for each in [m for n, m in sys.modules.items() if n.partition(".")[0] == "keras"]:
        if vars(each).get(name) is original:
            setattr(each, name, function)


def _is_one_file(path: str, *args: Any, **kwargs: Any) -> bool:
    sharded = kwargs.get("max_shard_size") or (
        args and path.endswith((".weights.json", ".weights.h5"))
    )
    return path.endswith((".keras", ".h5", ".hdf5")) and not sharded


def _begin_rows(self: Any, logs: Any = None) -> None:
    def draft(scratch: Path) -> Path:
        path = scratch / Path(self.filename).name
        if self.append and Path(self.filename).is_file():
            shutil.copyfile(self.filename, path)
        return path

    _begin(self, "filename", draft, lambda: _upstream_begin(self, logs))


def _end_rows(self: Any, logs: Any = None) -> None:
    folder = Path(self.filename).absolute().parent
    _end(self, self.filename, folder, lambda: _upstream_end(self, logs))


def _begin_events(self: Any, model: Any) -> None:
    _begin(self, "log_dir", lambda scratch: scratch, lambda: _upstream_set_model(self, model))


def _end_events(self: Any, logs: Any = None) -> None:
    """Close the event files without copying them: TensorBoard reads the folder of rank 0."""
    _end(self, self.log_dir, Path(self.log_dir), lambda: _upstream_logged(self, logs), Answer())


def _begin(
    self: Any, name: str, draft: Callable[[Path], Path], upstream: Callable[[], None]
) -> None:
    """Open the files of a callback. Ranks other than rank 0 use a temporary folder.

    Args:
        self: the callback.
        name: name of the attribute with the path.
        draft: returns the path in the temporary folder.
        upstream: opens the files.
    """
    typed = getattr(self, name)
    own = saving.of_all(typed)
    self._nbdist_scratch = None
    if own is not None and not own.is_chief:
        self._nbdist_scratch = own.scratch()
        setattr(self, name, str(draft(self._nbdist_scratch)))
    try:
        upstream()
    finally:
        setattr(self, name, typed)


def _end(
    self: Any, typed: str, folder: Path, upstream: Callable[[], None], answer: Answer | None = None
) -> None:
    """Close the files of a callback and wait for rank 0 to close its own.

    Args:
        self: the callback.
        typed: path of the callback.
        folder: destination of this rank's files if rank 0 writes none.
        upstream: closes the files.
        answer: answer for the other ranks (default: the files of the path).
    """
    own = saving.of_all(typed)
    if own is not None and own.is_chief:
        with own.announced(typed) as entry:
            upstream()
            entry.answer = answer or entry.answer
        return
    upstream()
    scratch, writer = self._nbdist_scratch, saving.current()
    if scratch is not None and writer is not None:
        try:
            writer.settle(typed, scratch, folder)
        finally:
            writer.discard(scratch)


def _back_up(self: Any) -> None:
    own = saving.of_all(self.backup_dir)
    if own is None:
        _upstream_back_up(self)
        return
    paths = vars(self).copy()
    typed = str(self.backup_dir)

    def write(path: str) -> None:
        for name, value in paths.items():
            if name.endswith("_path") or name == "backup_dir":
                setattr(self, name, path + str(value)[len(typed) :])
        try:
            _upstream_back_up(self)
        finally:
            vars(self).update(
                {name: paths[name] for name in paths if name.endswith(("_path", "_dir"))}
            )

    own.one_path(typed, write)


def _restore(self: Any, logs: Any = None) -> None:
    own = saving.current()
    if own is not None:
        own.see(self.backup_dir, always=True)  # all ranks must begin with the same epoch
    _upstream_restore(self, logs)


def _remove(self: Any, logs: Any = None) -> None:
    """Remove the folder that each rank sees. Keras fails if two ranks remove it at once."""
    typed = f"{self.backup_dir} (removal)"
    own = saving.of_all(typed)
    if not self.delete_checkpoint or own is None:
        _upstream_remove(self, logs)
    elif own.is_chief:
        with own.announced(typed) as entry:
            _upstream_remove(self, logs)
            entry.answer = Answer()
    else:
        own.await_chief(typed)
        if os.path.isdir(self.backup_dir):  # noqa: PTH112 - the path as the user typed it
            shutil.rmtree(self.backup_dir, ignore_errors=True)
