"""Names that a step under JAX uses, sorted by the way their values enter the step."""

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
from nbdist.worker.jax.step.closures import (
    check_captures,
    functional_names,
    held_elsewhere,
    holds_objects,
)
from nbdist.worker.jax.step.code_names import changed_later
from nbdist.worker.jax.step.object_slots import is_open
from nbdist.worker.jax.step.object_state import ObjectState, Rebound
from nbdist.worker.runtime.reachable import code_names
from nbdist.worker.training.prechecks import check_state
from nbdist.worker.training.step_contract import function_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.records import StepProgram, StepRequest
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.jax.step.closures import FunctionalNames


@dataclasses.dataclass
class StepNames:
    """Names of the user's namespace that a step uses.

    Attributes:
        groups: Names that the step reads and then assigns, and objects of Flax NNX.
        read: Pytrees that the step only reads.
        objects: Slots of other objects that the step rebinds.
        own: Names that the step assigns and whose objects it uses without a copy.
        held: Identities of arrays that must not be donated.
        states: Those names with functional state of Flax NNX.
    """

    groups: list[Carried]
    read: Arguments
    objects: ObjectState
    own: tuple[str, ...]
    held: set[int]
    states: FunctionalNames

    @property
    def carried(self) -> list[Carried]:
        """State that is carried from step to step."""
        return [*self.groups, self.objects.carried]

    @property
    def changes(self) -> tuple[str, ...]:
        """Names whose values the steps change."""
        names = [name for group in self.groups for name in group.names]
        return tuple(dict.fromkeys((*names, *self.objects.roots)))

    @property
    def parameters(self) -> list[str]:
        """Names that the step receives as parameters, except rates and the batch."""
        return [
            *(name for group in self.groups for name in group.names),
            *self.read.names,
            *self.own,
        ]

    def settle(self, namespace: dict[str, Any]) -> bool:
        """Carry the slots that the last trace rebound; returns False if it rebound none."""
        found = self.objects.rebound
        if found is None:
            return False
        self.objects.add(found)
        left = {name: line for name, line in self.read.names.items() if name not in found.whole}
        self.read = Arguments(left, tuple(namespace[name] for name in left))
        return True


def take(request: StepRequest, namespace: dict[str, Any], apart: set[str]) -> StepNames:
    """Sort the names of a step; those in `apart` reach it in another way.

    Raises:
        StepError: The value of a name can neither be carried nor be read.
    """
    program = request.program
    reads = {n: line for n, line in program.reads.items() if n not in apart}
    lines = {**reads, **program.carried_lines}
    source = function_source(request, ())
    later = changed_later(source)
    states = _functional(program, namespace, {n: reads[n] for n in reads if n not in later})
    nnx = {
        n: line
        for n, line in lines.items()
        if n not in states.names and holds_objects(namespace[n])
    }
    assigned = {n: line for n, line in program.carried_lines.items() if n not in nnx}
    trees = {
        n: line
        for n, line in assigned.items()
        if not any(map(is_open, jax.tree.leaves(namespace[n])))
    }
    whole = later & reads.keys()
    planned = request.options.planning.only
    given = {
        n: line
        for n, line in reads.items()
        if n not in nnx and is_argument(namespace[n], planned=planned)
    }
    read = {n: line for n, line in given.items() if n not in whole}
    in_place = _values(namespace, (n for n in nnx if n not in program.carried))
    donated = {*nnx, *trees}
    closed = {n: line for n, line in lines.items() if n not in donated and n not in read}
    words = {*code_names(compile(source, "<step>", "exec"))}
    check_captures(closed, set(program.carried), namespace, _values(namespace, nnx), words)
    held = held_elsewhere(namespace, donated, in_place)
    groups = _carried_groups(namespace, trees, nnx)
    others = {n: line for n, line in lines.items() if n not in nnx}
    objects = ObjectState(namespace, others, {*trees, *given}, namespace[request.options.data])
    objects.add(Rebound([], whole & given.keys()))
    return StepNames(
        groups=groups,
        read=Arguments(read, _values(namespace, read)),
        objects=objects,
        own=tuple(n for n in assigned if n not in trees),
        held=held | objects.shared(),
        states=states,
    )


def _values(namespace: dict[str, Any], names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(namespace[name] for name in names)


def _functional(
    program: StepProgram, namespace: dict[str, Any], read: dict[str, int]
) -> FunctionalNames:
    """Return the names with functional state of Flax NNX.

    Args:
        program: The step.
        namespace: Namespace of the user.
        read: Names that the step reads and that no inner function changes.
    """
    assigned = {n: namespace[n] for n in program.carried_lines}
    read_only = {n: namespace[n] for n in read if n not in assigned}
    return functional_names(assigned, read_only, {**read, **program.carried_lines})


def _carried_groups(
    namespace: dict[str, Any], trees: dict[str, int], nnx: dict[str, int]
) -> list[Carried]:
    """Group the carried names: pytrees, and objects of Flax NNX if there are any.

    Args:
        namespace: Namespace of the user.
        trees: Names of pytrees, with their lines.
        nnx: Names of objects of Flax NNX, with their lines.

    Raises:
        StepError: The place of an object of Flax NNX cannot be carried.
    """
    groups = [Carried(trees, _values(namespace, trees), Trees())]
    if nnx:
        from nbdist.worker.jax.step.nnx import Objects, check_places

        objects = _values(namespace, nnx)
        check_places(nnx, objects)
        groups.append(Carried(nnx, objects, Objects()))
    return groups


def check_numbers(batch: Batch) -> None:
    """Check that a batch contains only numbers.

    Raises:
        StepError: An array contains strings or objects.
    """
    for leaf in leaves(batch.values):
        if leaf.dtype.kind in "OUS":
            raise StepError(
                f"the batch contains an array of {leaf.dtype}, but JAX supports only numbers: "
                "encode it in the cell that creates the data"
            )


def check_same(values: dict[str, Any], lines: dict[str, int]) -> None:
    """Check that values are equal on every rank: each becomes one array on the mesh.

    Args:
        values: Values by name, in the same order on all ranks.
        lines: First line of each name.
    """
    if jax.process_count() == 1:
        return
    sums = {}
    for name, value in values.items():
        own = [leaf for leaf in jax.tree.leaves(value) if is_own(leaf)]
        if own:
            sums[name] = of_arrays(map(as_data, own))
    check_state(sums, lines, processes.gather)
