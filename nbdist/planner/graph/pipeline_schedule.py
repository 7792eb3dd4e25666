"""Schedules of pipelines: ticks, idle time, stored results, and checks of sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


SEPARATE_ROUNDS = (
    "layers that are applied one by one run in one round: use rounds=1, or put the layers into a "
    "scan over stacked parameters"
)
"""Reason why layers whose parameters are separate arrays have no several rounds."""


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle time of equal stages over the ideal time: (p - 1)/(v m), arXiv:2104.04473."""
    return (stages - 1) / (chunks * microbatches)


def ticks(stages: int, microbatches: int, rounds: int = 1) -> int:
    """Return the ticks until the last microbatch has left the last stage, in one direction."""
    return rounds * microbatches + stages - 1


def block_size(layers: int, stages: int, rounds: int = 1) -> int:
    """Return the layers of a block; if they do not divide, some stages have one layer less."""
    return -(-layers // (stages * rounds))


def shared_dimension(sizes: Sequence[int], stages: int, layers: int = 0) -> int:
    """Return the dimension by which stages store a stack of layers that they do not divide.

    It is the largest one that they divide, the first one of equal ones.

    Args:
        sizes: sizes of the stack.
        stages: number of stages.
        layers: the dimension of the layers.

    Returns:
        The dimension, or -1 if no dimension divides. Each stage then stores the whole stack.
    """
    fitting = (dim for dim, size in enumerate(sizes) if dim != layers and size % stages == 0)
    return max(fitting, key=lambda dim: (sizes[dim], -dim), default=-1)


def rows_fault(rows: int, micro: int) -> str:
    """Return why a batch does not divide into microbatches; empty if it does."""
    if rows and rows % micro == 0:
        return ""
    fitting = [str(number) for number in range(1, rows + 1) if rows % number == 0]
    choice = f"use a micro of {', '.join(fitting)}, or " if fitting else "use "
    return f"{rows} rows do not divide into micro={micro}: {choice}{_near(rows, micro)} rows"


def layers_fault(layers: int, stages: int, rounds: int = 1) -> str:
    """Return why layers do not divide into the blocks of all stages; empty if they do."""
    blocks = stages * rounds
    if layers and layers % blocks == 0:
        return ""
    times = f" x {rounds} rounds" if rounds > 1 else ""
    return (
        f"{layers} layers do not divide into {stages} stages{times}: stack {_near(layers, blocks)}"
    )


def stages_fault(layers: int, stages: int, rounds: int = 1) -> str:
    """Return why layers cannot be assigned to stages; empty if they can.

    In one round, some stages may have one layer less. Several rounds need equal blocks.
    """
    if rounds > 1:
        return layers_fault(layers, stages, rounds)
    if layers >= stages:
        return ""
    return f"{layers} layers are too few for {stages} stages: use {layers} stages or fewer"


def rounds_fault(stages: int, micro: int) -> str:
    """Return why microbatches cannot run in several rounds, in groups of one per stage."""
    if micro % stages == 0:
        return ""
    return (
        f"several rounds need a multiple of the {stages} stages as micro, not {micro}: use "
        f"{_near(micro, stages)}"
    )


def _near(count: int, block: int) -> str:
    """Return the multiples next to a number."""
    below = count // block * block
    return f"{below} or {below + block}" if below else str(block)


def room(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Return how many results of a chunk each stage stores under the 1F1B of `jaxpr/pipeline`.

    All stages run forward and backward in each tick. So the first stage starts the backward pass of
    its first chunk after 2 (v p - 1) ticks. It stores at most the results of all v m + p - 1 ticks.
    """
    return min(2 * chunks * stages - 1, ticks(stages, microbatches, chunks))
