"""States of runs, and the format of their files."""

from __future__ import annotations

import re
import typing

import msgspec
import pytest

from nbdist.records import RUN_ID, RunState, RunStatus
from nbdist.telemetry.run_writer import new_id
from tests.runs import new_state, recover

ACTIVE = ("running", "stopping")


@pytest.mark.parametrize("status", typing.get_args(RunStatus))
def test_a_run_is_over_unless_it_runs_or_stops(status: str) -> None:
    assert new_state(status=status).is_over is (status not in ACTIVE)


def test_the_files_keep_an_earlier_name_of_recoveries() -> None:
    state = new_state(recoveries=(recover(7, 5, 1.0),), recovering="rank 1 died")
    content = msgspec.json.encode(state)
    raw = msgspec.json.decode(content)
    assert raw["healing"] == "rank 1 died"
    assert raw["heals"][0]["step"] == 5
    assert not raw.keys() & {"recoveries", "recovering"}
    assert msgspec.json.decode(content, type=RunState) == state


def test_a_file_without_the_newer_fields_is_read() -> None:
    raw = msgspec.json.decode(msgspec.json.encode(new_state()))
    for name in ("heals", "healing", "plan", "seed", "cell_seed", "request", "cell", "samples"):
        del raw[name]
    state = msgspec.convert(raw, RunState)
    assert (state.recoveries, state.seed, state.samples) == ((), None, -1)


def test_ids_of_runs_have_their_pattern() -> None:
    assert re.fullmatch(RUN_ID, new_id(0.0))
    assert not re.fullmatch(RUN_ID, "20260101-000000-ABCDEF")
    assert not re.fullmatch(RUN_ID, "20260101-000000-abcdef0")
