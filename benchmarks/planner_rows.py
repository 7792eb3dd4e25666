"""Published step times of GPTs on A100s, against the cost model."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pipeline_schedules import PublishedSchedule, step_s
from benchmarks.planner_gpt import (
    OPTIMIZER_BYTES,
    Gpt,
    embedding,
    head,
    layer_backward,
    layer_forward,
)
from nbdist.planner.cost.collectives import all_gather_s, all_reduce_s, send_s
from nbdist.planner.cost.roofline import memory_s
from nbdist.records.topology import Chip, Level, Topology

if TYPE_CHECKING:
    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records.topology import Extent

REFERENCE = Path(__file__).parent / "reference"

A100 = Chip(
    name="A100-80GB",
    platform="gpu",
    memory_bytes=85100068864,
    flops={"float16": 312e12, "bfloat16": 312e12},
    bytes_per_s=2.03904e12,
    source="NVIDIA A100 datasheet (SXM4)",
)
_NVLINK = Level(name="host", size=8, latency_s=3.4e-6, bytes_per_s=300e9)
_HDR = Level(name="network", size=384, latency_s=14e-6, bytes_per_s=25e9)
SELENE = Topology(chip=A100, levels=(_NVLINK, _HDR))
"""Hosts of eight A100s with eight 200 Gb/s links each (arXiv:2104.04473, section 5)."""

_GPT2_VOCABULARY = 50257
_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this number of rows per device."""

_MICRO = {"1.7B": 16, "3.6B": 16, "7.5B": 16, "18B": 8, "39B": 4, "76B": 2, "145B": 2}
"""Sequences per microbatch, 1 if missing. Source: Megatron-LM examples/sc21/run_table_1.sh."""

_CHUNKS = {"76B": 3, "145B": 2, "310B": 2, "530B": 3}
"""Chunks per device of interleaved pipelines, from the same source."""


