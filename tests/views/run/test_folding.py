from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from nbdist.views.run.folding import Folder

LINES = st.lists(st.sampled_from("abc"), max_size=12)


def fold(lines_by_rank: dict[int, list[str]]) -> list[tuple[tuple[int, ...], str]]:
    folder: Folder[str] = Folder(lines_by_rank, wait_s=60)
    for rank, lines in lines_by_rank.items():
        for line in lines:
            folder.add(rank, line)
    return [(folded.ranks, folded.item) for folded in folder.take(everything=True)]


def test_equal_lines_of_all_ranks_are_shown_once() -> None:
    assert fold({0: ["a", "b"], 1: ["a", "b"]}) == [((0, 1), "a"), ((0, 1), "b")]


def test_a_line_of_one_rank_does_not_split_the_others() -> None:
    assert fold({0: ["saving", "done"], 1: ["done"], 2: ["done"]}) == [
        ((0,), "saving"),
        ((0, 1, 2), "done"),
    ]


def test_lines_at_the_same_position_stay_together() -> None:
    lines_by_rank = {0: ["a0", "b0"], 1: ["a1", "b1"]}
    assert [line for _, line in fold(lines_by_rank)] == ["a0", "a1", "b0", "b1"]


def test_a_line_waits_for_ranks_that_may_print_the_same() -> None:
    folder: Folder[str] = Folder([0, 1], wait_s=60)
    folder.add(0, "a")
    assert list(folder.take()) == []
    folder.add(1, "a")
    assert [folded.ranks for folded in folder.take()] == [(0, 1)]


def test_a_line_waits_for_ranks_that_print_another_line_first() -> None:
    folder: Folder[str] = Folder([0, 1], wait_s=60)
    folder.add(0, "a")
    folder.add(1, "saving")
    assert list(folder.take()) == []
    folder.add(1, "a")
    shown = [(folded.ranks, folded.item) for folded in folder.take(everything=True)]
    assert shown == [((1,), "saving"), ((0, 1), "a")]


def test_a_silent_rank_delays_others_for_a_limited_time() -> None:
    folder: Folder[str] = Folder([0, 1], wait_s=0)
    folder.add(0, "a")
    assert [folded.ranks for folded in folder.take()] == [(0,)]


@given(st.dictionaries(st.integers(0, 4), LINES, min_size=1))
def test_each_rank_keeps_its_lines_in_order(lines_by_rank: dict[int, list[str]]) -> None:
    shown: dict[int, list[str]] = defaultdict(list)
    for ranks, line in fold(lines_by_rank):
        for rank in ranks:
            shown[rank].append(line)
    assert {rank: lines for rank, lines in lines_by_rank.items() if lines} == dict(shown)


@given(LINES, st.integers(2, 5))
def test_equal_ranks_use_the_lines_of_one(lines: list[str], ranks: int) -> None:
    assert len(fold(dict.fromkeys(range(ranks), lines))) == len(lines)
