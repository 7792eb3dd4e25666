from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.worker.output import Ungreeted, _split_before

if TYPE_CHECKING:
    import nbdist


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=6))
def test_only_a_possible_beginning_of_the_mark_is_kept_back(data: bytes, mark: bytes) -> None:
    if mark in data:
        return
    kept, ready = _split_before(data, mark)
    assert ready + kept == data
    assert mark.startswith(kept)
    for cut in range(len(ready)):
        assert not mark.startswith(data[cut:]), "a longer beginning was let go"


PIECES = [
    *(b"[Gloo] Rank ", b"[Gloo] Rank ", b"0", b" is connected to ", b"1", b" peer ranks. "),
    *(b"Expected number of connected peer ranks is : ", b"1", b"\n"),
]
"""As gloo writes a line, here on two threads."""


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 4, 5, 6, 7, 8])  # a number alone is nothing to wait for
def test_greetings_are_left_out_in_whatever_parts_they_come(cut: int, *, ends: bool) -> None:
    shown = Ungreeted()
    told = shown.feed(b"loss 1.5\n" + b"".join(PIECES[:cut]), ends=False)
    told += shown.feed(b"".join(PIECES[cut:]) + b"step 2\n", ends=ends)
    assert told == b"loss 1.5\nstep 2\n"


def test_what_only_looks_like_a_greeting_is_shown() -> None:
    shown = Ungreeted()
    assert shown.feed(b"the cable is connected to ", ends=False) == b"the cable"
    assert shown.feed(b"the wall", ends=True) == b" is connected to the wall"


def test_native_noise_stays_in_the_log(cluster: nbdist.Cluster) -> None:
    """TensorFlow's native code logs to descriptor 2, several lines for each float64 graph."""
    lines = (
        "I0000 00:00:1795227697.795957   13787 port.cc:153] oneDNN custom operations are on.",
        "W0000 00:00:1795224948.815720   28177 util.cc:163] Not handling type DT_DOUBLE",
        "E0000 00:00:1795321674.875758   28943 ring_alg.cc:291] Aborting RingReduce with UNAVAIL",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:2 while",
        ":UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:}",
        "The error could be from a previous operation. Restart your program to reset.",
        "\t [[{{node CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
        "W0000 00:00:1795224948.815720   28177 cuda.cc:1] this one matters",
    )
    text = "\n".join(lines) + "\nE0000 00:00:1.5 7 half of"
    cluster.run(f"import os\nos.write(2, {text.encode()!r})\nos.write(2, b' a line\\n')\nNone")
    shown = cluster.logs(0)
    assert "this one matters" in shown
    assert "half of a line" in shown
    assert "E0000 00:00:1.5 7 half of a line" in shown
    told = shown.split("--- engine log")[0]
    assert "oneDNN" not in told
    assert "DT_DOUBLE" not in told
    assert not any(word in told for word in ("RingReduce", "GRPC", "grpc", "previous", "node"))