@dataclass(frozen=True)
class Row:
    """Measured step.

    Attributes:
        model: group key: rows of a model must be on one side of a split.
        gpt: model with the size of one microbatch.
        batch: sequences per step.
        recomputed: True if layers are recomputed before their backward pass.
        overlapped: True if gradients are reduced during the backward pass of the last microbatch.
    """

    model: str
    gpt: Gpt
    devices: int
    batch: int
    data: int
    pipeline: int
    chunks: int
    recomputed: bool
    overlapped: bool
    measured_s: float

    @property
    def microbatches(self) -> int:
        return self.batch // self.data // self.gpt.micro

    @property
    def weights(self) -> float:
        """Weights on the device with most of them."""
        return self.gpt.layer_weights * self.gpt.layers / self.pipeline + self.gpt.embedding_weights

    def seconds(self, calibration: Calibration) -> float:
        """Return seconds of all microbatches, the gradient reduction and Adam's step."""
        chip = SELENE.chip
        optimizer_s = memory_s(OPTIMIZER_BYTES * self.weights, chip, calibration)
        return self._pipeline_s(calibration) + self._reduce_s(calibration) + optimizer_s

    def floor_s(self) -> float:
        """Return seconds of the model's products at peak rate, without recomputation."""
        gpt = self.gpt
        layer = 24 * gpt.hidden**2 + 4 * gpt.sequence * gpt.hidden
        operations = 3 * gpt.layers * layer + 6 * gpt.vocabulary * gpt.hidden
        rate = self.devices * SELENE.chip.flops["float16"]
        return self.batch * gpt.sequence * operations / rate

    def _pipeline_s(self, calibration: Calibration) -> float:
        parts = _parts(self.gpt, calibration)
        layer_s = parts.forward_s * (2 if self.recomputed else 1) + parts.backward_s
        stages = [layer_s * self.gpt.layers / self.pipeline] * self.pipeline
        stages[0] += parts.embedding_s
        stages[-1] += parts.head_s
        schedule: PublishedSchedule = "interleaved" if self.chunks > 1 else "1f1b"
        return step_s(schedule, stages, self.microbatches, self.chunks, self._send_s(calibration))

    def _send_s(self, calibration: Calibration) -> float:
        """Return seconds of a transfer between stages.

        Between hosts, each tensor-parallel device sends its part, followed by an all-gather
        (arXiv:2104.04473, section 4.1).
        """
        gpt = self.gpt
        nbytes = 2.0 * gpt.tokens * gpt.hidden
        if self.devices <= _NVLINK.size:
            return send_s(nbytes, 0, SELENE, calibration)
        gather_s = all_gather_s(nbytes, (gpt.tensor, 1), SELENE, calibration)
        return send_s(nbytes / gpt.tensor, 1, SELENE, calibration) + gather_s

    def _reduce_s(self, calibration: Calibration) -> float:
        inside = min(self.data, max(1, _NVLINK.size // self.gpt.tensor))
        extent = (inside, self.data // inside)
        reduce_s = all_reduce_s(2 * self.weights, extent, SELENE, calibration)
        if self.overlapped:
            backward_s = _parts(self.gpt, calibration).backward_s * self.gpt.layers
            return max(reduce_s - backward_s, 0)
        return reduce_s + self._tied_s(calibration)

    def _tied_s(self, calibration: Calibration) -> float:
        """Return seconds of the sum of embedding gradients of the first and the last stage."""
        if self.pipeline == 1:
            return 0.0
        extent = (2, 1) if self.devices <= _NVLINK.size else (1, 2)
        return all_reduce_s(2 * self.gpt.embedding_weights, extent, SELENE, calibration)


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a microbatch on one device."""

    forward_s: float
    backward_s: float
    embedding_s: float
    head_s: float


@cache
def _parts(gpt: Gpt, calibration: Calibration) -> Parts:
    extent: Extent = (gpt.tensor, 1)
    return Parts(
        layer_forward(gpt).seconds(extent, SELENE, calibration),
        layer_backward(gpt).seconds(extent, SELENE, calibration),
        embedding(gpt).seconds(extent, SELENE, calibration),
        head(gpt).seconds(extent, SELENE, calibration),
    )


def forget() -> None:
    """Discard the cached times of calibrations that were only tried."""
    _parts.cache_clear()


def table(name: str) -> list[dict[str, str]]:
    with (REFERENCE / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def one_host() -> list[Row]:
    """Return 1,440 measured steps of eight models on 2 to 8 A100s of one host (vTrain).

    Nothing is recomputed. Constants fitted to these rows alone also give the times of `megatron`,
    with full recomputation. With one device per layer the vocabulary is not padded, and the
    products of the logits then take twice as long per operation.
    """
    return [_one_host(row) for row in table("a100_one_node_measured")]


def megatron() -> list[Row]:
    """Return ten models of 1.7 to 1,008 billion parameters on A100s (arXiv:2104.04473)."""
    return [_megatron(row) for row in table("megatron_sc21_table1")]


def _one_host(row: dict[str, str]) -> Row:
    sizes: dict[str, Any] = {name: int(value) for name, value in row.items() if value.isdigit()}
    tensor = sizes["tensor_parallelism"]
    wide = _MULTIPLE * tensor
    return Row(
        model=f"{sizes['hidden_size']} x {sizes['n_layers']}",
        gpt=Gpt(
            hidden=sizes["hidden_size"],
            heads=sizes["attention_heads"],
            layers=sizes["n_layers"],
            sequence=sizes["sequence_length"],
            vocabulary=_GPT2_VOCABULARY if tensor == 1 else -(-_GPT2_VOCABULARY // wide) * wide,
            micro=sizes["micro_batch"],
            tensor=tensor,
        ),
        devices=sizes["n_gpus"],
        batch=sizes["global_batch"],
        data=sizes["data_parallelism"],
        pipeline=sizes["pipeline_parallelism"],
        chunks=1,
        recomputed=False,
        overlapped=False,
        measured_s=float(row["iteration_time_(ms)"]) / 1e3,
    )


def _megatron(row: dict[str, str]) -> Row:
    name = row["model"]
    return Row(
        model=name,
        gpt=Gpt(
            hidden=int(row["hidden"]),
            heads=int(row["attn_heads"]),
            layers=int(row["layers"]),
            sequence=int(row["seq_len"]),
            vocabulary=int(row["vocab"]),
            micro=_MICRO.get(name, 1),
            tensor=int(row["tp"]),
        ),
        devices=int(row["n_gpus"]),
        batch=int(row["global_batch"]),
        data=int(row["dp_derived"]),
        pipeline=int(row["pp"]),
        chunks=_CHUNKS.get(name, 1),
        recomputed=True,
        overlapped=int(row["pp"]) == 1,
        measured_s=float(row["iter_time_s_by_eq3_derived"]),
    )
