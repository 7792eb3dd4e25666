"""Order of devices. Tests have no real TPU: `jax.devices()` has these attributes there."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest

from nbdist.worker.jax.runtime.platforms import by_process
from tests.parallel.placement.test_meshes import Tpu


def tpus(shape: tuple[int, int, int], host: tuple[int, int, int], slices: int) -> list[Any]:
    """Return the TPUs of slices whose hosts have boxes of chips."""
    hosts = list(itertools.product(*(range(n // m) for n, m in zip(shape, host, strict=True))))
    coords = itertools.product(range(slices), *map(range, shape))
    return [
        Tpu(
            id=number,
            coords=(x, y, z),
            process_index=len(hosts) * index
            + hosts.index((x // host[0], y // host[1], z // host[2])),
            slice_index=index,
        )
        for number, (index, x, y, z) in enumerate(coords)
    ]


@pytest.mark.parametrize(
    ("shape", "host"),
    [
        ((4, 4, 1), (2, 2, 1)),
        ((4, 4, 4), (2, 2, 1)),
        ((2, 4, 1), (2, 4, 1)),
        ((4, 4, 4), (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_tpus_of_a_process_are_consecutive_neighbours(
    shape: tuple[int, int, int], host: tuple[int, int, int], slices: int
) -> None:
    ordered = by_process(tpus(shape, host, slices))
    processes = [device.process_index for device in ordered]
    assert processes == sorted(processes)
    for first, second in pairwise(ordered):
        if first.process_index == second.process_index:
            assert np.abs(np.subtract(first.coords, second.coords)).sum() == 1


def test_cores_of_a_chip_are_next_to_each_other() -> None:
    cores: list[Any] = [
        Tpu(number, (number // 2 % 2, number // 4, 0), 0, 0, core_on_chip=number % 2)
        for number in range(8)
    ]
    assert [device.id for device in by_process(cores)] == [0, 1, 2, 3, 6, 7, 4, 5]


def test_other_devices_keep_their_order() -> None:
    assert by_process(jax.devices()[::-1]) == jax.devices()
