"""Functions of users that make a batch of samples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.worker.data.collation import stacks


def as_arrays(batch: Any) -> Any:
    """Stack samples as a former tutorial of JAX does."""
    if isinstance(batch[0], np.ndarray):
        return np.stack(batch)
    elif isinstance(batch[0], (tuple, list)):  # noqa: RET505 - as in the tutorial
        transposed = zip(*batch)  # noqa: B905
        return [as_arrays(samples) for samples in transposed]
    else:
        return np.array(batch)


def of_parts(batch: Any) -> Any:
    transposed_data = list(zip(*batch))  # noqa: B905
    labels = np.array(transposed_data[1], dtype=np.float32)
    images = np.array(transposed_data[0])
    return images, labels


def of_names(samples: Any) -> Any:
    return {
        "x": np.stack([np.asarray(sample["x"]) for sample in samples]),
        "y": jnp.asarray([sample["y"] for sample in samples]),
    }


def as_columns(batch: Any) -> Any:
    xs, ys = zip(*batch)  # noqa: B905
    return jax.tree.map(np.asarray, (np.stack(xs), jnp.array(ys)))


def centered(batch: Any) -> Any:
    x = np.stack(batch)
    return x - x.mean(0)


def padded(batch: Any) -> Any:
    longest = max(map(len, batch))
    return np.stack([np.pad(row, (0, longest - len(row))) for row in batch])


def of_one_sample(batch: Any) -> Any:
    return np.array(batch[0])


def stacked_on_another_axis(batch: Any) -> Any:
    return np.stack(batch, axis=1)


def array_of_tuples(batch: Any) -> Any:
    xs, ys = zip(*batch)  # noqa: B905
    return np.array((np.stack(xs), np.stack(ys)))


def some_samples(batch: Any) -> Any:
    return np.stack([row for row in batch if row.any()])


def by_size(batch: Any) -> Any:
    if len(batch) > 3:
        return np.stack(batch)
    return np.array(batch)


def changing(batch: Any) -> Any:
    batch.sort()
    return np.stack(batch)


class Callable:
    def __call__(self, batch: Any) -> Any:
        return np.stack(batch)


ROWS = [as_arrays, of_parts, of_names, as_columns, lambda batch: np.stack(batch)]  # noqa: PLW0108
OTHERS = [
    *(centered, padded, of_one_sample, stacked_on_another_axis, array_of_tuples, some_samples),
    *(by_size, changing, Callable(), np.stack, lambda batch: batch),
]


@pytest.mark.parametrize("function", ROWS)
def test_functions_that_stack_samples(function: Any) -> None:
    assert stacks(function)


@pytest.mark.parametrize("function", OTHERS)
def test_other_functions(function: Any) -> None:
    assert not stacks(function)


def test_functions_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    default_collate = torch.utils.data.default_collate

    def as_numpy(batch: Any) -> Any:
        """Convert the batch of PyTorch as a tutorial of JAX does."""
        return jax.tree_util.tree_map(np.asarray, default_collate(batch))

    def by_method(batch: Any) -> Any:
        return jax.tree.map(lambda tensor: tensor.numpy(), torch.utils.data.default_collate(batch))

    def joined(batch: Any) -> Any:
        return np.asarray(default_collate(batch))

    assert stacks(as_numpy)
    assert stacks(by_method)
    assert not stacks(joined)
