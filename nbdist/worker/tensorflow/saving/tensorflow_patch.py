"""Checkpoints and SavedModels of TensorFlow 2.21 under the mirrored strategy (`coordination.py`).

TensorFlow requires a different path on each worker and asks users to write code that computes those
paths. If all workers use one path, each removes the temporary files of the others, and shards are
missing. This module wraps `tf.train.Checkpoint`, `tf.train.CheckpointManager`,
`tf.train.latest_checkpoint` and `tf.saved_model`. A SavedModel loaded in the scope of a strategy
can be called outside of replicas. TensorFlow uses a placeholder there that fails when it is read.
`tests/worker/tensorflow/saving/test_coordination.py` fails if the patch is no longer needed.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.tensorflow import (
    checkpoint_management,
    distribute_lib,
    distribute_utils,
    load_lib,
    save_lib,
)
from nbdist.worker.runtime import context
from nbdist.worker.runtime.replaced_attributes import replaced
from nbdist.worker.tensorflow.saving import coordination as saving
from nbdist.worker.tensorflow.saving.chief_files import answer_of
from nbdist.worker.tensorflow.saving.local_variables import local_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.tensorflow.saving.coordination import Saves
    from nbdist.worker.tensorflow.saving.messages import Answer

_Checkpoint = tf.train.Checkpoint
_Manager = tf.train.CheckpointManager
_upstream_counter = _Checkpoint._maybe_create_save_counter
_upstream_manager_save = _Manager.save
_upstream_state = checkpoint_management.get_checkpoint_state
_upstream_call = load_lib._WrapperFunction._call_flat


@functools.cache
def apply() -> None:
    """Patch the checkpoints and saved models of TensorFlow."""
    _Checkpoint.write = _checkpointed(_Checkpoint.write)
    _Checkpoint.save = _checkpointed(_Checkpoint.save)
    _Checkpoint.read = saving.seen(_Checkpoint.read, 1, "save_path")
    _Checkpoint.restore = saving.seen(_Checkpoint.restore, 1, "save_path")
    _Checkpoint._maybe_create_save_counter = _create_counter
    _Manager.save = _save_managed
    save_lib.save_and_return_nodes = saving.by_chief(save_lib.save_and_return_nodes)
    load_lib.load_partial = saving.seen(load_lib.load_partial, 0, "export_dir")
    checkpoint_management.get_checkpoint_state = _get_state
    load_lib._WrapperFunction._call_flat = _call_loaded


def _checkpointed(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def wrapped(self: Any, file_prefix: Any, options: Any = None) -> Any:
        own = saving.of_all(file_prefix)
        if own is None:
            return write(self, file_prefix, options)
        with own.whole():
            if own.is_chief:
                return _write_as_chief(own, str(file_prefix), lambda p: write(self, p, options))
            return _write_draft(own, self, str(file_prefix), lambda p: write(self, p, options))

    return wrapped


def _write_as_chief(own: Saves, prefix: str, write: Callable[[str], str]) -> str:
    with own.announced(prefix) as entry:
        path = write(prefix)
        entry.answer = answer_of(prefix, suffix=path[len(prefix) :], more=["checkpoint"])
    return path


def _write_draft(own: Saves, checkpoint: Any, prefix: str, write: Callable[[str], str]) -> str:
    with own.drafting(prefix) as scratch:
        draft = str(scratch / Path(prefix).name)
        suffix = write(draft)[len(draft) :]
        return prefix + _agreed(own.settle(prefix, scratch), suffix, checkpoint)


def _agreed(answer: Answer, suffix: str, checkpoint: Any) -> str:
    """Return the suffix of rank 0's path, and set the checkpoint's counter to rank 0's number."""
    if answer.status == "alone" or answer.suffix == suffix:
        return suffix
    checkpoint.save_counter.assign(int(answer.suffix.removeprefix("-")))
    return answer.suffix


def _create_counter(self: Any) -> None:
    """Create the counter without a broadcast: this rank may be the only one that creates it."""
    with local_variables():
        _upstream_counter(self)


def _save_managed(self: Any, *args: Any, **kwargs: Any) -> Any:
    own = saving.of_all(self.directory)
    if own is None:
        return _upstream_manager_save(self, *args, **kwargs)
    with own.whole():
        if not own.is_chief:
            return _manage_draft(own, self, args, kwargs)
        with own.announced(self._prefix) as entry:
            path = _upstream_manager_save(self, *args, **kwargs)
            if path is None:  # the manager skipped the save: no other rank asks for it
                entry.path = ""
            suffix = "" if path is None else path[len(self._prefix) :]
            entry.answer = answer_of(self._prefix, suffix=suffix, more=["checkpoint"])
        return path


def _manage_draft(own: Saves, manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Save to a temporary folder, and remove the checkpoints that rank 0 has removed."""
    folder, prefix = manager._directory, manager._prefix
    removed: list[str] = []
    with own.drafting(prefix) as scratch:
        draft_prefix = str(scratch / Path(prefix).name)
        manager._directory, manager._checkpoint_prefix = str(scratch), draft_prefix
        try:
            with replaced(checkpoint_management, "_delete_file_if_exists", removed.append):
                draft = _upstream_manager_save(manager, *args, **kwargs)
        finally:
            manager._directory, manager._checkpoint_prefix = folder, prefix
        if draft is None:
            return None
        answer = own.settle(prefix, scratch)
        path = prefix + _agreed(answer, draft[len(draft_prefix) :], manager.checkpoint)
        manager._maybe_delete[path] = manager._maybe_delete.pop(draft)
        manager._latest_checkpoint = path
        if answer.status == "alone":
            manager._record_state()
        if answer.status == "alone" or answer.known:  # rank 0 does not remove this rank's files
            for pattern in removed:
                checkpoint_management._delete_file_if_exists(pattern)
        return path


def _get_state(checkpoint_dir: Any, latest_filename: Any = None) -> Any:
    own = saving.current()
    if own is not None and isinstance(checkpoint_dir, (str, Path)):
        own.see(os.path.join(checkpoint_dir, latest_filename or "checkpoint"))  # noqa: PTH118
    found = _upstream_state(checkpoint_dir, latest_filename)
    if own is not None and found is not None:
        own.see(found.model_checkpoint_path)
    return found


def _call_loaded(self: Any, args: Any, captured_inputs: Any) -> Any:
    """Call a loaded function. Outside of replicas it reads this rank's own copy of a variable."""
    if context.cell_strategy() is not None and distribute_lib.in_cross_replica_context():
        captured_inputs = [
            each._primary.handle if distribute_utils.is_distributed_variable(each) else each
            for each in captured_inputs
        ]
        return super(load_lib._WrapperFunction, self)._call_flat(args, captured_inputs)
    return _upstream_call(self, args, captured_inputs)
