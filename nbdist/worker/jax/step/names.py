"""The names that a step under JAX uses, sorted by how their values get into it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from nbdist.errors import StepError
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batches import leaves
from nbdist.worker.jax.arrays.leaves import as_data, is_own
from nbdist.worker.jax.runtime import processes
from nbdist.worker.jax.step.arguments import Arguments, is_argument
from nbdist.worker.jax.step.carried import Carried, Trees
from nbdist.worker.jax.step.closures import check_captures, held_elsewhere, holds_objects
from nbdist.worker.jax.step.code_names import changed_later
from nbdist.worker.jax.step.object_slots import is_open
from nbdist.worker.jax.step.object_state import ObjectState, Rebound
from nbdist.worker.runtime.reachable import code_names
from nbdist.worker.training.prechecks import check_state
from nbdist.worker.training.step_contract import function_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import StepRequest
    from nbdist.worker.data.batches import Batch


@dataclasses.dataclass
class StepNames:
    """What a step uses of the user's namespace.

    Attributes:
        groups: names that it reads and then assigns, and objects of Flax NNX.
        read: pytrees that it only reads.
        objects: the slots that it rebinds in other objects.
        own: names of which it uses the very objects, and that it assigns.
        held: the identities of arrays that must not be donated.
    """

    groups: list[Carried]
    read: Arguments
    objects: ObjectState
    own: tuple[str, ...]
    held: set[int]

    @property
    def carried(self) -> list[Carried]:
        """All that goes from step to step."""
        return [*self.groups, self.objects.carried]

    @property
    def changes(self) -> tuple[str, ...]:
        """The names whose values the steps change."""
        names = [name for group in self.groups for name in group.names]
        return tuple(dict.fromkeys((*names, *self.objects.roots)))

    @property
    def parameters(self) -> list[str]:
        """The names that are given to the step, but for rates and the batch."""
        return [
            *(name for group in self.groups for name in group.names),
            *self.read.names,
            *self.own,
        ]

    def settle(self, namespace: dict[str, Any]) -> bool:
        """Carry what the last trace rebound; False if it was carried."""
        found = self.objects.rebound
        if found is None:
            return False
        self.objects.add(found)
        left = {name: line for name, line in self.read.names.items() if name not in found.whole}
        self.read = Arguments(left, tuple(namespace[name] for name in left))
        return True


def take(request: StepRequest, namespace: dict[str, Any], apart: set[str]) -> StepNames:
    """Sort the names of a step; those in `apart` are given to it in another way.

    Raises:
        StepError: a name's value can neither be carried nor be read.
    """
    program = request.program
    reads = {n: line for n, line in program.reads.items() if n not in apart}
    lines = {**reads, **program.carried_lines}
    nnx = {n: line for n, line in lines.items() if holds_objects(namespace[n])}
    assigned = {n: line for n, line in program.carried_lines.items() if n not in nnx}
    trees = {
        n: line
        for n, line in assigned.items()
        if not any(map(is_open, jax.tree.leaves(namespace[n])))
    }
    source = function_source(request, ())
    whole = changed_later(source) & reads.keys()
    planned = request.options.planning.only
    given = {
        n: line
        for n, line in reads.items()
        if n not in nnx and is_argument(namespace[n], planned=planned)
    }
    read = {n: line for n, line in given.items() if n not in whole}

    def values(names: Iterable[str]) -> tuple[Any, ...]:
        return tuple(namespace[name] for name in names)

    in_place = values(n for n in nnx if n not in program.carried)
    donated = {*nnx, *trees}
    closed = {n: line for n, line in lines.items() if n not in donated and n not in read}
    words = {*code_names(compile(source, "<step>", "exec"))}
    check_captures(closed, set(program.carried), namespace, values(nnx), words)
    held = held_elsewhere(namespace, donated, in_place)
    groups = [Carried(trees, values(trees), Trees())]
    if nnx:
        from nbdist.worker.jax.step.nnx import Objects, check_places

        check_places(nnx, values(nnx))
        groups.append(Carried(nnx, values(nnx), Objects()))
    others = {n: line for n, line in lines.items() if n not in nnx}
    objects = ObjectState(namespace, others, {*trees, *given}, namespace[request.options.data])
    objects.add(Rebound([], whole & given.keys()))
    return StepNames(
        groups=groups,
        read=Arguments(read, values(read)),
        objects=objects,
        own=tuple(n for n in assigned if n not in trees),
        held=held | objects.shared(),
    )


def check_numbers(batch: Batch) -> None:
    """Raises StepError for what JAX cannot hold."""
    for leaf in leaves(batch.values):
        if leaf.dtype.kind in "OUS":
            raise StepError(
                f"the batch has an array of {leaf.dtype}, and JAX holds numbers only: encode it in "
                "the cell that makes the data"
            )


def check_same(values: dict[str, Any], lines: dict[str, int]) -> None:
    """What is not on the mesh yet becomes one array there: every rank must have the same.

    Args:
        values: of names, in the same order on all ranks.
        lines: where each name stands first.
    """
    if jax.process_count() == 1:
        return
    sums = {}
    for name, value in values.items():
        own = [leaf for leaf in jax.tree.leaves(value) if is_own(leaf)]
        if own:
            sums[name] = of_arrays(map(as_data, own))
    check_state(sums, lines, processes.gather)
