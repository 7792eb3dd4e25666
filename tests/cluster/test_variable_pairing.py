"""Pairing the variables of ranks after a cancelled collective, without engines."""

from __future__ import annotations

from nbdist.cluster.variable_pairing import agree, pair
from nbdist.records import SeenOptimizer, SeenVariable, Survey


def seen(kind: str, digest: int = 0, shape: tuple[int, ...] = ()) -> SeenVariable:
    return SeenVariable(kind=kind, shape=shape, digest=digest)


def survey(
    *variables: SeenVariable, within: bool = False, optimizers: tuple[SeenOptimizer, ...] = ()
) -> Survey:
    return Survey(
        next_key=1, is_between_steps=not within, variables=variables, optimizers=optimizers
    )


def test_equal_lists_are_paired_by_position() -> None:
    own = [seen("kernel", 1), seen("kernel", 2)]
    assert pair([seen("kernel", 3), seen("kernel", 4)], own) == {0: 0, 1: 1}


def test_a_variable_of_only_one_rank_has_no_partner() -> None:
    """Check an additional variable at the end and one between others."""
    known = [seen("kernel", 1), seen("bias", 2), seen("kernel", 3)]
    assert pair(known, known[:2]) == {0: 0, 1: 1}
    assert pair(known, [known[0], known[2]]) == {0: 0, 2: 1}
    assert pair(known[:2], known) == {0: 0, 1: 1}


def test_variables_of_equal_kind_are_not_paired_by_guess() -> None:
    """The other rank has deleted one of two variables. The value of its remaining one differs."""
    assert pair([seen("kernel", 1), seen("kernel", 2)], [seen("kernel", 3)]) == {}


def test_ranks_copy_values_of_a_rank_between_steps() -> None:
    first, second = agree(
        [survey(seen("seed", 2), seen("x", 5), within=True), survey(seen("seed", 1), seen("x", 5))]
    )
    assert first.source == second.source == 1
    assert [copied.own for copied in first.copied] == [0]
    assert [copied.kind for copied in second.copied] == ["seed"]
    assert not first.alone
    assert not second.alone


def test_a_rank_without_a_variable_takes_part_in_the_copy() -> None:
    known = survey(seen("seed", 2), seen("left", 7))
    agreements = agree([known, survey(seen("seed", 2), seen("left", 8)), survey(seen("seed", 2))])
    assert [[copied.own for copied in one.copied] for one in agreements] == [[1], [1], [-1]]
    assert [one.alone for one in agreements] == [(1,), (1,), ()]


def test_an_optimizer_built_on_one_rank_only_is_found() -> None:
    variables = seen("adam/iteration"), seen("sgd/iteration")
    whole = SeenOptimizer(variable=1, built=4)
    ours = survey(*variables, optimizers=(SeenOptimizer(variable=0, built=10), whole))
    theirs = survey(*variables, optimizers=(SeenOptimizer(variable=0, built=0), whole))
    assert [one.unbuilt for one in agree([ours, theirs])] == [(0,), (0,)]
    assert [one.unbuilt for one in agree([ours, ours])] == [(), ()]
