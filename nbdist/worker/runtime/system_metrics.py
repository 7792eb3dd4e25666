"""Use of the host by a rank: processor, memory, network, disk and GPUs, sampled at a low rate."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.records import SYSTEM, SystemSample

if TYPE_CHECKING:
    from nbdist.worker.runtime.rank_reporter import RankReporter

INTERVAL_S = 2.0
"""Shortest time between two samples in seconds."""

LARGEST_SHARE = 1e-3
"""The interval is at least this share of the run's time, so that a day has 5,000 samples."""

_COUNTERS = (
    "cpu_cores",
    "host_cpu",
    "sent_bytes_s",
    "received_bytes_s",
    "read_bytes_s",
    "written_bytes_s",
)
_MILLI = 1e-3


class SystemMetrics:
    """Sampler of one rank. Rates are means since the previous sample of the cell.

    Args:
        reporter: sends the samples.
        gpus: GPUs of this process.
    """

    def __init__(self, reporter: RankReporter, gpus: NvidiaGpus | None = None) -> None:
        self._reporter = reporter
        self._gpus = NvidiaGpus() if gpus is None else gpus
        self._process = psutil.Process()
        self._cell = 0
        self._read_at = 0.0
        self._totals: dict[str, float] = {}

    def sample_if_due(self) -> None:
        """Send a sample if the last one of this cell is old enough.

        The first call in a cell only starts the measurement of rates.
        """
        now = time.monotonic()
        if self._reporter.cell != self._cell:
            self._cell, self._read_at, self._totals = self._reporter.cell, now, self._read_totals()
        elif now - self._read_at >= max(INTERVAL_S, LARGEST_SHARE * self._reporter.seconds()):
            values = self._read(now)
            seconds = self._reporter.seconds()
            fields = self._reporter.record_fields()
            self._reporter.send(SystemSample(time_s=seconds, values=values, **fields))

    def _read(self, now: float) -> dict[str, float]:
        """Return the known values by the names in `SYSTEM`, in this order."""
        totals, elapsed = self._read_totals(), now - self._read_at
        rates = {name: (totals[name] - self._totals[name]) / elapsed for name in _COUNTERS}
        host_s = totals["host_s"] - self._totals["host_s"]
        share = rates["host_cpu"] * elapsed / host_s if host_s > 0 else math.nan
        rates["host_cpu"] = share if math.isnan(share) else min(max(share, 0.0), 1.0)
        self._read_at, self._totals = now, totals
        memory = {
            "rss_bytes": float(self._process.memory_info().rss),
            "host_memory": psutil.virtual_memory().percent / 100,
        }
        found = rates | memory | self._gpus.read()
        known = {name: value for name, value in found.items() if not math.isnan(value)}
        return {name: known[name] for name in SYSTEM if name in known}

    def _read_totals(self) -> dict[str, float]:
        """Return the counters since the start of the process or of the host, in seconds or bytes.

        A container may hide the counters of the network or of the disk.
        """
        own, host = self._process.cpu_times(), psutil.cpu_times()
        all_s = sum(host[:8])  # `guest` is part of `user`
        totals = dict.fromkeys(_COUNTERS, math.nan) | {
            "cpu_cores": own.user + own.system,
            "host_cpu": all_s - host.idle - getattr(host, "iowait", 0.0),
            "host_s": all_s,
        }
        if network := psutil.net_io_counters():
            totals |= {"sent_bytes_s": network.bytes_sent, "received_bytes_s": network.bytes_recv}
        with contextlib.suppress(psutil.AccessDenied, AttributeError, NotImplementedError):
            disk = self._process.io_counters()
            totals |= {"read_bytes_s": disk.read_bytes, "written_bytes_s": disk.write_bytes}
        return totals


class NvidiaGpus:
    """NVIDIA GPUs of this process, read through `nvidia-ml-py` if it is installed.

    CUDA_VISIBLE_DEVICES selects them by UUID, or by their number on the bus.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] | None = None

    def read(self) -> dict[str, float]:
        """Return use, memory, temperature and power. Empty without GPUs.

        Use is the mean over the GPUs, memory and power are sums, and the temperature is the
        highest. A value that no GPU reports is NaN.
        """
        if self._handles is None:
            self._handles = self._open()
        if not self._handles:
            return {}
        uses = self._each(lambda gpu: self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
        memory = self._each(lambda gpu: self._nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        celsius = self._each(lambda gpu: self._nvml.nvmlDeviceGetTemperature(gpu, 0))
        watts = self._each(lambda gpu: self._nvml.nvmlDeviceGetPowerUsage(gpu) * _MILLI)
        return {
            "gpu_use": sum(uses) / len(uses) if uses else math.nan,
            "gpu_bytes": float(sum(memory)) if memory else math.nan,
            "gpu_celsius": float(max(celsius, default=math.nan)),
            "gpu_watts": sum(watts) if watts else math.nan,
        }

    def _each(self, value_of: Any) -> list[float]:
        """Return a value of each GPU that reports it."""
        values = []
        for handle in self._handles or ():
            with contextlib.suppress(self._nvml.NVMLError):
                values.append(value_of(handle))
        return values

    def _open(self) -> list[Any]:
        """Return NVML's handles. Empty without the package, the driver or GPUs."""
        try:
            import pynvml
        except ImportError:
            return []
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            names = os.environ.get("CUDA_VISIBLE_DEVICES")
            if names is None:
                names = ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
            return [*map(self._handle, filter(_is_gpu, names.split(",")))]
        except pynvml.NVMLError:
            return []

    def _handle(self, name: str) -> Any:
        name = name.strip()
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


def _is_gpu(name: str) -> bool:
    return name.strip() not in ("", "-1")
