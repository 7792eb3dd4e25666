"""Step time and stored microbatches of published pipeline schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from nbdist.errors import PlanError
from nbdist.planner.graph.pipeline_schedule import rounds_fault

if TYPE_CHECKING:
    from collections.abc import Sequence

PublishedSchedule = Literal["gpipe", "1f1b", "interleaved"]


def step_s(
    schedule: PublishedSchedule,
    stages: Sequence[float],
    microbatches: int,
    chunks: int = 1,
    send_s: float = 0.0,
) -> float:
    """Return the seconds of forward and backward passes of all microbatches through all stages.

    The slowest stage is busy with every microbatch, and waits once for the other stages: before its
    first microbatch and after its last. For p equal stages this bubble is (p - 1)/m of the ideal
    time, under GPipe and under 1F1B. It is 1/v of that if a device has v chunks of layers
    (interleaved).

    Args:
        schedule: name of the schedule.
        stages: seconds of one microbatch, forward and backward, on each stage.
        microbatches: number of microbatches in a step.
        chunks: parts of the model on each device; 1 unless interleaved.
        send_s: seconds that a stage waits for one transfer to its neighbour; each microbatch is
            sent once forward and once backward for every chunk.

    Raises:
        PlanError: the schedule does not allow these numbers.

    Source: Huang et al., arXiv:1811.06965, section 2.3 (GPipe). Narayanan et al., PipeDream, SOSP
    2019, and arXiv:2006.09503 with a flush (1F1B). Narayanan et al., arXiv:2104.04473, section 2.2
    (interleaved).
    """
    _refuse(schedule, len(stages), microbatches, chunks)
    slowest = max(stages)
    bubble_s = (sum(stages) - slowest) / chunks
    return microbatches * slowest + bubble_s + send_s * _sends(len(stages), microbatches, chunks)


def in_flight(
    schedule: PublishedSchedule, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> float:
    """Return the largest number of microbatches whose activations a stage holds.

    GPipe holds all. 1F1B starts the backward pass when the first microbatch leaves the last stage:
    p - stage. Interleaved, each of v chunks holds 1/v of the layers, and 2 (p - stage - 1) + (v -
    1) p + 1 of them are in flight. Stages count from 0.

    Source: arXiv:2104.04473, section 2.2.1 (1F1B), section 2.2.2 and Megatron-LM's schedule
    (interleaved).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b" or chunks == 1:
        return min(microbatches, stages - stage)
    warm = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(microbatches * chunks, warm) / chunks


def _sends(stages: int, microbatches: int, chunks: int) -> int:
    """Return the transfers in sequence: to the last stage and back, then two per microbatch."""
    return 0 if stages == 1 else 2 * (chunks * microbatches + stages - 2)


def _refuse(schedule: PublishedSchedule, stages: int, microbatches: int, chunks: int) -> None:
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise PlanError(
            f"a pipeline needs at least one stage, microbatch and chunk, not {stages}, "
            f"{microbatches} and {chunks}"
        )
    if schedule != "interleaved" and chunks > 1:
        raise PlanError(f"{chunks} chunks a device need the interleaved schedule, not {schedule}")
    if chunks > 1 and (fault := rounds_fault(stages, microbatches)):
        raise PlanError(fault)
