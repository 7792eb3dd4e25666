"""In which order the microbatches of a pipeline go through its stages.

A schedule is one order for all stages, in which everything comes after what it needs. Devices work
by themselves once they are told to: tasks of different stages that stand side by side run together.
"""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """One microbatch at one stage.

    Attributes:
        stage: from 0.
        micro: which microbatch, from 0.
        forward: else backward.
    """

    stage: int
    micro: int
    forward: bool


def forward_only(stages: int, micro: int) -> tuple[Task, ...]:
    """By diagonals: a stage is at a microbatch while the one before it is at the next."""
    return tuple(
        Task(stage, tick - stage, forward=True)
        for tick in range(micro + stages - 1)
        for stage in range(stages)
        if 0 <= tick - stage < micro
    )


def one_forward_one_backward(stages: int, micro: int) -> tuple[Task, ...]:
    """Each stage goes forward until what it began comes back, then forward and back in turn.

    A stage so holds what backward needs of `stages - stage` microbatches at most, however many
    there are: PipeDream-Flush, Narayanan et al., 2021, arXiv:2104.04473, section 2.2.1.
    """
    waiting = [_own(stage, stages, micro) for stage in range(stages)]
    done: set[Task] = set()
    ordered: list[Task] = []
    while any(waiting):
        now = [own[0] for own in waiting if own and _needs(own[0], stages) <= done]
        for task in now:
            waiting[task.stage].pop(0)
        done.update(now)
        ordered.extend(now)
    return tuple(ordered)


def most_held(tasks: tuple[Task, ...], stages: int) -> tuple[int, ...]:
    """Of how many microbatches each stage holds what backward needs, at most."""
    held, most = [0] * stages, [0] * stages
    for task in tasks:
        held[task.stage] += 1 if task.forward else -1
        most[task.stage] = max(most[task.stage], held[task.stage])
    return tuple(most)


def _own(stage: int, stages: int, micro: int) -> list[Task]:
    """What a stage does, in order."""
    ahead = min(stages - 1 - stage, micro)
    forward = [Task(stage, number, forward=True) for number in range(micro)]
    backward = [Task(stage, number, forward=False) for number in range(micro)]
    turns = [task for pair in zip(forward[ahead:], backward, strict=False) for task in pair]
    return [*forward[:ahead], *turns, *backward[micro - ahead :]]


def _needs(task: Task, stages: int) -> set[Task]:
    """What has to be done before, beside what the same stage does."""
    if task.forward:
        return {task._replace(stage=task.stage - 1)} if task.stage else set()
    if task.stage < stages - 1:
        return {task._replace(stage=task.stage + 1)}
    return {task._replace(forward=True)}
