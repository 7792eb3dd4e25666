"""`nbdist.export`: write one whole model from the state of all ranks."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from nbdist.errors import UsageError
from nbdist.worker.export import formats, named_arrays
from nbdist.worker.export.omissions import omissions
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.export.named_arrays import Contents

Format = Literal["", "keras", "weights", "savedmodel", "safetensors", "orbax"]

_OF_KERAS = ("keras", "weights", "savedmodel")
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_PACKAGES = {"safetensors": "safetensors", "orbax": "orbax"}


def export(value: Any, folder: str | os.PathLike[str], *, format: Format = "") -> Path:  # noqa: A002 - the usual name
    """Write a model as files that load in one process without nbdist.

    Call it on all ranks, in a cell or a program. Sharded arrays are gathered one at a time, and
    rank 0 writes the files. It also works in one process without workers, for example with the
    folder of a run's checkpoints.

    | format | files | reader |
    |---|---|---|
    | `keras` | `model.keras` | `keras.saving.load_model` |
    | `weights` | `model.weights.h5` | `model.load_weights` |
    | `savedmodel` | a SavedModel | `tf.saved_model.load`, TensorFlow Serving |
    | `safetensors` | `model.safetensors`, or parts of 5 GB with an index | `safetensors` |
    | `orbax` | `orbax/` | `orbax.checkpoint.StandardCheckpointer().restore` |

    Arrays have their paths as names, such as `encoder.layers.0.kernel`.

    Args:
        value: A Keras model, a Flax or Equinox module, a tree of arrays or variables, or the path
            of a folder with checkpoints (`--checkpoint`), whose newest one is read.
        folder: New folder for the files.
        format: Format of the files. Default: `keras` for a Keras model, else `safetensors`.

    Returns:
        The absolute path of the folder.

    Raises:
        UsageError: The folder exists or cannot be written, the disk is full, the format is unknown
            or does not fit the value, or a package is missing.
        StepError: TensorFlow cannot save a model of Keras on JAX as a SavedModel.
    """
    target = Path(folder).expanduser().absolute()
    is_model = named_arrays.is_keras_model(value)
    kind = format or ("keras" if is_model else "safetensors")
    _check(value, kind, is_model=is_model)
    rank, agree = _ranks()
    is_writer = rank == 0
    if agree(int(is_writer and target.exists())):
        raise UsageError(f"{target} exists: choose another folder, or remove it")
    draft = target.with_name(f".{target.name}.part")  # the same path on all ranks
    try:
        if is_writer:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        if kind in _OF_KERAS:
            contents = None
            remark = _write_model(value, draft, kind, writes=is_writer, agree=agree)
        else:
            contents, remark = _contents(value), ""
            write = formats.write_orbax if kind == "orbax" else formats.write_safetensors
            write(draft, contents.arrays, writes=is_writer)
        if is_writer:
            message = omissions(value, kind, contents) + remark
            draft.rename(target)
            _announce(target, os.fspath(folder), kind, message)
    except OSError as error:
        if error.errno not in _OF_DISK:
            raise
        raise UsageError(
            f"cannot export to {target}: {os.strerror(error.errno)}. Nothing was written: choose "
            "another folder, or free space"
        ) from None
    finally:
        if is_writer:
            shutil.rmtree(draft, ignore_errors=True)
    agree(0)
    return target


def _check(value: Any, kind: str, *, is_model: bool) -> None:
    known = [name for name in get_args(Format) if name]
    if kind not in known:
        raise UsageError(f"unknown format {kind!r}: choose from {', '.join(known)}")
    if kind in _OF_KERAS and isinstance(value, (str, os.PathLike)):
        raise UsageError(
            f'format="{kind}" needs a Keras model, and a checkpoint contains arrays only: use '
            'format="safetensors" or "orbax", or export the model in a cell after --resume'
        )
    if kind in _OF_KERAS and not is_model:
        raise UsageError(
            f'format="{kind}" needs a Keras model, not {type(value).__name__}: use '
            'format="safetensors" or "orbax" for arrays'
        )
    package = _PACKAGES.get(kind)
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f'format="{kind}" needs a package: run %pip install "nbdist[export]"')


def _ranks() -> tuple[int, Callable[[int], int]]:
    """Return the rank of this process, and a function that returns rank 0's number on all ranks.

    The function waits until all ranks have called it.
    """
    worker = context.if_any()
    if worker is None or worker.world_size == 1 or not worker.strategies:
        return worker.rank if worker else 0, lambda number: number
    name = worker.strategy or next(iter(worker.strategies))
    if name == "mirrored":
        from nbdist.worker.tensorflow.runtime.rank_gather import gather_over

        gather: Callable[[np.ndarray], np.ndarray] = gather_over(worker.strategies[name])
    else:
        from nbdist.worker.jax.runtime import processes

        gather = processes.gather
    return worker.rank, lambda number: int(gather(np.asarray([number], np.int32))[0, 0])


def _write_model(
    model: Any, draft: Path, kind: str, *, writes: bool, agree: Callable[[int], int]
) -> str:
    """Write a Keras model, and return a remark. Rank 0 alone writes.

    Under JAX, all ranks gather sharded variables.
    """
    import keras

    of_jax = keras.backend.backend() == "jax"
    if not of_jax and not writes:
        return ""
    if kind == "weights":
        model.save_weights(draft / "model.weights.h5")
    elif kind == "keras":
        model.save(draft / "model.keras")
    elif of_jax:
        from nbdist.worker.export.saved_model import write_of_jax

        reason = write_of_jax(model, draft, writes=writes, agree=agree)
        return reason and f". It is one XLA program for CPU, GPU and TPU ({reason})"
    else:
        model.export(draft, verbose=False)
    return ""


def _contents(value: Any) -> Contents:
    if isinstance(value, (str, os.PathLike)):
        return named_arrays.of_checkpoint(Path(value).expanduser().absolute())
    return named_arrays.of_value(value)


def _announce(target: Path, shown: str, kind: str, omitted: str) -> None:
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    text = f"exported to {shown} ({size / 1e6:.3g} MB, format {kind}). Not included: {omitted}"
    if worker := context.if_any():
        worker.reporter.note("checkpoint", text)
    else:
        sys.stdout.write(f"{text}\n")
