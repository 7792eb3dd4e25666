"""Digests of values and their comparison between four ranks."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from nbdist.errors import AnotherRankError, StepError
from nbdist.worker.checkpoint.digest import (
    WHOLE_BYTES,
    chunks,
    of_array,
    of_arrays,
    of_facts,
    of_keys,
    of_sample,
)
from nbdist.worker.training.replica_guard import NoGuard, RankComparison, guard_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.worker.checkpoint.saver import State

RANKS = 4


def jax_state(holder: Any) -> State:
    """Import JAX late: earlier tests check that the notebook's process does not load it."""
    from nbdist.worker.jax.arrays.checkpoint import JaxState

    return JaxState(holder, ())


@given(
    kind=some.sampled_from(["float64", "float32", "float16", ml_dtypes.bfloat16, "int64", "bool"]),
    shape=some.lists(some.integers(1, 9), max_size=3),
    place=some.integers(0),
)
def test_one_changed_bit_changes_the_digest(kind: str, shape: list[int], place: int) -> None:
    array = np.zeros(shape, kind)
    before = of_array(array)
    assert -(2**31) <= before < 2**31
    octets = array.reshape(-1).view(np.uint8)
    place %= 8 * octets.size
    octets[place // 8] ^= 1 << place % 8
    assert of_array(array) != before
    assert of_arrays([np.ones(3), array]) != of_arrays([np.ones(3), np.zeros(shape, kind)])


def test_object_addresses_do_not_change_the_digest() -> None:
    first, second = (np.array([object(), "a", 1], object) for _ in range(2))
    assert of_array(first) == of_array(second)
    second[1] = "b"
    assert of_array(first) != of_array(second)


@pytest.mark.parametrize("kind", [None, object])
def test_digest_of_texts(kind: type | None) -> None:
    assert of_arrays([np.array(["a", "b"], kind)]) == of_arrays([np.array(["a", "b"], kind)])
    assert of_arrays([np.array(["a", "b"], kind)]) != of_arrays([np.array(["a", "c"], kind)])


def test_digest_of_empty_and_transposed_arrays() -> None:
    assert of_array(np.zeros((0, 3))) == of_array(np.zeros(0)) == of_arrays([]) == 0
    square = np.arange(4.0).reshape(2, 2)
    assert of_array(square.T) == of_array(square.T.copy())


@pytest.mark.parametrize("kind", ["float64", "float16", "int8"])
def test_sample_of_a_large_array_reaches_from_its_first_to_its_last_value(kind: str) -> None:
    array = np.zeros(3 * WHOLE_BYTES, kind)
    parts = chunks(array.size, array.itemsize)
    assert len(parts) == 16
    assert (parts[0].start, parts[-1].stop) == (0, array.size)
    assert all(before.stop <= after.start for before, after in itertools.pairwise(parts))
    assert sum(part.stop - part.start for part in parts) * array.itemsize == WHOLE_BYTES
    sample = of_sample(array[part] for part in parts)
    assert sample == of_array(np.concatenate([array[part] for part in parts]))
    for place in (0, parts[7].start, array.size - 1):
        changed = array.copy()
        changed[place] = 1
        assert of_sample(changed[part] for part in parts) != sample


def test_digest_of_keys_is_independent_of_their_order() -> None:
    groups = {1: [3, 4], 0: [5]}
    assert of_keys(groups) == of_keys({0: (5,), 1: {4, 3}})
    assert of_keys({}) != of_keys(groups) != of_keys({1: [3], 0: [4, 5]})


def test_digests_are_signed_numbers_of_32_bits() -> None:
    numbers = [of_array(np.array(value)) for value in range(64)]
    assert min(numbers) < 0 < max(numbers)
    assert np.array(numbers, np.int32).tolist() == numbers
    assert of_array(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926 - 2**32  # CRC-32's check


class Facts:
    """State of a rank, as facts."""

    def __init__(self, **facts: object) -> None:
        self._facts = facts

    def saved(self) -> dict[str, object]:
        return {}

    def take(self, arrays: dict[str, np.ndarray]) -> None: ...

    def alike(self) -> Iterator[tuple[str, object]]:
        yield from ()

    def facts(self) -> dict[str, object]:
        return self._facts


def exceptions_by_rank(states: list[tuple[int, Facts]]) -> list[Exception | None]:
    """Return the exception that each rank raises for its step and facts, or None."""
    barrier = threading.Barrier(RANKS)
    rows: list[np.ndarray] = [np.zeros(0)] * RANKS
    raised: list[Exception | None] = [None] * RANKS

    def compare_on_rank(rank: int) -> None:
        def gather(numbers: np.ndarray) -> np.ndarray:
            rows[rank] = numbers
            barrier.wait(10)
            gathered = np.stack(rows)
            barrier.wait(10)
            return gathered

        step, facts = states[rank]
        try:
            RankComparison(100, rank, gather).compare(step, lambda: jax_state(facts))
        except StepError as error:
            raised[rank] = error

    threads = [threading.Thread(target=compare_on_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_equal_ranks_raise_nothing() -> None:
    assert exceptions_by_rank([(100, Facts(a=1, b="x"))] * RANKS) == [None] * RANKS


@pytest.mark.parametrize(
    ("states", "differing", "message"),
    [
        (
            [(8, Facts(a=1, b=2)), (8, Facts(a=1, b=3)), *[(8, Facts(a=1, b=2))] * 2],
            1,
            "rank 1 has a different `b` than rank 0 after step 8.",
        ),
        (
            [(8, Facts(a=2, b=3, c=1)), *[(8, Facts(a=1, b=2, c=1))] * 3],
            0,
            "rank 0 has a different `a` (and 1 more of 3 differ) than rank 1 after step 8.",
        ),
        (
            [(8, Facts(a=1)), (8, Facts(a=2)), (8, Facts(a=1)), (8, Facts(a=2))],
            1,
            "ranks 1, 3 have a different `a` than rank 0 after step 8.",
        ),
        (
            [(8, Facts(a=1)), (8, Facts(a=1)), (9, Facts(a=1)), (8, Facts(a=1))],
            2,
            "rank 2 has a different number of steps than rank 0 after step 9.",
        ),
        (
            [*[(8, Facts(a=1))] * 3, (8, Facts(a=1, b=1))],
            3,
            "rank 3 has a different number of variables than rank 0 after step 8.",
        ),
    ],
)
def test_rank_that_differs_from_most_is_named(
    states: list[tuple[int, Facts]], differing: int, message: str
) -> None:
    raised = exceptions_by_rank(states)
    assert {type(raised[rank]) for rank in range(RANKS) if rank != differing} == {AnotherRankError}
    assert type(raised[differing]) is StepError
    assert str(raised[differing]).startswith(message)


def test_ranks_are_compared_at_regular_steps() -> None:
    guard = RankComparison(10, 0, lambda numbers: numbers[None])
    due = []
    for step in range(31):
        if guard.due(step):
            due.append(step)
            guard.compare(step, lambda: jax_state(Facts(a=1)))
    assert due == [1, 10, 20, 30]


def test_ranks_are_compared_after_the_first_step_past_the_interval() -> None:
    """Several steps of one execution pass the step at which the comparison is due."""
    guard = RankComparison(10, 0, lambda numbers: numbers[None])
    guard.compare(8, lambda: jax_state(Facts(a=1)))
    assert [guard.due(step) for step in (8, 16, 24)] == [False, True, True]


@pytest.mark.parametrize(
    ("guard", "world_size", "steps"), [(0, 4, []), (5, 1, []), (5, 2, [1, 5, 10])]
)
def test_ranks_of_a_cell_are_compared_as_the_option_requests(
    guard: int, world_size: int, steps: list[int]
) -> None:
    """A cell with `--guard 0` and a single rank compare nothing, and gather nothing."""
    gathered: list[np.ndarray] = []

    def gather(numbers: np.ndarray) -> np.ndarray:
        gathered.append(numbers)
        return numbers[None]

    options = SimpleNamespace(guard=guard)
    worker: Any = SimpleNamespace(
        request=SimpleNamespace(options=options), world_size=world_size, rank=0
    )
    made = guard_of(worker, lambda: gather)
    assert isinstance(made, NoGuard if not steps else RankComparison)
    due = []
    for step in range(12):
        if made.due(step):
            due.append(step)
            made.compare(step, lambda: jax_state(Facts(a=1)))
    assert due == steps == [numbers[0] for numbers in gathered]


def test_digests_of_facts_depend_on_value_and_type() -> None:
    numbers = [next(iter(of_facts({"a": value}))).number for value in (1, 1.0, True, "1", None)]
    assert len(set(numbers)) == 5
