"""Timelines with a limited number of spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from nbdist.records import HOST_COPIES, Lane
from nbdist.utils.timelines import SEVERAL, Busy, spans_of, timeline_of

if TYPE_CHECKING:
    from nbdist.records import LaneKind

BEGAN_S = 1.8e9


def busy(
    begin_ms: float,
    end_ms: float,
    name: str = "dot",
    kind: LaneKind = "compute",
    device: int = 0,
    rank: int = 0,
) -> Busy:
    return Busy(rank, device, kind, BEGAN_S + begin_ms / 1e3, BEGAN_S + end_ms / 1e3, name)


def test_lanes_are_ordered_and_count_from_the_first_span() -> None:
    timeline = timeline_of(
        [
            busy(5, 7, "all-reduce", kind="collective"),
            busy(3, 4, "tanh"),
            busy(1, 2),
            busy(2, 3, "wait", kind="input", device=HOST_COPIES),
            busy(1, 9, rank=1),
        ],
        most=100,
    )
    assert abs(timeline.began_s - BEGAN_S - 0.001) < 1e-6
    assert [(lane.rank, lane.device, lane.kind) for lane in timeline.lanes] == [
        (0, HOST_COPIES, "input"),
        (0, 0, "collective"),
        (0, 0, "compute"),
        (1, 0, "compute"),
    ]
    compute = timeline.lanes[2]
    assert (compute.gaps_us, compute.lengths_us) == ((0, 1000), (1000, 1000))
    assert [timeline.names[name] for name in compute.names] == ["dot", "tanh"]
    assert timeline.end_us == 8000


def test_spans_that_overlap_are_one_span() -> None:
    (lane,) = timeline_of([busy(1, 4), busy(2, 3, "tanh"), busy(6, 7)], most=100).lanes
    assert (lane.gaps_us, lane.lengths_us) == ((0, 2000), (3000, 1000))
    timeline = timeline_of([busy(1, 4), busy(2, 3, "tanh")], most=100)
    assert timeline.names == (SEVERAL,)


def test_spans_with_short_gaps_are_joined_until_they_are_few() -> None:
    spans = [busy(10 * i + j, 10 * i + j + 0.9) for i in range(10) for j in range(3)]
    (lane,) = timeline_of(spans, most=10).lanes
    assert len(lane.gaps_us) == 10
    assert set(lane.gaps_us[1:]) == {7100}
    assert set(lane.lengths_us) == {2900}


def test_timeline_without_spans_has_no_lanes() -> None:
    assert timeline_of([], most=10).lanes == ()
    assert timeline_of([], most=10).end_us == 0


SPANS = st.lists(
    st.tuples(st.floats(0, 1000), st.floats(0, 10), st.sampled_from("ab"), st.integers(0, 2)),
    max_size=60,
)


@given(SPANS, st.integers(1, 20))
def test_joined_spans_cover_the_same_time_and_survive_a_second_pass(
    drawn: list[tuple[float, float, str, int]], most: int
) -> None:
    spans = [busy(at, at + long, name, device=device) for at, long, name, device in drawn]
    timeline = timeline_of(spans, most)
    assert sum(len(lane.names) for lane in timeline.lanes) <= max(most, len(timeline.lanes))
    again = timeline_of(spans_of(timeline, 0), most)
    assert [ends(lane) for lane in again.lanes] == [ends(lane) for lane in timeline.lanes]
    for lane in timeline.lanes:
        last = max(span.end_s for span in spans if span.device == lane.device)
        assert abs(lane.end_us - (last - timeline.began_s) * 1e6) <= 1
        assert min(lane.gaps_us) >= 0
        assert min(lane.lengths_us) >= 0


def ends(lane: Lane) -> tuple[int, int]:
    """Return begin and end of the lane, in steps of 10 us: times of 2026 are rounded."""
    return round(lane.gaps_us[0], -1), round(lane.end_us, -1)
