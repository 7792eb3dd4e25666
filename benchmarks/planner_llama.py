"""Measured step times of Llama 3 layers on eight B200s, against the cost model.

`benchmarks.planner_memory` describes the measurements. Nothing is recomputed or overlapped.
Activations outside attention and MLP are sharded along the sequence (Korthikanti et al.,
arXiv:2205.05198), with all-gathers and reduce-scatters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pipeline_schedules import step_s
from benchmarks.planner_rows import table
from nbdist.planner.cost.collectives import all_gather_s, reduce_scatter_s, send_s
from nbdist.planner.cost.roofline import ITEM_BYTES, issued_s, matmul_s, memory_s
from nbdist.records.topology import Chip, Level, Topology

if TYPE_CHECKING:
    from nbdist.planner.hardware.efficiency import Calibration

B200 = Chip(
    name="B200",
    platform="gpu",
    memory_bytes=180 * 10**9,
    flops={"bfloat16": 2250e12},
    bytes_per_s=8e12,
    source="stas00/ml-engineering compute/accelerator/README.md",
)
_NVLINK = Level(name="host", size=8, latency_s=3.4e-6, bytes_per_s=900e9)
HOST = Topology(chip=B200, levels=(_NVLINK,))

_VOCABULARY = 128256
_WIDTH = 128
"""Width of a head."""

_LOSS_BYTES = 12
"""Bytes per logit in a fused cross entropy: read twice forward, read and written backward."""

_OPTIMIZER_BYTES = 34
"""Bytes per weight that a device updates.

