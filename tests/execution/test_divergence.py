"""Values that should be equal on all ranks."""

from __future__ import annotations

import pytest

from nbdist.execution.divergence import different_modules, drifted
from nbdist.records import CellEnded, Replicated, StrategyName
from tests.execution.doubles import ended, failure, request

SOURCE = "# %%dist_run\nkey = %pwd\nparams = {}\nparams = {1: 2}\n"


def digest(name: str, number: int, *, changed: bool = True, **parts: int) -> Replicated:
    return Replicated(name=name, number=number, changed=changed, parts=parts)


def of_ranks(*values: tuple[Replicated, ...]) -> dict[int, CellEnded]:
    """Return the ends of the ranks, the last rank first."""
    ends = {rank: ended(rank, replicated=own) for rank, own in enumerate(values)}
    return dict(reversed(ends.items()))


def message(
    ends: dict[int, CellEnded], source: str = SOURCE, strategy: StrategyName = "pjrt"
) -> str:
    found = drifted(request(source, strategy), ends)
    assert found is not None
    assert found.failure is not None
    assert found.failure.same == found.failure.evalue
    return found.failure.evalue


def test_the_first_rank_that_differs_fails() -> None:
    a, b = (digest("params", 1),), (digest("params", 2),)
    found = drifted(request(SOURCE, "pjrt"), of_ranks(a, a, b, a, b))
    assert found is not None
    assert (found.rank, found.status) == (2, "error")
    assert found.failure is not None
    assert found.failure.ename == "StepError"
    assert "`params` (line 3). Ranks 2,4 differ from rank 0. " in found.failure.evalue


def test_one_of_two_ranks_differs_from_the_chief() -> None:
    ends = of_ranks((digest("w", 1),), (digest("w", 2),))
    assert ": `w`. Rank 1 differs from rank 0. Usual causes" in message(ends)


@pytest.mark.parametrize(
    ("strategy", "expected", "advice"),
    [
        ("pjrt", "but JAX treats them as replicated", "jax.random.key(0)"),
        ("mirrored", "but TensorFlow treats them as mirrored", "BatchNormalization"),
    ],
)
def test_the_message_depends_on_the_strategy(
    strategy: StrategyName, expected: str, advice: str
) -> None:
    text = message(of_ranks((digest("w", 1),), (digest("w", 2),)), strategy=strategy)
    assert text.startswith(f"values differ between ranks, {expected}: `w`")
    assert advice in text
    assert text.endswith("Use --guard 0 to skip the comparison")


def test_equal_values_are_no_failure() -> None:
    same = (digest("w", 1),)
    assert drifted(request(SOURCE, "pjrt"), of_ranks(same, same)) is None
    assert drifted(request(SOURCE, "pjrt"), {}) is None


def test_older_differences_are_not_reported_again() -> None:
    old = of_ranks((digest("w", 1, changed=False),), (digest("w", 2, changed=False),))
    assert drifted(request(SOURCE, "pjrt"), old) is None
    changed = of_ranks((digest("w", 1, changed=False),), (digest("w", 2),))
    assert drifted(request(SOURCE, "pjrt"), changed) is not None


def test_nothing_is_compared_without_a_strategy_or_after_a_failure() -> None:
    ends = of_ranks((digest("w", 1),), (digest("w", 2),))
    assert drifted(request(SOURCE, None), ends) is None
    ends[2] = ended(2, "error", failure())
    assert drifted(request(SOURCE, "pjrt"), ends) is None


def test_differing_paths_are_named_by_position() -> None:
    """Use the paths of the first rank: numbers in names may differ between ranks."""
    ends = of_ranks(
        (digest("w", 1, dense_1=5, dense_2=6),), (digest("w", 2, dense_3=5, dense_4=7),)
    )
    assert ": `dense_2`. Rank 1 differs" in message(ends)


def test_different_numbers_of_paths_name_the_value() -> None:
    ends = of_ranks((digest("key", 1, a=1),), (digest("key", 2, a=1, b=2),))
    assert ": `key` (line 2). Rank" in message(ends)


def test_at_most_five_paths_are_listed() -> None:
    def values(number: int, count: int) -> tuple[Replicated, ...]:
        return tuple(digest(f"v{i}", number) for i in range(count))

    assert "`v0`, `v1`, `v2`, `v3`, `v4`. Rank" in message(of_ranks(values(1, 5), values(2, 5)))
    assert "`v3`, `v4` and 2 more. Rank" in message(of_ranks(values(1, 7), values(2, 7)))


def test_modules_that_differ_are_named_with_their_ranks() -> None:
    same, other = {"a": "1", "b.c": "2"}, {"a": "1", "b.c": "3"}
    ends = {rank: ended(rank, disk_modules=own) for rank, own in enumerate([same, other, same])}
    found = different_modules(ends)
    assert found is not None
    assert (found.rank, found.status) == (1, "error")
    assert found.failure is not None
    assert "`b.c` of rank 1 differs from that of rank 0. Put" in found.failure.evalue
    ends[1] = ended(1, disk_modules={"only": "5"})
    assert different_modules(ends) is None
