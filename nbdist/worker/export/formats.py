"""File formats of exported models. Each function writes into an existing folder."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

from nbdist.errors import StepError
from nbdist.worker.own_modules import finder as own_finder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from nbdist.worker.export.named_arrays import NamedArray

SHARD_BYTES = 5 * 10**9
"""Largest part of a model in one file, and so in the memory of rank 0 at once."""

_CONVERT_S = 1800
_MOST_REASON = 300
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""Begin of the line of a traceback that contains the message."""

_AS_SAVED_MODEL = """
import pickle, sys
finder, sys.path[:] = pickle.load(sys.stdin.buffer)
sys.meta_path.insert(0, finder)
import keras
own = pickle.load(sys.stdin.buffer)
model = keras.saving.load_model(sys.argv[1], custom_objects=own, compile=False)
model.export(sys.argv[2], verbose=False)
"""


def write_safetensors(folder: Path, arrays: Sequence[NamedArray], *, writes: bool) -> None:
    """Write `model.safetensors`, or parts and an index as Hugging Face's libraries read them.

    Args:
        folder: Folder of the files.
        arrays: All arrays. Each rank reads them, one at a time.
        writes: True on the rank that writes.
    """
    from safetensors.numpy import save_file

    shards = list(_shards(arrays))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        whole = {}
        for array in shard:
            values = array.read()
            if writes:
                whole[array.name] = values
        if writes:
            save_file(whole, folder / name, metadata={"format": "np"})
        index |= dict.fromkeys((array.name for array in shard), name)
    if writes and len(shards) > 1:
        sizes = {"total_size": sum(array.nbytes for array in arrays)}
        text = json.dumps({"metadata": sizes, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(arrays: Sequence[NamedArray]) -> Iterator[list[NamedArray]]:
    shard: list[NamedArray] = []
    size = 0
    for array in arrays:
        if shard and size + array.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(array)
        size += array.nbytes
    yield shard


def write_orbax(folder: Path, arrays: Sequence[NamedArray], *, writes: bool) -> None:
    """Write a checkpoint that `orbax.checkpoint.StandardCheckpointer` restores as nested dicts.

    Rank 0 has all arrays in its host memory.
    """
    from nbdist.worker.jax.arrays.checkpoint import write

    tree: dict[str, Any] = {}
    for array in arrays:
        values = array.read()
        if writes and values.size:
            _insert(tree, array.name.split("."), values)
    if writes:
        write(folder / "orbax", tree)


def _insert(tree: dict[str, Any], words: Sequence[str], values: np.ndarray) -> None:
    for word in words[:-1]:
        tree = tree.setdefault(word, {})
    tree[words[-1]] = values


def convert_to_saved_model(model: Any, keras_file: Path, folder: Path) -> None:
    """Write a Keras model as a SavedModel, in a process with Keras on TensorFlow.

    The process imports the user's modules with the texts of this rank.

    Args:
        model: Model of Keras on JAX.
        keras_file: `.keras` file of the model.
        folder: Folder for the SavedModel.

    Raises:
        StepError: the model cannot be sent to that process, or loaded or traced there in time.
    """
    imports = pickle.dumps((own_finder.install(), sys.path))
    try:
        own = pickle.dumps(_own_objects(model, keras_file))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StepError(
            f"Keras on TensorFlow cannot import the objects of this model ({error}): define its "
            'layers and functions at the top of a module, or export with format="keras"'
        ) from None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _AS_SAVED_MODEL, str(keras_file), str(folder)],
            env={**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""},
            input=imports + own,
            capture_output=True,
            timeout=_CONVERT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepError(
            f"Keras on TensorFlow did not export this model within {_CONVERT_S} s: export with "
            'format="keras"'
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        named = [line for line in lines if _ERROR.match(line)] or lines[-1:] or ["no message"]
        reason = named[-1].partition(" Full object config")[0][:_MOST_REASON]
        raise StepError(
            f"Keras on TensorFlow cannot export this model ({reason}): compute with keras.ops in "
            "its layers, register its own functions with keras.saving.register_keras_serializable "
            'in a module, or export with format="keras"'
        )


def _own_objects(model: Any, keras_file: Path) -> dict[str, Any]:
    """Return the classes of a model's layers, and registered objects that its file names."""
    import keras

    with zipfile.ZipFile(keras_file) as archive:
        config = archive.read("config.json").decode()
    registered = keras.saving.get_custom_objects()
    kinds = {type(layer) for layer in model._flatten_layers()}
    own = {kind.__name__: kind for kind in kinds if kind.__module__.partition(".")[0] != "keras"}
    return own | {name: value for name, value in registered.items() if f'"{name}"' in config}
