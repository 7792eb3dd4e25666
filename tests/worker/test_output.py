from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.worker.output import _split_before


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=6))
def test_only_a_possible_beginning_of_the_mark_is_kept_back(data: bytes, mark: bytes) -> None:
    if mark in data:
        return
    kept, ready = _split_before(data, mark)
    assert ready + kept == data
    assert mark.startswith(kept)
    for cut in range(len(ready)):
        assert not mark.startswith(data[cut:]), "a longer beginning was let go"
