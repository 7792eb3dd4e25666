"""Operations of one device in a step of a GPT under Megatron-LM.

Sources: Shoeybi et al., arXiv:1909.08053 (sharding of a layer and its four all-reduces), Narayanan
et al., arXiv:2104.04473 (pipelines, recomputation, fused kernels), Korthikanti et al.,
arXiv:2205.05198 (bytes that a layer reads and writes). Activations, weights and gradients take 2
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from nbdist.planner.cost.collectives import all_reduce_s
from nbdist.planner.cost.roofline import issued_s, matmul_s, memory_s

if TYPE_CHECKING:
    from nbdist.planner.hardware.efficiency import Calibration
    from nbdist.records.topology import Extent, Topology

LOSS_BYTES = 52
"""Bytes per logit in Megatron-LM's vocab-parallel cross entropy.

Forward: cast to 4 bytes, maximum, difference, exponential, sum and quotient. Backward: scaled copy
and cast back.
"""

OPTIMIZER_BYTES = 30
"""Bytes per weight in mixed precision.

The gradient is read for its norm and for the step (4). Adam's three states of 4 bytes are read and
written (24). The weight is written (2).
"""


@dataclass(frozen=True)
class Gpt:
    """Model and size of one microbatch.

    Attributes:
        vocabulary: rows of the embedding, over all devices of a tensor-parallel group.
        micro: sequences per microbatch.
        tensor: devices that share each layer.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    micro: int
    tensor: int

    @property
    def tokens(self) -> int:
        return self.micro * self.sequence

    @property
    def layer_weights(self) -> int:
        """Weights of one layer on one device."""
        return 12 * self.hidden**2 // self.tensor + 9 * self.hidden

    @property
    def embedding_weights(self) -> int:
        """Weights of the embeddings on one device."""
        return self.hidden * (self.vocabulary // self.tensor + self.sequence)


@dataclass(frozen=True)
class Work:
    """Operations of one device, executed one after another.

    Attributes:
        products: (batch, m, n, k) of each matrix product.
        streams: bytes that each other operation reads and writes.
        reduces: bytes of each all-reduce among the tensor-parallel devices.
    """

    products: tuple[tuple[int, int, int, int], ...]
    streams: tuple[float, ...]
    reduces: tuple[float, ...] = ()

    def seconds(self, extent: Extent, topology: Topology, calibration: Calibration) -> float:
        chip = topology.chip
        device_s = (
            sum(matmul_s(*sizes, "bfloat16", chip, calibration) for sizes in self.products)
            + sum(memory_s(nbytes, chip, calibration) for nbytes in self.streams)
            + sum(all_reduce_s(n, extent, topology, calibration) for n in self.reduces)
        )
        operations = len(self.products) + len(self.streams)
        collectives = {prod(extent): len(self.reduces)}
        return issued_s(device_s, operations, collectives, calibration)


def layer_forward(gpt: Gpt) -> Work:
    """Layer norm, attention, dropout and residual, then layer norm, MLP, dropout and residual."""
    tokens, hidden, tensor = gpt.tokens, gpt.hidden, gpt.tensor
    activation = tokens * hidden
    scores = gpt.micro * gpt.heads // tensor * gpt.sequence**2
    return Work(
        products=_products(gpt),
        streams=(
            4 * activation,  # layer norm
            4 * scores,  # scale, mask and softmax, fused
            5 * scores,  # dropout, with its mask of a byte
            4 * activation / tensor,  # the context, in the order of tokens
            7 * activation,  # bias, dropout and residual, fused
            4 * activation,
            16 * activation / tensor,  # bias and GeLU, fused
            7 * activation,
        ),
        reduces=_reduces(gpt),
    )


def layer_backward(gpt: Gpt) -> Work:
    """Two products per forward product. Weight gradients are added to existing ones."""
    tokens, hidden, tensor = gpt.tokens, gpt.hidden, gpt.tensor
    activation = tokens * hidden
    scores = gpt.micro * gpt.heads // tensor * gpt.sequence**2
    weights = 6 * hidden**2 / tensor
    return Work(
        products=tuple(
            product
            for batch, m, n, k in _products(gpt)
            for product in ((batch, m, k, n), (batch, k, n, m))
        ),
        streams=(
            *(2 * (6 + 4) * activation / 2,) * 2,  # layer norms: input, and scale and shift
            6 * scores,  # softmax
            5 * scores,  # dropout
            4 * activation / tensor,
            12 * activation / tensor,  # gradients of query, key and value, put together
            *(5 * activation,) * 2,  # dropouts
            *(6 * activation,) * 2,  # both sides of a residual
            24 * activation / tensor,  # GeLU
            *(2 * activation,) * 2,  # gradients of the biases
            6 * activation / tensor,
            8 * activation / tensor,
            *(weights, 3 * weights, 4 * weights, 4 * weights),
            *(6 * hidden,) * 8,  # biases, scales and shifts
        ),
        reduces=_reduces(gpt),
    )


def embedding(gpt: Gpt) -> Work:
    """Forward and backward pass of the word and position embeddings."""
    activation = gpt.tokens * gpt.hidden
    return Work(
        products=(),
        streams=(
            4 * activation,
            6 * activation,
            5 * activation,  # dropout
            5 * activation,
            4 * activation,
            2 * gpt.embedding_weights,  # a dense gradient, of zeros at first
            6 * gpt.embedding_weights,
        ),
        reduces=_reduces(gpt)[:1],
    )


def head(gpt: Gpt) -> Work:
    """Forward and backward pass of the last layer norm, the logits and the loss."""
    activation = gpt.tokens * gpt.hidden
    columns = gpt.vocabulary // gpt.tensor
    few = 4.0 * gpt.tokens
    return Work(
        products=(
            (1, gpt.tokens, columns, gpt.hidden),
            (1, gpt.tokens, gpt.hidden, columns),
            (1, gpt.hidden, columns, gpt.tokens),
        ),
        streams=(
            4 * activation,
            10 * activation,
            *(LOSS_BYTES * gpt.tokens * columns / 10,) * 10,
            6 * gpt.embedding_weights,
        ),
        reduces=(*_reduces(gpt)[:1], few, few, few) if gpt.tensor > 1 else (),
    )


def _products(gpt: Gpt) -> tuple[tuple[int, int, int, int], ...]:
    """Query, key and value, scores, context, projection, and both layers of the MLP."""
    tokens, hidden, tensor, length = gpt.tokens, gpt.hidden, gpt.tensor, gpt.sequence
    heads, width = gpt.micro * gpt.heads // tensor, hidden // gpt.heads
    return (
        (1, tokens, 3 * hidden // tensor, hidden),
        (heads, length, length, width),
        (heads, length, width, length),
        (1, tokens, hidden, hidden // tensor),
        (1, tokens, 4 * hidden // tensor, hidden),
        (1, tokens, hidden, 4 * hidden // tensor),
    )


def _reduces(gpt: Gpt) -> tuple[float, ...]:
    """One all-reduce for attention and one for the MLP, in either pass."""
    return (2.0 * gpt.tokens * gpt.hidden,) * 2 if gpt.tensor > 1 else ()
