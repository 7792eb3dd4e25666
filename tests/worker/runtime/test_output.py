from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.worker.runtime.output import GlooMessageFilter, _split_before

if TYPE_CHECKING:
    from random import Random

    import nbdist


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=6))
def test_only_a_prefix_of_the_mark_is_held_back(data: bytes, mark: bytes) -> None:
    if mark in data:
        return
    kept, ready = _split_before(data, mark)
    assert ready + kept == data
    assert mark.startswith(kept)
    for cut in range(len(ready)):
        assert not mark.startswith(data[cut:]), "a longer prefix of the mark was released"


PIECES = [
    *(b"[Gloo] Rank ", b"[Gloo] Rank ", b"0", b" is connected to ", b"1", b" peer ranks. "),
    *(b"Expected number of connected peer ranks is : ", b"1", b"\n"),
]
"""Pieces of a line as gloo writes it, here from two threads."""


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("cut", range(1, len(PIECES)))
def test_greetings_in_pieces_are_removed(cut: int, *, ends: bool) -> None:
    filtered = GlooMessageFilter()
    output = filtered.feed(b"loss 1.5\n" + b"".join(PIECES[:cut]), ends=False)
    output += filtered.feed(b"".join(PIECES[cut:]) + b"step 2\n", ends=ends)
    assert output == b"loss 1.5\nstep 2\n"


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 90))
def test_greetings_of_several_threads_are_removed(random: Random, threads: int, chunk: int) -> None:
    lines = [b"loss 1.5\n", b"\n", b" is connected to the wall\n", b"[Gloomy] 3\n"]
    parts = [[*PIECES[1:]] for _ in range(threads)]
    written = list(lines[:2])
    printed = iter([b"epoch 1 of 5\n", b"step 12\n", b"[1, 2]\n"])
    while any(parts):
        if random.random() < 0.1:
            written.append(next(printed, b""))
        written.append(random.choice([*filter(None, parts)]).pop(0))
    text = b"".join([*written, *lines[2:]])
    filtered, output = GlooMessageFilter(), b""
    for place in range(0, len(text), chunk):
        output += filtered.feed(text[place : place + chunk], ends=False)
    output += filtered.feed(b"", ends=True)
    own = (part for part in written[2:] if part not in PIECES)
    assert output == b"".join([*lines[:2], *own, *lines[2:]])


REST = b" is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"


@pytest.mark.parametrize(
    ("chunks", "output"),
    [
        ([b"[Gloo] Rank 0ten% is conn", b"ected to 7" + REST[17:], b"3\n"], b"ten%3\n"),
        ([b"[Gloo] Rank 0hello [Glo", b"o] Rank 1", REST, REST, b"4\n"], b"hello 4\n"),
        ([b"hi [Gloo] Rank ", b"0" + REST], b"hi "),
        ([b"[Gloo] Rank 0" + REST, b"1\n2\n3\n"], b"1\n2\n3\n"),
        ([b"[Gloo] Rank of mine\n", b"1\n2\n3\n4\n5\n"], b"of mine\n\n\n4\n5\n"),
    ],
)
def test_only_numbers_of_greetings_are_removed(chunks: list[bytes], output: bytes) -> None:
    filtered = GlooMessageFilter()
    assert b"".join(filtered.feed(chunk, ends=False) for chunk in chunks) == output


def test_text_similar_to_a_greeting_is_shown() -> None:
    filtered = GlooMessageFilter()
    for text in (b"the cable is connected to ", b"the wall\n", b"5\n", b" peer ranks. 3\n"):
        assert filtered.feed(text, ends=False) == text
    assert filtered.feed(b"a [Glo", ends=False) == b"a "
    assert filtered.feed(b"ry", ends=False) == b"[Glory"
    assert filtered.feed(b"[Gloo]", ends=True) == b"[Gloo]"


WARNING = (
    "W1125 16:53:31.775503    2536 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {devices=[4,1]<=[4]} to ... for HLO "
    'operation %s = copy(%r), metadata={op_name="jit(step)/transpose" stack_frame_id=25}.'
)
SECOND = (
    "W1125 16:53:32.000001    2536 hlo_rematerialization.cc:3204] Can't reduce memory use below "
    "1.5GiB by rematerialization; only reduced to 2.5GiB"
)


def test_warnings_about_rematerialization_are_one_line_in_a_cell(cluster: nbdist.Cluster) -> None:
    text = f"{WARNING}\n" * 3 + f"a line\n{SECOND}\n"
    for _ in range(2):
        cluster.run(f"import os\nos.write(2, {text.encode()!r})\nNone")
    cluster.run(f"os.write(2, {SECOND.encode()!r} + bytes([10]))\nNone")
    output, log = cluster.logs(0).split("--- engine log")
    assert output.count("XLA rematerializes arrays, first for jit(step)/transpose. ") == 2
    assert output.count("XLA rematerializes arrays, first \"Can't reduce memory use") == 1
    assert "a line" in output
    assert "Involuntary" not in output
    assert log.count("Involuntary") >= 3


def test_native_log_lines_stay_in_the_log(cluster: nbdist.Cluster) -> None:
    """TensorFlow's native code logs to descriptor 2, several lines for each float64 graph."""
    lines = (
        "I0000 00:00:1795227697.795957   13787 port.cc:153] oneDNN custom operations are on.",
        "W0000 00:00:1795224948.815720   28177 util.cc:163] Not handling type DT_DOUBLE",
        "E0000 00:00:1795321674.875758   28943 ring_alg.cc:291] Aborting RingReduce with UNAVAIL",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:2 while",
        ":UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:}",
        "The error could be from a previous operation. Restart your program to reset.",
        "\t [[{{node CollectiveReduceV2}}]] [type.googleapis.com/tensorflow.DerivedStatus='']",
        "E1201 02:49:20.018 1167 cpu_aot_loader.cc:210] Loading AOT. A feature +prefer-no-scatter",
        "W0000 00:00:1795224948.815720   28177 cuda.cc:1] this one matters",
    )
    text = "\n".join(lines) + "\nE0000 00:00:1.5 7 half of"
    cluster.run("print('beginning of this test')")  # the cluster may have run other tests
    cluster.run(f"import os\nos.write(2, {text.encode()!r})\nos.write(2, b' a line\\n')\nNone")
    shown = cluster.logs(0)
    assert "this one matters" in shown
    assert "half of a line" in shown
    assert "E0000 00:00:1.5 7 half of a line" in shown
    output = shown.split("--- engine log")[0].rpartition("beginning of this test")[2]
    assert "this one matters" in output
    assert "oneDNN" not in output
    assert "DT_DOUBLE" not in output
    assert "prefer-no-scatter" not in output
    assert not any(word in output for word in ("RingReduce", "GRPC", "grpc", "previous", "node"))
