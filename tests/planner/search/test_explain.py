"""Reasons for missing plans, and warnings about a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.errors import PlanError
from nbdist.planner.graph.layout import Layout, ShardedModel
from nbdist.planner.graph.model import Model, Tensor
from nbdist.planner.search.explain import (
    FEW_ROWS,
    MUCH_BUBBLE,
    MUCH_TRAFFIC,
    NO_SEQUENCE,
    NO_TENSOR,
    faults_of_stages,
    gib,
    no_layout_message,
    warnings_of,
)
from nbdist.planner.search.step_variants import Steps
from nbdist.records import DATA, MODEL, STAGE, PlannedTime, Planning, Traffic
from tests.planner.steps import LINEAR, SCAN, STATES, devices, value

FLAT, LAYERED = Steps(LINEAR), Steps(SCAN)
"""Steps with 32 rows and no layers, and with 64 rows and 8 layers."""


def message(steps: Steps, **options: object) -> str:
    """Return the message for 8 devices, without its beginning."""
    found = no_layout_message(steps, devices(8), Planning(**options))  # type: ignore[arg-type]
    assert found.startswith("no layout over 8 devices fulfils the request (")
    return found.removeprefix("no layout over 8 devices fulfils the request (")


def test_message_repeats_the_request() -> None:
    assert message(FLAT, fixed={DATA: 3}).startswith("data=3): the product of the axes must be 8, ")
    assert message(LAYERED, fixed={STAGE: 3}, schedule="1f1b").startswith(
        "stage=3, schedule=1f1b): "
    )


@pytest.mark.parametrize(
    ("fixed", "rows"), [({DATA: 3}, "data"), ({DATA: 3, "micro": 2}, "data times micro")]
)
def test_general_conditions_are_stated(fixed: dict[str, int], rows: str) -> None:
    expected = (
        f"the product of the axes must be 8, {rows} must divide the batch of 32, and the model "
        "needs dimensions that divide so often"
    )
    assert message(FLAT, fixed=fixed).endswith(f"): {expected}")


def test_rows_that_would_divide_are_named() -> None:
    expected = "a batch of 32 does not divide into data 8 x micro 3: use 24 or 48 rows"
    assert message(FLAT, fixed={DATA: 8, "micro": 3}).endswith(f"): {expected}")


def warned(model: Model, layout: Layout) -> str:
    time = PlannedTime(compute=1.0, exposed=0.0, traffic=(), mfu=0.5)
    sharded = ShardedModel(model, layout, frozenset())
    return "; ".join(warnings_of(sharded, time, devices(8).topology))


def test_time_of_unknown_operations_is_stated() -> None:
    found = warned(replace(LINEAR, unpriced=("fft", "eigh")), Layout(8, 1))
    assert "only the memory traffic of fft, eigh, whose computing time is unknown" in found
    assert "memory traffic" not in warned(LINEAR, Layout(8, 1))


def test_step_without_state_is_named() -> None:
    found = warned(replace(LINEAR, tensors=LINEAR.tensors[-1:]), Layout(8, 1))
    assert "the step carries no arrays: nothing is trained" in found


def test_batch_that_no_device_count_divides_is_named() -> None:
    rows = Tensor("x", "batch", value(2, (7, 64), (0, 1)))
    model = replace(LINEAR, tensors=(*LINEAR.tensors[:2], rows))
    found = warned(model, Layout(1, 8))
    assert "a batch of 7 does not divide over 8 devices" in found
    assert "use 8 rows" in found
    assert "does not divide" not in warned(LINEAR, Layout(1, 8))


def test_known_limits_follow_the_general_conditions() -> None:
    apart = Steps(replace(LINEAR, apart="a reason"))
    assert message(apart, fixed={DATA: 2}).endswith(
        "; the batch and the model cannot both be sharded: a reason"
    )
    assert message(FLAT, fixed={"sequence": 1}).endswith(
        f"; no sequence parallelism: {NO_SEQUENCE}"
    )
    assert "sequence" not in message(FLAT, fixed={"sequence": 0}).partition("): ")[2]


@pytest.mark.parametrize("fixed", [{MODEL: 1}, {DATA: 8}, {DATA: 4, STAGE: 2}])
def test_sequence_needs_a_model_axis(fixed: dict[str, int]) -> None:
    assert message(LAYERED, fixed={**fixed, "sequence": 1}).endswith(
        f"): sequence is 1: {NO_TENSOR}"
    )
    assert NO_TENSOR not in message(LAYERED, fixed={**fixed, "sequence": 0})


def test_faults_of_stages_replace_general_conditions() -> None:
    found = message(LAYERED, fixed={STAGE: 9, DATA: 5, "micro": 3})
    assert found.partition("): ")[2] == (
        "the layers cannot be divided into 9 stages: use 2 to 8; "
        "stage 9 x data 5 does not divide 8 devices; "
        "data 5 x micro 3 does not divide the batch of 64"
    )
    assert "does not divide" not in message(LAYERED, fixed={STAGE: 0})
    assert "does not divide 8 devices" in message(LAYERED, fixed={STAGE: 8, MODEL: 2})
    assert "does not divide the batch" in message(LAYERED, fixed={STAGE: 4, "micro": 5})
    assert "does not divide" not in message(LAYERED, fixed={STAGE: 4, "micro": 64})
    assert "does not divide" not in message(LAYERED, fixed={STAGE: 4, DATA: 64, MODEL: 0})


def faults(
    steps: Steps, asked: dict[str, int], remat: str = "", schedule: str | None = None
) -> list[str]:
    return list(faults_of_stages(steps, asked, remat, schedule))  # type: ignore[arg-type]


def test_missing_layers_are_the_reason() -> None:
    (found,) = faults(FLAT, {STAGE: 2})
    assert found.startswith("no stages: there is no scan over layers")
    assert len(faults(FLAT, {STAGE: 2, "micro": 1, "zero": 3})) == 3


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({STAGE: 4}, []),
        ({STAGE: 4, "rounds": 2, "micro": 8}, []),
        ({STAGE: 4, "micro": 2, "zero": 1}, []),
        ({STAGE: 3}, []),
        ({STAGE: 9}, ["the layers cannot be divided into 9 stages: use 2 to 8"]),
        (
            {STAGE: 3, "rounds": 2, "micro": 6},
            ["3 stages of 2 blocks do not divide the layers: use 2, 4"],
        ),
        ({STAGE: 4, "rounds": 4}, ["4 stages of 4 blocks do not divide the layers: use 2"]),
        (
            {STAGE: 4, "rounds": 3},
            ["3 rounds: 8 layers cannot be divided into stages of 3 blocks each"],
        ),
        ({STAGE: 4, "rounds": 0}, ["rounds is 0: use 1 or more"]),
        (
            {"rounds": 2},
            ["rounds and schedules need stages: use 2, 4, with the remaining devices"],
        ),
        ({STAGE: 4, "micro": 1}, ["micro is 1: stages need 2 microbatches or more"]),
        ({STAGE: 4, "zero": 3}, ["zero is 3: with stages, ZeRO is 0 or 1"]),
        (
            {STAGE: 4, "rounds": 2, "micro": 6},
            [
                (
                    "micro is 6, and with several rounds it must be a multiple of the stages: "
                    "use 2 stages"
                )
            ],
        ),
        (
            {STAGE: 2, "rounds": 2, "micro": 5},
            ["micro is 5, and with several rounds it must be a multiple of the stages"],
        ),
        (
            {STAGE: 4, "rounds": 2, DATA: 32},
            [
                (
                    "2 rows are in each group, and with several rounds it must be a multiple of "
                    "the stages: use 2 stages"
                )
            ],
        ),
    ],
    ids=str,
)
def test_faults_name_the_fitting_numbers(asked: dict[str, int], found: list[str]) -> None:
    assert faults(LAYERED, asked) == found


def test_1f1b_is_refused_with_its_reason() -> None:
    def refuse(_: str) -> None:
        raise PlanError("schedule=1f1b is not possible: the loss needs all rows")

    steps = Steps(SCAN, None, None, refuse)
    assert faults(steps, {STAGE: 4}, schedule="1f1b") == [
        "schedule=1f1b is not possible: the loss needs all rows"
    ]
    assert faults(steps, {STAGE: 4}, schedule="gpipe") == []
    without_layers = Steps(LINEAR, None, None, refuse)
    assert len(faults(without_layers, {STAGE: 4}, schedule="1f1b")) == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (2**30, "1 GiB"),
        (2**30 - 2**20, "1,023 MiB"),
        (46.3 * 2**30, "46.3 GiB"),
        (12.5 * 2**20, "12.5 MiB"),
        (1500 * 2**30, "1,500 GiB"),
        (999.6 * 2**20, "1,000 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (0, "0 MiB"),
    ],
)
def test_bytes_are_written_without_exponents(nbytes: float, text: str) -> None:
    assert gib(nbytes) == text


def warnings(
    data: int, *, exposed: float = 0.0, bubble: float = 0.0, compute: float = 1.0
) -> tuple[str, ...]:
    """Return the warnings for the linear step with 32 rows."""
    traffic = (
        Traffic(axis=DATA, level="network", bytes=1.0, seconds=exposed * 0.6),
        Traffic(axis=MODEL, level="host", bytes=1.0, seconds=exposed * 0.4),
    )
    time = PlannedTime(compute, exposed, traffic, 0.0, bubble)
    sharded = ShardedModel(LINEAR, Layout(data, 1), STATES)
    return warnings_of(sharded, time, devices(8).topology)


def test_few_rows_on_a_device_are_noted() -> None:
    assert FEW_ROWS == 4
    assert warnings(8) == ("each device has 4 samples of a batch of 32",)
    assert warnings(32) == ("each device has 1 sample of a batch of 32",)
    assert warnings(4) == ()
    rows = replace(LINEAR.tensors[2], value=value(9, (2, 3), (0, 1)))
    few = replace(LINEAR, tensors=(LINEAR.tensors[0], rows))
    sharded = ShardedModel(few, Layout(1, 1), frozenset())
    assert warnings_of(sharded, PlannedTime(1.0, 0.0, (), 0.0), devices(8).topology) == ()


def test_much_traffic_names_its_links() -> None:
    (found,) = warnings(1, compute=0.75, exposed=0.25)
    assert found == "25% of a step is spent in collectives, mostly over network links"
    assert warnings(1, compute=1 - MUCH_TRAFFIC, exposed=MUCH_TRAFFIC) == ()


def test_links_are_named_by_their_exposed_time() -> None:
    traffic = (
        Traffic(axis=DATA, level="network", bytes=1.0, seconds=0.4, hidden=0.3),
        Traffic(axis=MODEL, level="host", bytes=1.0, seconds=0.1),
        Traffic(axis=STAGE, level="host", bytes=1.0, seconds=0.05),
    )
    sharded = ShardedModel(LINEAR, Layout(1, 1), STATES)
    (found,) = warnings_of(sharded, PlannedTime(0.75, 0.25, traffic, 0.0), devices(8).topology)
    assert found == "25% of a step is spent in collectives, mostly over host links"


def test_long_bubble_is_noted() -> None:
    (found,) = warnings(1, bubble=0.16)
    assert found.startswith("stages are idle for 16% of a step (the pipeline's bubble): use a lar")
    assert warnings(1, bubble=MUCH_BUBBLE) == ()


def test_hosts_that_need_many_bytes_are_noted() -> None:
    """The batch has 8192 bytes, all of them for one host."""
    (found,) = warnings(1, compute=2e-6)
    assert found == (
        "each host needs 4.1 GB/s of batches, more than a process usually reads: "
        "use --prefetch auto"
    )
    assert warnings(1, compute=9e-6) == ()
    two_hosts = devices(8, 2).topology
    sharded = ShardedModel(LINEAR, Layout(1, 1), STATES)
    time = PlannedTime(2e-6, 0.0, (), 0.0)
    assert "needs 2.0 GB/s" in warnings_of(sharded, time, two_hosts)[0]


def test_step_without_time_has_no_shares() -> None:
    assert warnings(1, compute=0.0) == ()
