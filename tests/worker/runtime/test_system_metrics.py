"""Samples of the host by a rank, with a double of NVIDIA's library."""

from __future__ import annotations

import math
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.records import SYSTEM
from nbdist.worker.runtime import system_metrics
from nbdist.worker.runtime.system_metrics import NvidiaGpus, SystemMetrics
from tests.worker.doubles import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

GPU_NAMES = SYSTEM[-4:]


class NvmlError(Exception):
    """Double of `pynvml.NVMLError`."""


def power(gpu: int) -> int:
    if gpu == 2:
        raise NvmlError("not supported")
    return 100_000 + gpu


def nvml(init: Callable[[], None] = lambda: None) -> SimpleNamespace:
    """Return a double of `pynvml` with three GPUs. GPU 2 does not report its power."""
    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetHandleByUUID={"GPU-b": 1}.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=20 * gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=1000 + gpu),
        nvmlDeviceGetTemperature=lambda gpu, _sensor: 40 + gpu,
        nvmlDeviceGetPowerUsage=power,
    )


def without_driver() -> None:
    raise NvmlError("driver not loaded")


def sampled(cell: int = 3) -> tuple[SystemMetrics, Any]:
    reporter: Any = Recorder()
    reporter.cell = cell
    reporter.seconds = lambda: 12.5
    return SystemMetrics(reporter), reporter


@pytest.fixture(autouse=True)
def without_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package appear as not installed, on hosts with GPUs too."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_sample_contains_the_use_of_this_process_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "INTERVAL_S", 0.0)
    monkeypatch.setattr(system_metrics, "LARGEST_SHARE", 0.0)
    metrics, reporter = sampled()
    metrics.sample_if_due()
    assert reporter.records == []
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    metrics.sample_if_due()
    (sample,) = reporter.records
    values = sample.values
    assert tuple(values) == SYSTEM[:8]
    assert (sample.rank, sample.cell, sample.time_s) == (0, 3, 12.5)
    assert values["cpu_cores"] > 0
    assert 0 < values["host_cpu"] <= 1
    assert 0 < values["host_memory"] < 1
    assert values["rss_bytes"] > 1e7
    assert values["received_bytes_s"] >= 0


def test_use_of_a_host_is_a_share_when_its_counters_decrease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The idle and waiting times of Linux can decrease."""
    monkeypatch.setattr(system_metrics, "INTERVAL_S", 0.0)
    monkeypatch.setattr(system_metrics, "LARGEST_SHARE", 0.0)
    times = system_metrics.psutil.cpu_times()
    later = times._replace(user=times.user + 1.0, idle=times.idle - 0.25)
    counters = iter([times, later, later._replace(idle=later.idle + 1.0)])
    monkeypatch.setattr(system_metrics.psutil, "cpu_times", lambda: next(counters))
    metrics, reporter = sampled()
    for _ in range(3):
        metrics.sample_if_due()
    assert [sample.values["host_cpu"] for sample in reporter.records] == [1.0, 0.0]


def test_recent_sample_is_not_repeated_and_a_cell_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, reporter = sampled()
    metrics.sample_if_due()
    metrics.sample_if_due()
    assert reporter.records == []
    monkeypatch.setattr(system_metrics, "INTERVAL_S", 0.0)
    monkeypatch.setattr(system_metrics, "LARGEST_SHARE", 0.0)
    reporter.cell = 4
    metrics.sample_if_due()
    assert reporter.records == []
    metrics.sample_if_due()
    assert len(reporter.records) == 1


def test_long_run_is_sampled_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "INTERVAL_S", 0.0)
    metrics, reporter = sampled()
    reporter.seconds = lambda: 1e9
    metrics.sample_if_due()
    metrics.sample_if_due()
    assert reporter.records == []


def test_process_without_gpus_has_no_values_of_them() -> None:
    assert NvidiaGpus().read() == {}


@pytest.mark.parametrize(
    ("visible", "use", "used", "celsius", "watts"),
    [
        (None, 0.2, 3003, 42, 200.001),
        ("1", 0.2, 1001, 41, 100.001),
        ("GPU-b, 0", 0.1, 2001, 41, 200.001),
    ],
)
def test_values_of_the_visible_gpus(
    visible: str | None,
    use: float,
    used: float,
    celsius: float,
    watts: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    values = NvidiaGpus().read()
    assert values == pytest.approx(dict(zip(GPU_NAMES, (use, used, celsius, watts), strict=True)))


def test_value_that_no_gpu_reports_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert math.isnan(NvidiaGpus().read()["gpu_watts"])


@pytest.mark.parametrize(("visible", "library"), [("-1", nvml()), ("0", nvml(without_driver))])
def test_no_values_without_visible_gpus_or_a_driver(
    visible: str, library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert NvidiaGpus().read() == {}
