"""Bytes that training takes on a B200, of layers of Llama 3 and DeepSeek under Megatron-LM.

How the rows were measured: MooreThreads/SimuMax docs/b200/b200_real_repro_guide.md and
simu_tools/megatron_scripts (Megatron-LM with Transformer Engine 2.11): one sequence a microbatch,
bfloat16, gradients added up in 4 bytes, optimizer states spread over data-parallel devices
(distributed optimizer), sequence parallelism, flash attention, nothing recomputed. `cef` is the
fused cross entropy. Peak of the allocator on the fullest device; the number of microbatches in a
step (`mbc`) does not change it. No constant is fitted, but what to count was found
with the rows in sight.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planner_rows import table
from nbdist.planner.graph.pipeline_schedule import in_flight

_KEPT_BYTES = 6
"""For each weight: itself (2) and its gradient (4)."""

_STATE_BYTES = 12
"""For each weight: its copy in 4 bytes and Adam's two moments."""

_LOGIT_BYTES = 6
"""The logits, in 2 bytes, and what the loss keeps of them, in 4."""

_ACTIVATION_BYTES = 2
_FLOOR_BYTES = 18
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Weights of layers, and elements that each keeps of a token until it goes backward.

    Attributes:
        dense: (weights, weights of experts, elements) of one layer of those that come first.
        later: the same of the others; experts' weights are those of all experts.
        first: how many are as `dense`.
    """

    hidden: int
    vocabulary: int
    dense: tuple[int, int, int]
    later: tuple[int, int, int]
    first: int


@dataclass(frozen=True)
class MemoryRow:
    """One measured peak, in bytes."""

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
        """Of the fullest stage."""
        return max(self._stage_bytes(stage) for stage in range(self.pipeline))

    def floor_bytes(self) -> float:
        """18 bytes a weight (arXiv:1910.02054, section 3.1), spread over those that share it."""
        model = self.model
        ours = [self._layer(index) for index in range(self.layers)]
        dense = 2 * model.vocabulary * model.hidden + sum(weights for weights, _, _ in ours)
        experts = sum(weights for _, weights, _ in ours) / self.expert
        return _FLOOR_BYTES * (dense / self.tensor + experts) / self.pipeline

    def _stage_bytes(self, stage: int) -> float:
        """Weights, gradients, optimizer states; activations of the microbatches under way; logits.

        What a layer keeps is Korthikanti et al., arXiv:2205.05198, without what flash attention,
        no dropout and no biases leave out.
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
        """Transformer Engine has an empty gradient for each shape of weight, in 2 bytes: the true
        ones are in Megatron-LM's buffers."""
        return 2 * self.model.later[0] / self.tensor


def memory_rows() -> list[MemoryRow]:
    """The published peaks, each layout once."""
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
    """Kept of a token: the layer's input, normed; query, keys and values; context; the residual,
    normed; the gate and what it gates; their product."""
    weights = 2 * hidden * (hidden + keys) + 3 * hidden * wide
    layer = (weights, 0, 6 * hidden + 2 * keys + 3 * wide)
    return Model(hidden, 128256, layer, layer, first=0)


def _deepseek(
    hidden: int, vocabulary: int, wide: int, experts: int, each: int, shared: int, chosen: int
) -> Model:
    """Multi-head latent attention of 128 heads (arXiv:2405.04434, section 2.1): queries through
    1,536 and keys and values through 512 dimensions, of which 64 turn with the position.

    Experts take as many tokens as if all were chosen alike, and are padded to that. Kept of a
    token for each expert it goes to: its copy, the gate and what it gates, their product.
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
