"""Pairing of TensorFlow variables across ranks after a cancelled collective.

A rank that waited in a collective may have executed part of a step. A rank may have created
variables that another rank has not. nbdist pairs variables by order of creation, name, type and
shape.
"""

from __future__ import annotations

from collections import defaultdict
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from nbdist.records import Agreement, CopiedVariable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.records import SeenVariable, Survey

    Pairs = dict[int, int]


def agree(surveys: Sequence[Survey]) -> tuple[Agreement, ...]:
    """Return the changes that give all ranks the same variables.

    All ranks take the values of the first rank that was between two steps. A rank that was in a
    collective may have executed part of a step.

    Args:
        surveys: the surveys of all ranks, in rank order.

    Returns:
        The changes of each rank, in rank order.
    """
    source = next((rank for rank, survey in enumerate(surveys) if survey.is_between_steps), 0)
    known = surveys[source].variables
    pairs = [pair(known, survey.variables) for survey in surveys]
    copied = [i for i in range(len(known)) if _differs(i, surveys, pairs)]
    everywhere = set(range(len(known))).intersection(*pairs)
    halves = set(_half_built(source, surveys, pairs))
    return tuple(
        Agreement(
            source=source,
            copied=tuple(
                CopiedVariable(own=own.get(i, -1), kind=known[i].kind, shape=known[i].shape)
                for i in copied
            ),
            alone=tuple(sorted({*range(len(survey.variables))} - {own[i] for i in everywhere})),
            unbuilt=tuple(
                number
                for number, optimizer in enumerate(survey.optimizers)
                if optimizer.variable in {own.get(i) for i in halves}
            ),
        )
        for survey, own in zip(surveys, pairs, strict=True)
    )


def pair(known: Sequence[SeenVariable], own: Sequence[SeenVariable]) -> Pairs:
    """Pair the variables of two ranks.

    Returns:
        Positions in `own` by positions in `known`. Variables without a partner are left out.
    """
    kinds, own_kinds = ([(v.kind, v.shape) for v in variables] for variables in (known, own))
    if kinds == own_kinds:
        return dict(zip(range(len(known)), range(len(own)), strict=True))
    pairs: Pairs = {}
    matcher = SequenceMatcher(None, list(map(repr, known)), list(map(repr, own)), autojunk=False)
    for tag, start, end, own_start, own_end in matcher.get_opcodes():
        if tag == "equal":
            pairs.update(zip(range(start, end), range(own_start, own_end), strict=True))
        else:
            ours = _by_kind(own_kinds, range(own_start, own_end))
            for kind, positions in _by_kind(kinds, range(start, end)).items():
                if len(positions) == len(ours[kind]):
                    pairs.update(zip(positions, ours[kind], strict=True))
    return pairs


def _by_kind(kinds: Sequence[object], positions: Iterable[int]) -> Mapping[object, list[int]]:
    found: dict[object, list[int]] = defaultdict(list)
    for position in positions:
        found[kinds[position]].append(position)
    return found


def _differs(position: int, surveys: Sequence[Survey], pairs: Sequence[Pairs]) -> bool:
    digests = {
        survey.variables[own[position]].digest
        for survey, own in zip(surveys, pairs, strict=True)
        if position in own
    }
    return len(digests) > 1


def _half_built(source: int, surveys: Sequence[Survey], pairs: Sequence[Pairs]) -> Iterable[int]:
    """Yield the position of `iterations` of each optimizer that not all ranks have built."""
    built: list[dict[int, int]] = [
        {optimizer.variable: optimizer.built for optimizer in survey.optimizers}
        for survey in surveys
    ]
    for position in built[source]:
        owns = [own.get(position, -1) for own in pairs]
        if len({of.get(own, 0) for of, own in zip(built, owns, strict=True)}) > 1:
            yield position
