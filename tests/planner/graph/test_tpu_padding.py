"""Padded size of images in a TPU's memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.optimizer_state import states_of
from nbdist.planner.graph.tpu_padding import images_of, padded
from tests.plan_models import traced

KERNELS = [jax.ShapeDtypeStruct((3, 3, 3, 64), jnp.float32)]
KERNELS += [jax.ShapeDtypeStruct((3, 3, 64, 256), jnp.float32)]


def convolved(carried: Any, _: Any, batch: Any) -> Any:
    x = batch[0]
    for kernel in carried:
        numbers = "NHWC", "HWIO", "NHWC"
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x)
    return carried, x.mean()


def sharded(rows: int, layout: Layout) -> ShardedModel:
    images = jax.ShapeDtypeStruct((rows, 32, 32, 3), jnp.float32)
    model = traced(convolved, KERNELS, batch=(images,))
    return ShardedModel(model, layout, states_of(model))


@pytest.mark.parametrize(
    ("size", "times"), [(128, 1), (256, 1), (64, 2), (192, 4 / 3), (1, 128), (3, 128 / 3)]
)
def test_dimension_is_padded_to_whole_lanes(size: int, times: float) -> None:
    assert padded(size) == pytest.approx(times)


@pytest.mark.parametrize(
    ("rows", "layout", "times"),
    [
        (128, Layout(1, 1), (1, 1, 1)),  # the lanes hold the batch
        (128, Layout(4, 1), (4, 2, 1)),  # 32 images: the lanes hold channels, but of the first
        (96, Layout(1, 1), (4 / 3, 4 / 3, 1)),
        (64, Layout(2, 1), (4, 2, 1)),
    ],
    ids=str,
)
def test_images_get_the_least_padding(rows: int, layout: Layout, times: tuple[float, ...]) -> None:
    """Test images of 3, 64 and 256 channels."""
    plain = sharded(rows, layout)
    made = [op.outs[0] for op in plain.model.every_op if op.kind == "conv"]
    (given,) = [t.value for t in plain.model.tensors if t.role == "batch"]
    for value, wanted in zip((given, *made), times, strict=True):
        assert plain.on_tpus.bytes_of(value) == pytest.approx(wanted * plain.bytes_of(value))
    kernels = [t.value for t in plain.model.tensors if t.role == "carried"]
    assert all(plain.on_tpus.bytes_of(k) == plain.bytes_of(k) for k in kernels)


def test_values_outside_convolutions_are_no_images() -> None:
    shapes = [jax.ShapeDtypeStruct((3, 5), jnp.float32)]
    batch = (jax.ShapeDtypeStruct((4, 3), jnp.float32),)
    model = traced(lambda c, _, given: (c, (given[0] @ c[0]).mean()), shapes, batch=batch)
    assert not images_of(model)