The 4-byte gradient is read for the norm and for the step (8). Adam's three states are read and
written (24). The weight is written (2).
"""

_SIZES = {"llama3_70b": (8192, 1024, 28672), "llama3_405b": (16384, 2048, 53248)}
"""Hidden width, width of all keys, and width of the MLP."""


@dataclass(frozen=True)
class LlamaRow:
    """Measured step of `microbatches` sequences of `length` on each replica."""

    model: str
    hidden: int
    keys: int
    wide: int
    layers: int
    length: int
    tensor: int
    pipeline: int
    data: int
    microbatches: int
    measured_s: float

    def seconds(self, calibration: Calibration) -> float:
        """Return seconds of the pipeline, the gradients, the optimizer and the all-gather."""
        layer_s = self._forward_s(calibration) + self._backward_s(calibration)
        stages = [layer_s * self.layers / self.pipeline] * self.pipeline
        stages[0] += memory_s(12 * self._activation, B200, calibration)
        stages[-1] += self._head_s(calibration)
        sent_s = send_s(2 * self._activation, 0, HOST, calibration)
        steps_s = step_s("1f1b", stages, self.microbatches, send_s=sent_s)
        return steps_s + self._update_s(calibration)

    def floor_s(self) -> float:
        """Seconds of the products at peak rate."""
        layer = sum(m * n * k for m, n, k in self._products) * self.tensor
        attention = self.length**2 * self.hidden
        head = self.length * _VOCABULARY * self.hidden
        operations = 6 * (self.layers * (layer + attention) + head) * self.microbatches
        return operations / (self.tensor * self.pipeline * B200.flops["bfloat16"])

    @property
    def _activation(self) -> float:
        """Elements per device of the activations between layers."""
        return self.length * self.hidden / self.tensor

    @property
    def _products(self) -> list[tuple[int, int, int]]:
        """Query, keys and values, projection, gate and up projection, down projection."""
        return [
            (self.length, (self.hidden + 2 * self.keys) // self.tensor, self.hidden),
            (self.length, self.hidden, self.hidden // self.tensor),
            (self.length, 2 * self.wide // self.tensor, self.hidden),
            (self.length, self.hidden, self.wide // self.tensor),
        ]

    def _forward_s(self, calibration: Calibration) -> float:
        """Forward seconds. Norms, rotations, residuals and the gate are memory streams."""
        activation, inner = self._activation, self.length * self.wide / self.tensor
        turned = self.length * (self.hidden + self.keys) / self.tensor
        streams = [4 * activation] * 2 + [6 * activation] * 2 + [4 * turned, 6 * inner]
        return self._issued_s(self._products, streams, 4, calibration, backward=False)

    def _backward_s(self, calibration: Calibration) -> float:
        """Backward seconds. Weight gradients are summed in 4 bytes. All-gathers are repeated."""
        activation, inner = self._activation, self.length * self.wide / self.tensor
        turned = self.length * (self.hidden + self.keys) / self.tensor
        streams = [10 * activation] * 2 + [6 * activation] * 2 + [4 * turned, 10 * inner]
        streams += [8.0 * n * k for _, n, k in self._products]
        return self._issued_s(_turned(self._products), streams, 6, calibration, backward=True)

    def _issued_s(
        self,
        products: list[tuple[int, int, int]],
        streams: list[float],
        gathers: int,
        calibration: Calibration,
        *,
        backward: bool,
    ) -> float:
        heads = self.hidden // _WIDTH // self.tensor
        whole = 2.0 * self.length * self.hidden
        gathers = gathers if self.tensor > 1 else 0
        device_s = (
            sum(matmul_s(1, *sizes, "bfloat16", B200, calibration) for sizes in products)
            + sum(memory_s(nbytes, B200, calibration) for nbytes in streams)
            + gathers * all_gather_s(whole, (self.tensor,), HOST, calibration)
            + _attention_s(heads, self.length, calibration, backward=backward)
        )
        operations = len(products) + len(streams) + 1
        return issued_s(device_s, operations, {self.tensor: gathers}, calibration)

    def _head_s(self, calibration: Calibration) -> float:
        columns = _VOCABULARY // self.tensor
        logits = (self.length, columns, self.hidden)
        streams = (_LOSS_BYTES * self.length * columns, 8.0 * columns * self.hidden)
        return sum(
            matmul_s(1, *sizes, "bfloat16", B200, calibration)
            for sizes in [logits, *_turned([logits])]
        ) + sum(memory_s(nbytes, B200, calibration) for nbytes in streams)

    def _update_s(self, calibration: Calibration) -> float:
        layer = sum(n * k for _, n, k in self._products)
        ends = 2 if self.pipeline == 1 else 1
        embedding = ends * _VOCABULARY * self.hidden / self.tensor
        weights = layer * self.layers / self.pipeline + embedding
        return (
            reduce_scatter_s(4 * weights, (self.data,), HOST, calibration)
            + memory_s(_OPTIMIZER_BYTES * weights / self.data, B200, calibration)
            + all_gather_s(2 * weights, (self.data,), HOST, calibration)
        )


def llama() -> list[LlamaRow]:
    """Three numbers of microbatches in four layouts of two models, without sequence splitting."""
    rows = table("simumax_b200_real_vs_pred")
    return [_row(row) for row in rows if row["case"].startswith("llama") and row["cp"] == "1"]


def _row(row: dict[str, str]) -> LlamaRow:
    model = next(name for name in _SIZES if row["case"].startswith(name))
    hidden, keys, wide = _SIZES[model]
    return LlamaRow(
        model=model,
        hidden=hidden,
        keys=keys,
        wide=wide,
        layers=int(row["layers"]),
        length=int(row["seq_len"].rstrip("?")),
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        data=int(row["dp"]),
        microbatches=int(row["micro_batch_count"]),
        measured_s=float(row["real_ms"]) / 1e3,
    )


def _turned(products: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the two backward products of each forward product."""
    return [turned for m, n, k in products for turned in ((m, k, n), (k, n, m))]


def _attention_s(heads: int, length: int, calibration: Calibration, *, backward: bool) -> float:
    """Return the seconds of causal attention whose scores stay on the chip.

    Tiles of masked scores, which are half of all, are skipped. There are two products in the
    forward pass, and five in the backward pass with recomputed scores (Dao, arXiv:2307.08691,
    sections 2.3 and 3.1).
    """
    products, tensors = (5, 8) if backward else (2, 4)
    operations = products * heads * length**2 * _WIDTH
    work_s = operations / (B200.flops["bfloat16"] * calibration.matmul_ceiling)
    nbytes = tensors * heads * length * _WIDTH * ITEM_BYTES["bfloat16"]
    return max(calibration.kernel_s + work_s, memory_s(nbytes, B200, calibration))
