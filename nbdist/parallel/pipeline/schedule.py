"""Orders of microbatches in the stages of `nbdist.stages`.

A schedule is one list for all stages, in which each task follows the tasks that it needs. Devices
run asynchronously: adjacent tasks of different stages run at the same time.
"""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """One microbatch at one stage.

    Attributes:
        stage: number of the stage, from 0.
        micro: number of the microbatch, from 0.
        forward: forward pass, or backward pass if false.
    """

    stage: int
    micro: int
    forward: bool


def forward_only(stages: int, micro: int) -> tuple[Task, ...]:
    """Return the tasks of a forward pass by diagonals: stage s has microbatch t - s in tick t."""
    return tuple(
        Task(stage, tick - stage, forward=True)
        for tick in range(micro + stages - 1)
        for stage in range(stages)
        if 0 <= tick - stage < micro
    )


def one_forward_one_backward(stages: int, micro: int) -> tuple[Task, ...]:
    """Return the tasks of a 1F1B schedule: each stage alternates after its first forward passes.

    A stage stores the values for the backward pass of at most `stages - stage` microbatches
    (PipeDream-Flush: Narayanan et al., 2021, arXiv:2104.04473, section 2.2.1).
    """
    waiting = [_tasks_of_stage(stage, stages, micro) for stage in range(stages)]
    done: set[Task] = set()
    ordered: list[Task] = []
    while any(waiting):
        now = [own[0] for own in waiting if own and _needs(own[0], stages) <= done]
        for task in now:
            waiting[task.stage].pop(0)
        done.update(now)
        ordered.extend(now)
    return tuple(ordered)


def _tasks_of_stage(stage: int, stages: int, micro: int) -> list[Task]:
    """Return the tasks of one stage, in order."""
    ahead = min(stages - 1 - stage, micro)
    forward = [Task(stage, number, forward=True) for number in range(micro)]
    backward = [Task(stage, number, forward=False) for number in range(micro)]
    alternating = [task for pair in zip(forward[ahead:], backward, strict=False) for task in pair]
    return [*forward[:ahead], *alternating, *backward[micro - ahead :]]


def _needs(task: Task, stages: int) -> set[Task]:
    """Return the tasks of other stages, or of the same microbatch, that a task needs."""
    if task.forward:
        return {task._replace(stage=task.stage - 1)} if task.stage else set()
    if task.stage < stages - 1:
        return {task._replace(stage=task.stage + 1)}
    return {task._replace(forward=True)}
