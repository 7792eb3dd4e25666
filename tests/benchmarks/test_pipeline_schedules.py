from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline_schedules import in_flight, step_s
from nbdist.errors import PlanError
from nbdist.planner.graph.pipeline_schedule import bubble

STAGES = st.lists(st.floats(0.001, 10), min_size=1, max_size=16)
SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved"])
COUNTS = st.integers(1, 64)


@given(SCHEDULES, st.floats(0.001, 10), COUNTS, st.floats(0, 1))
def test_one_stage_has_no_bubble_and_no_sends(schedule, stage_s, microbatches, send) -> None:
    seconds = step_s(schedule, [stage_s], microbatches, 1, send)
    assert seconds == pytest.approx(microbatches * stage_s)
    assert bubble(1, microbatches) == 0


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 32), COUNTS, st.floats(0.001, 10))
def test_bubble_of_equal_stages(schedule, stages, microbatches, stage_s) -> None:
    ideal_s = microbatches * stage_s
    excess = step_s(schedule, [stage_s] * stages, microbatches) / ideal_s - 1
    assert excess == pytest.approx((stages - 1) / microbatches, abs=1e-9)
    assert excess == pytest.approx(bubble(stages, microbatches), abs=1e-9)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8), st.floats(0.001, 10))
def test_chunks_divide_the_bubble(stages, turns, chunks, stage_s) -> None:
    microbatches = turns * stages
    whole = step_s("1f1b", [stage_s] * stages, microbatches) - microbatches * stage_s
    cut = step_s("interleaved", [stage_s] * stages, microbatches, chunks)
    assert cut - microbatches * stage_s == pytest.approx(whole / chunks, abs=1e-6)


@given(STAGES, COUNTS, COUNTS)
def test_step_time_is_bounded_by_slowest_stage_and_sum(stages, few, more) -> None:
    seconds = step_s("1f1b", stages, few)
    assert seconds >= few * max(stages) * (1 - 1e-9)
    assert seconds <= few * sum(stages) * (1 + 1e-9)
    assert step_s("1f1b", stages, few + more) > seconds


def test_sends_cost_time_forward_and_backward() -> None:
    assert step_s("1f1b", [1.0, 1.0], 1, send_s=0.25) == pytest.approx(2.5)
    assert step_s("1f1b", [1.0] * 4, 1, send_s=0.25) == pytest.approx(5.5)
    apart = step_s("interleaved", [1.0, 1.0], 4, 2, 0.25) - step_s("interleaved", [1.0, 1.0], 4, 2)
    assert apart == pytest.approx(2 * 8 * 0.25)


@given(st.integers(1, 32), COUNTS)
def test_gpipe_keeps_all_microbatches_and_1f1b_at_most_stages(stages, microbatches) -> None:
    for stage in range(stages):
        assert in_flight("gpipe", stage, stages, microbatches) == microbatches
        kept = in_flight("1f1b", stage, stages, microbatches)
        assert 1 <= kept <= min(stages, microbatches)
    assert in_flight("1f1b", stages - 1, stages, microbatches) == 1


@given(st.integers(2, 16), st.integers(2, 8), st.integers(2, 6))
def test_interleaving_keeps_more_but_at_most_all(stages, turns, chunks) -> None:
    microbatches = turns * stages
    for stage in range(stages):
        kept = in_flight("interleaved", stage, stages, microbatches, chunks)
        assert kept <= microbatches
    first = in_flight("interleaved", 0, stages, microbatches, chunks)
    plain = in_flight("1f1b", 0, stages, microbatches)
    # arXiv:2205.05198, section 4.2.3: 1 + (p - 1)/(p v) times as many.
    assert first / plain == pytest.approx(1 + (stages - 1) / (stages * chunks))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", [1.0], 0), "at least one stage, microbatch and chunk, not 1, 0 and 1"),
        (("gpipe", [], 4), "not 0, 4 and 1"),
        (("1f1b", [1.0, 1.0], 4, 2), "2 chunks a device need the interleaved schedule, not 1f1b"),
        (("interleaved", [1.0] * 4, 6, 2), "multiple of the 4 stages as micro, not 6: use 4 or 8"),
    ],
)
def test_invalid_schedules_are_refused(arguments, message) -> None:
    with pytest.raises(PlanError, match=message):
        step_s(*arguments)
