"""Memory of training on a B200: layers of Llama 3 and DeepSeek under Megatron-LM.

Source of the rows: MooreThreads/SimuMax docs/b200/b200_real_repro_guide.md and
simu_tools/megatron_scripts (Megatron-LM with Transformer Engine 2.11). They use one sequence per
microbatch, bfloat16, gradients summed in 4 bytes, a distributed optimizer, sequence parallelism and
flash attention, and recompute nothing. `cef` is the fused cross entropy. The figure is the
allocator's peak on the fullest device. The number of microbatches (`mbc`) does not change it. No
constant is fitted, but the counted terms were chosen with knowledge of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.pipeline_schedules import in_flight
from benchmarks.planner_rows import table

_KEPT_BYTES = 6
"""Bytes per weight: the weight (2) and its gradient (4)."""

_STATE_BYTES = 12
"""Bytes per weight: its 4-byte copy and Adam's two moments."""

_LOGIT_BYTES = 6
"""Bytes per logit: the logit (2), and the value kept by the loss (4)."""

_ACTIVATION_BYTES = 2
_FLOOR_BYTES = 18
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Weights of layers, and elements that each layer keeps per token until its backward pass.

    Attributes:
        dense: (weights, weights of experts, elements) of each of the first layers.
        later: the same for the other layers, with the weights of all experts.
        first: number of layers described by `dense`.
    """

    hidden: int
    vocabulary: int
    dense: tuple[int, int, int]
    later: tuple[int, int, int]
    first: int


@dataclass(frozen=True)
class MemoryRow:
    """Measured peak in bytes."""

    case: str
    model: Model
    layers: int
    sequence: int
    tensor: int
    pipeline: int
    data: int
    expert: int
    context: int
    microbatches: int
    measured_bytes: float

    def peak_bytes(self) -> float:
        """Return the bytes of the fullest stage."""
        return max(self._stage_bytes(stage) for stage in range(self.pipeline))

    def floor_bytes(self) -> float:
        """Return 18 bytes per weight (arXiv:1910.02054, section 3.1), divided by its devices."""
        model = self.model
        ours = [self._layer(index) for index in range(self.layers)]
        dense = 2 * model.vocabulary * model.hidden + sum(weights for weights, _, _ in ours)
        experts = sum(weights for _, weights, _ in ours) / self.expert
        return _FLOOR_BYTES * (dense / self.tensor + experts) / self.pipeline

    def _stage_bytes(self, stage: int) -> float:
        """Return bytes of weights, gradients, optimizer states, activations and logits.

        Activations are those of microbatches in flight. They follow Korthikanti et al.,
        arXiv:2205.05198, without those that flash attention and the absence of dropout and biases
        remove.
        """
        own = [self._layer(index) for index in self._own(stage)]
        ends = (stage == 0) + (stage == self.pipeline - 1)
        embedding = ends * self.model.vocabulary * self.model.hidden
        dense = (sum(weights for weights, _, _ in own) + embedding) / self.tensor
        experts = sum(weights for _, weights, _ in own) / self.expert
        elements = sum(kept for _, _, kept in own) * self._tokens / self.tensor
        held = in_flight("1f1b", stage, self.pipeline, self.microbatches)
        last = self._logits_bytes if stage == self.pipeline - 1 else 0
        return (
            self._weights_bytes(dense, self.data * self.context)
            + self._weights_bytes(experts, max(1, self.data * self.context // self.expert))
            + _ACTIVATION_BYTES * elements * held
            + last
            + self._empty_bytes
        )

    def _own(self, stage: int) -> range:
        each = self.layers // self.pipeline
        return range(stage * each, (stage + 1) * each)

    def _layer(self, index: int) -> tuple[int, int, int]:
        return self.model.dense if index < self.model.first else self.model.later

    @staticmethod
    def _weights_bytes(weights: float, shared: int) -> float:
        return weights * (_KEPT_BYTES + _STATE_BYTES / shared)

    @property
    def _tokens(self) -> int:
        return self.sequence // self.context

    @property
    def _logits_bytes(self) -> float:
        return _LOGIT_BYTES * self._tokens * self.model.vocabulary / self.tensor

    @property
    def _empty_bytes(self) -> float:
        """Return the bytes of Transformer Engine's unused gradients.

        It allocates one in 2 bytes per shape of weight, and Megatron-LM's buffers contain the
        actual ones.
        """
        return 2 * self.model.later[0] / self.tensor


def memory_rows() -> list[MemoryRow]:
    """Return the published peaks, each layout once."""
    rows = {row.case: row for row in map(_memory_row, table("simumax_b200_real_vs_pred"))}
    alike = {
        (row.model, row.sequence, row.tensor, row.pipeline, row.data, row.context): row
        for row in rows.values()
    }
    return list(alike.values())


def _memory_row(row: dict[str, str]) -> MemoryRow:
    sizes = {name: int(row[name]) for name in ("layers", "tp", "pp", "dp", "ep", "cp")}
    return MemoryRow(
        case=row["case"],
        model=next(model for name, model in _MODELS.items() if row["case"].startswith(name)),
        layers=sizes["layers"],
        sequence=int(row["seq_len"].rstrip("?")),
        tensor=sizes["tp"],
        pipeline=sizes["pp"],
        data=sizes["dp"],
        expert=sizes["ep"],
        context=sizes["cp"],
        microbatches=int(row["micro_batch_count"]),
        measured_bytes=float(row["real_alloc_GiB"]) * _GIB,
    )


def _llama(hidden: int, keys: int, wide: int) -> Model:
    """Return a Llama model.

    Kept per token: input of the layer and its norm, query, keys and values, context, residual and
    its norm, gate and up projection, and their product.
    """
    weights = 2 * hidden * (hidden + keys) + 3 * hidden * wide
    layer = (weights, 0, 6 * hidden + 2 * keys + 3 * wide)
    return Model(hidden, 128256, layer, layer, first=0)


def _deepseek(
    hidden: int, vocabulary: int, wide: int, experts: int, each: int, shared: int, chosen: int
) -> Model:
    """Return a DeepSeek model.

    Multi-head latent attention of 128 heads (arXiv:2405.04434, section 2.1) has queries of rank
    1,536, and keys and values of rank 512. 64 dimensions are rotated by position.

    Experts receive equal numbers of tokens, padded to that number. Kept per token and expert: its
    copy, gate and up projection, and their product.
    """
    query, latent, turning, heads = 1536, 512, 64, 128
    queries, values = heads * (128 + turning), heads * 128
    attention = (
        hidden * query
        + query * queries
        + hidden * (latent + turning)
        + latent * 2 * values
        + values * hidden
    )
    kept = 4 * hidden + 2 * query + 2 * latent + turning + 2 * queries + 3 * values
    return Model(
        hidden,
        vocabulary,
        dense=(attention + 3 * hidden * wide, 0, kept + 3 * wide),
        later=(
            attention + 3 * hidden * shared + hidden * experts,
            3 * hidden * each * experts,
            kept + 3 * shared + chosen * (hidden + 3 * each),
        ),
        first=1,
    )


_MODELS = {
    "llama3_70b": _llama(8192, 1024, 28672),
    "llama3_405b": _llama(16384, 2048, 53248),
    "deepseekv2": _deepseek(5120, 102400, 12288, experts=160, each=1536, shared=3072, chosen=6),
    "deepseekv3": _deepseek(7168, 129280, 18432, experts=256, each=2048, shared=2048, chosen=8),
}
