"""What the user has to know after cancelled collectives were restored, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nbdist.records import Restored

    Places = Callable[[Iterable[str]], str]


def told_of(ranks: Sequence[Restored], source: int, places: Places) -> list[str]:
    """Describe changed values, variables of some ranks only, and iterators.

    Args:
        ranks: what each rank has found.
        source: the rank whose values all have now.
        places: gives the cells that have bound names, as in `[3]`; empty if there are none.
    """
    told = []
    changed = sorted({name for restored in ranks for name in restored.changed})
    if changed:
        told.append(
            f"{_quoted(changed)} set to the values of rank {source}, as another rank was within a "
            "step"
        )
    for number, restored in enumerate(ranks):
        if restored.alone:
            told.append(
                f"only rank {formatting.ranks([number])} has all variables of "
                f"{_quoted(restored.alone)}: {_rerun(restored.alone, places)}"
            )
    iterators = sorted({name for restored in ranks for name in restored.iterators})
    if iterators:
        told.append(
            f"iterators may be at another element on each rank ({_quoted(iterators)}): "
            f"{_rerun(iterators, places)}"
        )
    return told


def _rerun(names: Iterable[str], places: Places) -> str:
    cells = places(names)
    return f"run {f'cell {cells}' if cells else 'the cell that creates them'} again"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
