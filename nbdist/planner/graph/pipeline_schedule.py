"""Schedules of pipelines: ticks, step time, microbatches in flight, and checks of sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

Schedule = Literal["gpipe", "1f1b", "interleaved"]


def step_s(
    schedule: Schedule,
    stages: Sequence[float],
    microbatches: int,
    chunks: int = 1,
    send_s: float = 0.0,
) -> float:
    """Return the seconds of forward and backward passes of all microbatches through all stages.

    The slowest stage is busy with every microbatch, and waits once for the other stages: before its
    first microbatch and after its last. For p equal stages this bubble is (p - 1)/m of the ideal
    time, under GPipe (Huang et al., arXiv:1811.06965, section 2.3) and under 1F1B (Narayanan et
    al., PipeDream, SOSP 2019; with a flush, arXiv:2006.09503). It is 1/v of that if a device has v
    chunks of layers (interleaved; Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        schedule: name of the schedule.
        stages: seconds of one microbatch, forward and backward, on each stage.
        microbatches: number of microbatches in a step.
        chunks: parts of the model on each device; 1 unless interleaved.
        send_s: seconds that a stage waits for one transfer to its neighbour; each microbatch is
            sent once forward and once backward for every chunk.

    Raises:
        PlanError: the schedule does not allow these numbers.
    """
    _refuse(schedule, len(stages), microbatches, chunks)
    slowest = max(stages)
    bubble_s = (sum(stages) - slowest) / chunks
    return microbatches * slowest + bubble_s + send_s * _sends(len(stages), microbatches, chunks)


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle time of equal stages over the ideal time: (p - 1)/(v m), arXiv:2104.04473."""
    return (stages - 1) / (chunks * microbatches)


def in_flight(
    schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> float:
    """Return the largest number of microbatches whose activations a stage holds.

    GPipe holds all. 1F1B starts the backward pass when the first microbatch leaves the last stage:
    p - stage (arXiv:2104.04473, section 2.2.1). Interleaved, each of v chunks holds 1/v of the
    layers, and 2 (p - stage - 1) + (v - 1) p + 1 of them are in flight (section 2.2.2 and
    Megatron-LM's schedule). Stages count from 0.
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b" or chunks == 1:
        return min(microbatches, stages - stage)
    warm = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(microbatches * chunks, warm) / chunks


def ticks(stages: int, microbatches: int, rounds: int = 1) -> int:
    """Return the ticks until the last microbatch has left the last stage, in one direction."""
    return rounds * microbatches + stages - 1


def rows_fault(rows: int, micro: int) -> str:
    """Return why a batch does not divide into microbatches; empty if it does."""
    if rows and rows % micro == 0:
        return ""
    fitting = [str(number) for number in range(1, rows + 1) if rows % number == 0]
    choice = f"take a micro of {', '.join(fitting)}, or " if fitting else "take "
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


def rounds_fault(stages: int, micro: int) -> str:
    """Return why microbatches cannot run in several rounds, in groups of one per stage."""
    if micro % stages == 0:
        return ""
    return (
        f"several rounds need a multiple of the {stages} stages as micro, not {micro}: take "
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


def _sends(stages: int, microbatches: int, chunks: int) -> int:
    """Return the transfers in sequence: to the last stage and back, then two per microbatch."""
    return 0 if stages == 1 else 2 * (chunks * microbatches + stages - 2)


def _refuse(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> None:
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise PlanError(
            f"a pipeline needs at least one stage, microbatch and chunk, not {stages}, "
            f"{microbatches} and {chunks}"
        )
    if schedule != "interleaved" and chunks > 1:
        raise PlanError(f"{chunks} chunks a device need the interleaved schedule, not {schedule}")
    if chunks > 1 and (fault := rounds_fault(stages, microbatches)):
        raise PlanError(fault)
