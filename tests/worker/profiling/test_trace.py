"""Attribution of trace spans to step time, and the `--profile` option."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.cells.parse import parse_cell
from nbdist.records import CellOptions, StepOptions
from nbdist.worker.profiling.trace import Span, attributed, collective_seconds, kind_on_device
from nbdist.worker.training.profile import by_the_loop, top_operations

if TYPE_CHECKING:
    from nbdist.worker.profiling.trace import Kind


def span(kind: Kind, begin_s: float, end_s: float, device: int = 0, run: int = 0) -> Span:
    return Span(kind, f"{kind}.1", device, run, begin_s, end_s)


def test_hidden_part_of_collective_counts_as_compute() -> None:
    spans = [
        span("compute", 0, 4),
        span("compute", 3, 5),  # on a second thread
        span("collective", 4, 7),
        span("to_host", 6, 8),
        span("to_device", 0, 1),
    ]
    assert attributed(spans) == {"compute": 5, "collective": 2, "to_device": 0, "to_host": 1}


def test_devices_are_averaged() -> None:
    spans = [span("compute", 0, 4, device=0), span("compute", 0, 2, device=1)]
    assert attributed(spans)["compute"] == 3
    assert not any(attributed([]).values())


def test_collective_time_is_that_of_least_waiting_device() -> None:
    spans = [span("collective", 10 * run, 10 * run + run, run=run) for run in (1, 2)]
    spans += [span("collective", 10 * run, 10 * run + 1.5, device=1, run=run) for run in (1, 2)]
    assert collective_seconds([*spans, span("compute", 0, 99)], 2) == [1, 1.5]


def test_surplus_executions_are_spread_over_steps() -> None:
    spans = [span("collective", run, run + 0.5, run=run) for run in range(6)]
    assert collective_seconds(spans, 4) == [0.75] * 4
    assert collective_seconds([], 3) == [0.0] * 3


def test_operations_are_summed_by_name() -> None:
    spans = [span("compute", i, i + 0.5) for i in range(4)] + [span("collective", 0, 5)]
    first, second = top_operations(spans, 2)
    assert (first.name, first.seconds, first.count) == ("collective.1", 2.5, 0.5)
    assert (second.name, second.seconds, second.count) == ("compute.1", 1.0, 2.0)


def test_loop_times_are_used_without_operations() -> None:
    times = [{"step_s": 3.0, "input_s": 0.5, "collective_s": 1.0}, {"step_s": 1.0, "input_s": 0.5}]
    spent = by_the_loop(times)
    assert spent["collective"] == 1.0
    assert spent["compute"] == 2.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective"),
        ("MemcpyH2D", "to_device"),
        ("MEMCPYDtoH", "to_host"),
        ("ampere_sgemm_64x64", "compute"),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str) -> None:
    assert kind_on_device(name) == kind


def test_all_negative_numbers_are_listed() -> None:
    step = StepOptions(data="data", prefetch=-1, profile=-2)
    with pytest.raises(nbdist.errors.UsageError) as caught:
        parse_cell("1", CellOptions(step=step), number=1, label=1, strategy="pjrt")
    assert "--prefetch -1: use a whole number from 0" in str(caught.value)
    assert "--profile -2: use a whole number from 0" in str(caught.value)
