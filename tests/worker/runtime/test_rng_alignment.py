"""States of the global random generators, moved from one rank to another."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.worker.runtime.rng_alignment import States, restore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Restore the generators after a test."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    random.seed(1)
    np.random.seed(1)
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw() -> list[float]:
    return [random.random(), random.gauss(), np.random.random(), np.random.normal()]


def test_restored_generators_draw_the_same_numbers() -> None:
    draw()  # both libraries draw two normal values at once and keep the second
    packed = States.now().packed()
    expected = [draw(), draw()]
    random.seed(2)
    np.random.seed(2)
    restore(packed)
    assert [draw(), draw()] == expected


def test_digests_name_the_generator_that_differs() -> None:
    before = States.now().digests()
    assert States.now().digests() == before
    random.random()
    after_python = States.now().digests()
    assert after_python["random"] != before["random"]
    assert after_python["NumPy"] == before["NumPy"]
    np.random.random()
    after_numpy = States.now().digests()
    assert after_numpy["random"] == after_python["random"]
    assert after_numpy["NumPy"] != before["NumPy"]


def test_value_drawn_in_advance_is_part_of_the_digest() -> None:
    random.gauss()
    with_value = States.now().digests()["random"]
    state = random.getstate()
    random.setstate((*state[:2], None))
    assert States.now().digests()["random"] != with_value


def test_other_kind_of_generator_is_left_alone() -> None:
    packed = States.now().packed()
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        assert "NumPy" not in States.now().digests()
        random.seed(2)
        restore(packed)
        assert np.random.get_bit_generator().state == np.random.PCG64(5).state
    finally:
        np.random.set_bit_generator(usual)


def test_generator_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(1)
    states = States.now()
    expected = torch.rand(2).tolist()
    other = States.now().digests()
    assert {name for name, own in states.digests().items() if own != other[name]} == {"PyTorch"}
    restore(states.packed())
    assert torch.rand(2).tolist() == expected
