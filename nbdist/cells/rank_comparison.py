"""Comparison of the reports of all ranks about a cell, in the notebook and in exported programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from nbdist.utils.listing import listed
from nbdist.utils.rank_ranges import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.records import Replicated, StrategyName

_MOST_NAMES = 5
_ADVICE: dict[StrategyName, str] = {
    "pjrt": (
        "Usual causes: a key from the clock (jax.random.key(time.time_ns())), random.Random() "
        "without a seed, a condition on the rank. Use a constant seed, as in jax.random.key(0), "
        "or the generators of NumPy, which nbdist seeds. Keep values of one rank in NumPy, or on "
        "a device of that rank: jax.device_put(x, jax.local_devices()[0]). Use --guard 0 to skip "
        "the comparison"
    ),
    "mirrored": (
        "Usual causes: random.Random() without a seed, an update on some ranks only (a condition "
        "on the rank), moving means that each replica updates in strategy.run. Use a constant "
        "seed, or the generators of NumPy, which nbdist seeds. Run updates on all ranks. Use "
        "BatchNormalization(synchronized=True) in strategy.run. Keep values of one rank in NumPy, "
        "or in tf.Variable(..., trainable=False). On GPUs, call "
        "tf.config.experimental.enable_op_determinism(). Use --guard 0 to skip the comparison"
    ),
}
_EXPECTED: dict[StrategyName, str] = {
    "pjrt": "but JAX treats them as replicated",
    "mirrored": "but TensorFlow treats them as mirrored",
}


class DifferentValues(NamedTuple):
    """Values that differ between ranks.

    Attributes:
        rank: the first rank that differs from most.
        text: message with the values and the remedy.
    """

    rank: int
    text: str


def differing_values(
    strategy: StrategyName,
    replicated: Mapping[int, Sequence[Replicated]],
    lines: Callable[[], Mapping[str, int]],
) -> DifferentValues | None:
    """Compare the values that must be equal on all ranks after a cell.

    Args:
        strategy: strategy of the cell.
        replicated: digests of the values of each rank.
        lines: returns the first line that binds each name of the cell.

    Returns:
        The difference; None if all values are equal, or if the cell changed none that differs.
    """
    found: dict[str, dict[int, Replicated]] = {}
    for rank, own in sorted(replicated.items()):
        for each in own:
            found.setdefault(each.name, {})[rank] = each
    differing = {name: of_ranks for name, of_ranks in found.items() if _differ(of_ranks)}
    if not differing:
        return None
    first = next(iter(differing.values()))
    odd, usual = parted({rank: each.number for rank, each in first.items()})
    return DifferentValues(odd[0], _text(strategy, _named(lines(), differing), odd, usual))


def differing_generators(digests: Mapping[int, Mapping[str, int]]) -> str:
    """Compare the states of the random generators with those of rank 0.

    Args:
        digests: digest of each generator of each rank, by its library.

    Returns:
        A message; empty if all ranks have the states of rank 0.
    """
    chief = digests[0]
    odd = sorted(rank for rank, own in digests.items() if own != chief)
    names = sorted({n for r in odd for n in chief if digests[r].get(n, chief[n]) != chief[n]})
    if not names:
        return ""
    return (
        f"rank {ranks(odd)} drew other random numbers than rank 0 ({', '.join(names)}). All ranks "
        "continue from rank 0's generators. For different numbers on each rank, use a generator "
        "per rank: np.random.default_rng(rank)"
    )


def _differ(of_ranks: Mapping[int, Replicated]) -> bool:
    """Return True if values differ and this cell changed one. Older differences were reported."""
    changed = any(each.changed for each in of_ranks.values())
    return changed and len({each.number for each in of_ranks.values()}) > 1


def _named(
    lines: Mapping[str, int], differing: Mapping[str, Mapping[int, Replicated]]
) -> list[str]:
    """Return the paths whose values differ, each with the line that binds its name."""
    named = dict.fromkeys(
        f"`{path}`" + (f" (line {lines[name]})" if name in lines else "")
        for name, of_ranks in differing.items()
        for path in _paths(name, of_ranks)
    )
    return list(named)


def _text(strategy: StrategyName, paths: list[str], odd: list[int], usual: int) -> str:
    who = f"Rank {ranks(odd)} differs" if len(odd) == 1 else f"Ranks {ranks(odd)} differ"
    return (
        f"values differ between ranks, {_EXPECTED[strategy]}: "
        f"{listed(paths, _MOST_NAMES)}. {who} from rank {usual}. {_ADVICE[strategy]}"
    )


def _paths(name: str, of_ranks: Mapping[int, Replicated]) -> list[str]:
    """Return the paths under a name whose values differ.

    Values are matched by position: libraries number their objects in paths, and the numbers may
    differ between ranks. If the ranks report different numbers of paths, the name itself is
    returned.
    """
    first, *others = (each.parts for each in of_ranks.values())
    if not first or any(len(parts) != len(first) for parts in others):
        return [name]
    columns = zip(*(parts.values() for parts in (first, *others)), strict=True)
    return [path for path, column in zip(first, columns, strict=True) if len(set(column)) > 1]


def parted(numbers: Mapping[int, int] | Mapping[int, str]) -> tuple[list[int], int]:
    """Return the ranks that differ from the most frequent values, and the first other rank."""
    (most, _), *_ = Counter(numbers.values()).most_common(1)
    odd = [rank for rank, number in numbers.items() if number != most]
    return odd, next(rank for rank, number in numbers.items() if number == most)
