"""How long a step of a pipeline takes, and how many microbatches a stage holds at a time."""

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
    """Seconds of forward and backward of `microbatches` through all stages.

    The slowest stage is busy with every microbatch; before its first and after its last it waits
    once for the others. For p equal stages that bubble is (p - 1)/m of the ideal time, under GPipe
    (Huang et al., arXiv:1811.06965, section 2.3) as under 1F1B (Narayanan et al., PipeDream, SOSP
    2019; with a flush, arXiv:2006.09503), and 1/v of it where a device has v chunks of layers
    (interleaved; Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        schedule: which.
        stages: seconds of one microbatch, forward and backward, on each stage.
        microbatches: in a step.
        chunks: parts of the model on each device; one but where interleaved.
        send_s: seconds that a stage waits for one transfer to its neighbour; each microbatch is
            sent on once forward and once backward for every chunk.

    Raises:
        PlanError: the schedule cannot be had with these numbers.
    """
    _refuse(schedule, len(stages), microbatches, chunks)
    slowest = max(stages)
    bubble_s = (sum(stages) - slowest) / chunks
    return microbatches * slowest + bubble_s + send_s * _sends(len(stages), microbatches, chunks)


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Time that equal stages wait, over the ideal time: (p - 1)/(v m), arXiv:2104.04473."""
    return (stages - 1) / (chunks * microbatches)


def in_flight(
    schedule: Schedule, stage: int, stages: int, microbatches: int, chunks: int = 1
) -> float:
    """Microbatches whose activations `stage`, counted from 0, keeps at its fullest.

    GPipe keeps all. 1F1B begins backward when the first microbatch has come through: p - stage
    (arXiv:2104.04473, section 2.2.1). Interleaved, each of v chunks holds 1/v of the layers:
    2 (p - stage - 1) + (v - 1) p + 1 of them are under way (section 2.2.2 and Megatron-LM's
    schedule).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b" or chunks == 1:
        return min(microbatches, stages - stage)
    warm = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return min(microbatches * chunks, warm) / chunks


def room(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Times that each stage has room for what a chunk's layers leave, under our 1F1B.

    All stages go forward and back in each tick, so that the first one has a microbatch back in its
    first chunk after 2 (v p - 1) ticks; of all v m + p - 1 ticks there is room at most.
    """
    return min(2 * chunks * stages - 1, chunks * microbatches + stages - 1)


def _sends(stages: int, microbatches: int, chunks: int) -> int:
    """Transfers one after the other: to the last stage and back, then two for each that follows."""
    return 0 if stages == 1 else 2 * (chunks * microbatches + stages - 2)


def _refuse(schedule: Schedule, stages: int, microbatches: int, chunks: int) -> None:
    if stages < 1 or microbatches < 1 or chunks < 1:
        raise PlanError(
            f"A pipeline has at least one stage, microbatch and chunk, not {stages}, "
            f"{microbatches} and {chunks}."
        )
    if schedule != "interleaved" and chunks > 1:
        raise PlanError(f"{chunks} chunks a device need the interleaved schedule, not {schedule}.")
    if chunks > 1 and microbatches % stages:
        more = stages * -(-microbatches // stages)
        raise PlanError(
            "Interleaved stages take microbatches in turns of as many as there are stages: "
            f"{microbatches} is not a multiple of {stages}; take {more}."
        )
