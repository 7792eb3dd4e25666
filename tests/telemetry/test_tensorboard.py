"""Event files of a run, read by TensorBoard's own reader."""

from __future__ import annotations

import math
import sys
import threading
import time
import types
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.records import Columns, Metrics, Rows
from nbdist.telemetry.tensorboard import (
    EVENTS_PER_S,
    MOST_WAITING,
    EventFiles,
    first_record,
    scalars_record,
)
from tests.runs import losses, new_run, new_state, rows

if TYPE_CHECKING:
    from pathlib import Path

    from tensorboard.compat.proto.event_pb2 import Event

sys.modules["tensorboard.compat.notf"] = types.ModuleType(
    "notf"
)  # selects TensorBoard's reader without TensorFlow
from tensorboard.backend.event_processing.event_file_loader import (  # noqa: E402
    LegacyEventFileLoader,
)

WIDE = Columns(measures=("step_s",), own=("loss",), shared=("accuracy",))
BEGAN = 1_700_000_000.5


def read(folder: Path) -> list[Event]:
    """Return the events of the only file in a folder. The reader checks their checksums."""
    (file,) = folder.iterdir()
    return list(LegacyEventFileLoader(str(file)).Load())


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by step."""
    return {
        event.step: value.simple_value
        for event in read(folder)
        for value in event.summary.value
        if value.tag == tag
    }


def written(folder: Path, records: list[Rows | Metrics]) -> EventFiles:
    events = EventFiles(folder, BEGAN)
    for record in records:
        events.take(record)
    events.close()
    return events


tags = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=300)
values = st.dictionaries(tags, st.floats(width=32), max_size=4)


@settings(deadline=None)  # the first call of the reader is slow
@given(values, st.integers(0, 2**53))
def test_scalars_are_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, sent: dict[str, float], step: int
) -> None:
    folder = tmp_path_factory.mktemp("events")
    (folder / "tfevents").write_bytes(first_record() + scalars_record(12.5, step, sent))
    version, event = read(folder)
    assert version.file_version == "brain.Event:2"
    assert (event.wall_time, event.step) == (12.5, step)
    read_back = {value.tag: value.simple_value for value in event.summary.value}
    assert read_back == pytest.approx(sent, nan_ok=True, rel=0, abs=0)


def test_a_number_that_is_too_large_is_infinite(tmp_path: Path) -> None:
    largest = 3.4028234663852886e38
    sent = {"up": 1e300, "down": -1e39, "nan": math.nan, "most": largest}
    (tmp_path / "tfevents").write_bytes(first_record() + scalars_record(0, 1, sent))
    values_read = [value.simple_value for value in read(tmp_path)[1].summary.value]
    assert values_read == pytest.approx([math.inf, -math.inf, math.nan, largest], nan_ok=True)


def test_each_rank_is_a_run_and_shared_values_are_another(tmp_path: Path) -> None:
    written(
        tmp_path,
        [
            rows([[0, 1, 1, 0.5, 0.02, 4, 0.5], [0, 1, 2, 0.6, 0.03, 3, 0.6]], WIDE, rank=0),
            rows([[1, 1, 1, 0.5, 0.04, 6, 0.5], [1, 1, 2, 0.6, 0.05, 5, 0.6]], WIDE, rank=1),
        ],
    )
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0", "rank-1", "all"}
    assert scalars(tmp_path / "rank-1", "loss") == {1: 6, 2: 5}
    assert scalars(tmp_path / "rank-1", "nbdist/step_s") == pytest.approx({1: 0.04, 2: 0.05})
    assert scalars(tmp_path / "rank-1", "accuracy") == {}
    assert scalars(tmp_path / "all", "loss") == {1: 5, 2: 4}
    assert scalars(tmp_path / "all", "accuracy") == pytest.approx({1: 0.5, 2: 0.6})
    assert scalars(tmp_path / "all", "nbdist/step_s") == {}
    assert [event.wall_time for event in read(tmp_path / "all")[1:]] == [BEGAN + 0.5, BEGAN + 0.6]


def test_epochs_have_their_own_axis(tmp_path: Path) -> None:
    epoch = Metrics(rank=0, cell=1, epoch=3, step=-1, time_s=1.0, own={"loss": 0.25})
    written(tmp_path, [losses(1, 2), epoch])
    assert scalars(tmp_path / "rank-0", "loss") == {1: 1, 2: 2}
    assert scalars(tmp_path / "rank-0", "epoch_loss") == {3: 0.25}


def test_the_mean_waits_for_the_slower_rank(tmp_path: Path) -> None:
    events = EventFiles(tmp_path, BEGAN)
    for first, last, rank in ((1, 3, 0), (1, 1, 1), (4, 5, 0), (2, 5, 1)):
        events.take(losses(first, last, rank))
        if rank:
            events.close()
    assert scalars(tmp_path / "all", "loss") == pytest.approx({s: s + 0.05 for s in range(1, 6)})


def test_waiting_for_a_silent_rank_uses_limited_memory(tmp_path: Path) -> None:
    events = EventFiles(tmp_path, BEGAN)
    events.take(losses(1, 1, rank=1))
    for first in range(2, 2 * MOST_WAITING, EVENTS_PER_S):
        events.take(losses(first, first + EVENTS_PER_S - 1))
        events.close()
    events.take(losses(2, 3, rank=1))
    events.close()
    assert not (tmp_path / "all").exists()


def test_many_steps_are_thinned_evenly_up_to_the_last(tmp_path: Path) -> None:
    ranks, steps = 8, 400
    written(tmp_path, [losses(1, steps, rank) for rank in range(ranks)])
    by_rank = [scalars(tmp_path / f"rank-{rank}", "loss") for rank in range(ranks)]
    assert sum(map(len, by_rank)) <= EVENTS_PER_S + ranks
    assert all(list(one) == list(by_rank[0]) for one in by_rank)
    assert min(by_rank[0]) == 1
    assert max(by_rank[0]) == steps
    assert list(scalars(tmp_path / "all", "loss")) == list(by_rank[0])


def test_an_invalid_step_is_left_out(tmp_path: Path) -> None:
    bad = [[0, -1, math.nan, 0, 1], [0, -1, -1, 0, 1], [0, -1, 1e300, 0, 1], [0, -1, 7, 0, 1]]
    written(tmp_path, [rows(bad)])
    assert scalars(tmp_path / "rank-0", "loss") == {7: 1}


def test_events_are_available_during_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, began=BEGAN)
    run.take(losses(1, 3))
    folder, deadline = run.path / "events" / "rank-0", time.monotonic() + 30
    while not folder.exists() and time.monotonic() < deadline:
        run.flush()
        threading.Event().wait(0.05)
    assert scalars(folder, "loss") == {1: 1, 2: 2, 3: 3}
    run.take(losses(4, 5))
    run.close()
    assert list(scalars(folder, "loss")) == [1, 2, 3, 4, 5]


def test_a_write_error_ends_only_the_event_files(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.path / "events").touch()  # a file instead of the folder
    run.take(losses(1, 3))
    run.close()
    assert run.fault.startswith("the event files for TensorBoard end early: ")
    assert run.dropped == 0


def test_a_deleted_run_is_not_created_again(tmp_path: Path) -> None:
    state = new_state()
    events = EventFiles(tmp_path / state.id / "events", BEGAN)
    events.take(losses(1, 3))
    events.close()
    assert events.fault
    assert not (tmp_path / state.id).exists()
