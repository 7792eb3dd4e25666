"""Overlap of collectives with operations, as XLA's latency-hiding scheduler arranges it.

XLA orders the operations of one computation: the body of a loop, or the rest of a step. An
asynchronous collective overlaps with operations between its start and its end that do not depend on
it. Three kinds of collectives differ:

- **Parameters** (ZeRO-3) are there at the start of an iteration. Their gathers overlap with all
  operations, except for the first gather, because the first product needs it.
- **Sums over the batch** overlap with the products for gradients of other parameters. The last one
  follows all products.
- **Sums of activations** (tensor parallelism) hold up the next layer. They overlap only with
  products for gradients of parameters, so they do not overlap in the forward pass.

Source: schedules of compiled steps (docs/planner_internals.md, "Overlap").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.records import Chip

ASYNCHRONOUS_GATHERS = ("TPU v5e",)
"""TPUs on which gathers of the backward pass overlap. On v5p they do not; others are assumed to be
like v5p."""

COMBINED_BYTES = 30 * 2**20
"""Bytes of results up to which XLA combines collectives into one: `kDefaultThreshold` of
`xla_gpu_all_gather_combine_threshold_bytes` and others, openxla/xla debug_options_flags.cc."""


@dataclass
class Messages:
    """Collectives of one kind in a section.

    Attributes:
        seconds: their duration in all iterations.
        count: arrays that are sent in one iteration.
        nbytes: bytes of the results in one iteration.
    """

    seconds: float = 0.0
    count: int = 0
    nbytes: float = 0.0

    def add(self, seconds: float, nbytes: float) -> None:
        self.seconds += seconds
        self.count += 1
        self.nbytes += nbytes

    @property
    def combined_s(self) -> float:
        """Seconds of one message of each iteration, after XLA for GPUs has combined them."""
        return self.seconds / max(1, min(self.count, self.nbytes // COMBINED_BYTES))

    @property
    def single_s(self) -> float:
        """Seconds of one array of each iteration."""
        return self.seconds / max(1, self.count)


class Section:
    """Operations and collectives that XLA schedules together, in all iterations.

    Attributes:
        reads: numbers of the values that a loop goes over.
        times: iterations of the loop.
        work_s: seconds of operations.
        gradients_s: seconds of products for gradients of parameters, part of `work_s`.
        gathers: parameters that are gathered.
        sums: sums over the batch.
        activations_s: seconds of collectives of activations.
    """

    def __init__(self, reads: frozenset[int] = frozenset(), times: int = 1) -> None:
        self.reads = reads
        self.times = times
        self.work_s = 0.0
        self.gradients_s = 0.0
        self.gathers = Messages()
        self.sums = Messages()
        self.activations_s = 0.0

    def hidden_s(self, chip: Chip) -> tuple[float, float]:
        """Return the seconds of collectives that overlap: of the data axis, of the model axis."""
        if chip.platform == "gpu":
            return self._on_gpus()
        if chip.platform == "tpu" and not self.activations_s:
            return self._divided(chip), 0.0
        return 0.0, 0.0

    def _on_gpus(self) -> tuple[float, float]:
        activations_s = min(self.activations_s, self.gradients_s)
        sums_s = min(self.sums.seconds - self.sums.combined_s, self.gradients_s - activations_s)
        free_s = self.work_s - activations_s - sums_s
        gathers_s = min(self.gathers.seconds - self.gathers.combined_s, free_s)
        return sums_s + gathers_s, activations_s

    def _divided(self, chip: Chip) -> float:
        """Return the seconds that products hide of their own collectives.

        XLA for TPUs divides a gather of the forward pass, or a sum of gradients. It computes a part
        of the product while it sends the next part. If the model axis sums results as well, it
        divides nothing.

        Source: Wang et al., "Overlap communication with dependent computation via decomposition in
        large deep learning models", ASPLOS 2023.
        """
        sums_s = min(self.sums.seconds, self.gradients_s)
        gathers_s = self.gathers.seconds
        if self.gradients_s:
            is_overlapped = chip.name.startswith(ASYNCHRONOUS_GATHERS)
            gathers_s = (gathers_s - self.gathers.single_s) * is_overlapped
        return sums_s + min(gathers_s, self.work_s - sums_s)
