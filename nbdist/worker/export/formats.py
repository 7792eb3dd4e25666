"""File formats of exported models. Each function writes into an existing folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np

    from nbdist.worker.export.named_arrays import NamedArray

SHARD_BYTES = 5 * 10**9
"""Largest part of a model in one file, and so in the memory of rank 0 at once."""


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
