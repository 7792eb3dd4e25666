from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.planner.graph.pipeline_schedule import bubble, rounds_fault

COUNTS = st.integers(1, 64)


@given(COUNTS, st.integers(1, 8))
def test_one_stage_has_no_bubble(microbatches: int, chunks: int) -> None:
    assert bubble(1, microbatches, chunks) == 0


@given(st.integers(1, 16), COUNTS, st.integers(1, 8))
def test_chunks_divide_the_bubble(stages: int, microbatches: int, chunks: int) -> None:
    whole = bubble(stages, microbatches)
    assert bubble(stages, microbatches, chunks) == pytest.approx(whole / chunks)


def test_several_rounds_need_a_multiple_of_the_stages() -> None:
    assert rounds_fault(4, 8) == ""
    assert "multiple of the 4 stages as micro, not 6: use 4 or 8" in rounds_fault(4, 6)
