"""Step of a training loop under JAX: the user's code, on batches that are split over the mesh.

JAX computes with a sharded array as with a whole one. The step therefore runs as written. nbdist
only places its batch, and XLA divides the work. The numbers are those of one device for any step.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.errors import PlanError, StepError
from nbdist.private_api.jax import convert_element_type as _convert_element_type
from nbdist.worker.checkpoint.digest import of_arrays
from nbdist.worker.data.batch_array import BatchArray, whole
from nbdist.worker.data.batches import Batch, RankRows, slicer
from nbdist.worker.jax.arrays.checkpoint import JaxState
from nbdist.worker.jax.arrays.leaves import as_data, gathered, is_array, is_own, is_spread, raw
from nbdist.worker.jax.runtime import processes
from nbdist.worker.jax.runtime.step_signals import NAME as SIGNALS
from nbdist.worker.jax.step.loop_check import LoopSubject
from nbdist.worker.jax.step.loop_state import LoopState, Snapshot
from nbdist.worker.jax.step.object_slots import is_of_nnx
from nbdist.worker.lifting.jax_callees import is_pmapped
from nbdist.worker.lifting.lifted_loop import defined, split_header, without_unassigned
from nbdist.worker.lifting.step_reads import array_of_object, may_change, updated_in_place
from nbdist.worker.profiling.jax_profiler import PjrtTracer
from nbdist.worker.runtime import context
from nbdist.worker.runtime.signals import NO_SIGNALS
from nbdist.worker.training.parity import Findings, compare
from nbdist.worker.training.step_contract import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jax.sharding import Mesh

    from nbdist.records import Plan, Rate
    from nbdist.worker.lifting.lifted_loop import Arguments
    from nbdist.worker.lifting.rewrite import LoopProgram
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.training.step_contract import Footprint

_UNSPLIT = ("incompatible devices", "non-addressable")
"""Parts of JAX's errors for code that needs an array on one device, or all rows of a batch."""

_MAPPED = ("axis to squeeze out", "inconsistent sizes", "not divisible")
"""Parts of JAX's errors for arrays that `jax.pmap` cannot divide over its devices."""

_KEYS = ((2,), (4,))
"""Shapes of keys that `jax.random.PRNGKey` makes."""

Division = Literal[
    "divided", "rows", "batch", "uneven", "objects", "mesh", "ranks", "rank", "code", "scan", "pmap"
]
"""Division of a batch over the replicas, or the reason why each worker computes the whole batch."""

_REASONS: dict[Division, str] = {
    "divided": "",
    "mesh": "",
    "rows": "a batch of {rows} rows does not divide over {shards} replicas",
    "batch": "its step receives no batch from the loop: pass the data to it as arguments",
    "uneven": "the arrays of its batch have different numbers of rows",
    "objects": "its step reads `{attribute}`: assign this array to a name before the loop",
    "ranks": "the first batch or the state differs between the workers: set their seeds",
    "rank": "its step uses `rank`",
    "code": "its step needs all rows of a batch on one device",
    "scan": "its step takes batches from the data in a compiled loop",
    "pmap": "its step uses jax.pmap, whose collectives also add over the {shards} workers",
}


class _Inputs:
    """Values that a loop passes to its step, and the arrays among them that contain a batch.

    The arrays of a value belong to the batch if all have the same number of rows. Of several such
    numbers, the one with the most elements counts: a key for random numbers is small.

    Args:
        values: the values, by the name of their parameter.
        late: names of values that are no batch.
        axis: axis of the rows; 1 if the first one is that of a scan over batches.

    Attributes:
        rows: number of rows of the batch; 0 without a batch.
        arrays: arrays of the batch.
        is_sharded: True if an array is sharded over devices already.
    """

    def __init__(self, values: dict[str, Any], late: Sequence[str], axis: int = 0) -> None:
        self._flat = {name: _flattened(value) for name, value in values.items()}
        every = (leaf for leaves, _ in self._flat.values() for leaf in leaves)
        self.is_sharded = any(map(_is_sharded, every))
        sizes: dict[int, int] = {}
        rows = {n: _rows_of(leaves, axis) for n, (leaves, _) in self._flat.items() if n not in late}
        for name, count in rows.items():
            elements = sum(leaf.size for leaf in self._flat[name][0] if _has_rows(leaf, axis))
            sizes[count] = sizes.get(count, 0) + elements
        sizes.pop(0, None)
        self.rows = max(sizes, key=lambda count: sizes[count], default=0)
        batch = {name for name, count in rows.items() if count and count == self.rows}
        self._splits = {
            name: [_has_rows(leaf, axis) for leaf in leaves]
            for name, (leaves, _) in self._flat.items()
            if name in batch
        }
        self.arrays = self._selected()

    def take(self, values: dict[str, Any]) -> bool:
        """Take the values of the next step; return False if structures, shapes or types differ."""
        flat = {name: _flattened(value) for name, value in values.items()}
        if flat.keys() != self._flat.keys():
            return False
        for name, (leaves, structure) in flat.items():
            before, its = self._flat[name]
            if structure != its or not all(map(_are_alike, leaves, before)):
                return False
        self._flat = flat
        self.arrays = self._selected()
        return True

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shapes and types of the arrays of the batch."""
        return tuple((array.shape, array.dtype) for array in self.arrays)

    def is_uneven_in(self, names: Iterable[str]) -> bool:
        """Return True if one of these values has arrays with different numbers of rows."""
        found = (self._flat[name][0] for name in names)
        return any(len({x.shape[0] for x in each if _has_rows(x, 0)}) > 1 for each in found)

    def _selected(self) -> tuple[Any, ...]:
        """Return the arrays of the batch."""
        splits = self._splits.items()
        return tuple(
            leaf for name, each in splits for leaf in itertools.compress(self._flat[name][0], each)
        )

    def placed(self, place: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the values of the batch, with its arrays as `place` returns them."""
        values = {}
        for name, splits in self._splits.items():
            leaves, structure = self._flat[name]
            parts = [place(x) if split else x for x, split in zip(leaves, splits, strict=True)]
            values[name] = jax.tree.unflatten(structure, parts)
        return values


class JaxLoopStep:
    """Step of a loop, called with a batch that is split over the mesh.

    Args:
        program: the loop.
        namespace: namespace of the user, with the values that the step reads.
        mesh: mesh of all devices, with one axis `data`.
        first: values of the first step.

    Attributes:
        common: False: batches that differ between workers are not divided.
    """

    common = False
    plan: Plan | None = None
    footprint: Footprint | None = None

    def __init__(
        self, program: LoopProgram, namespace: dict[str, Any], mesh: Mesh, first: Arguments
    ) -> None:
        self.shards = self.replicas = mesh.size
        self.tracer: Tracer = PjrtTracer()
        self._program = program
        self._namespace = namespace
        self._function = defined(program, namespace)
        scanned = [None] if program.loop.scan == "batches" else []
        self._by_rows = jax.NamedSharding(mesh, jax.P(*scanned, mesh.axis_names))
        self._outputs: dict[str, Any] | None = None
        loop = program.loop
        self._read = {name: namespace[name] for name in loop.reads if name in namespace}
        carried = dict(zip(loop.carried, first.carried, strict=True))
        self._state = LoopState(carried, self._read, loop.mutated)
        self._arguments = first
        self._reads_batch = False
        self._reads_batch = not self._inputs_of(first).rows
        self._inputs = self._inputs_of(first)
        self._kinds = {self._inputs.kind}
        self._division = self._first_division()
        if self._division == "divided":
            self._state.adopt()
        else:
            self.replicas = max(map(_parts, self._inputs.arrays), default=1)
            self._state.is_shared = self._division not in ("rank", "ranks")

    @property
    def reduced(self) -> bool:
        """True if reports are equal on all ranks."""
        return self._division == "divided"

    @property
    def takes_own_rows(self) -> bool:
        return self.reduced

    @property
    def changes(self) -> tuple[str, ...]:
        return self._state.names

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        return {}

    def _inputs_of(self, arguments: Arguments) -> _Inputs:
        loop = self._program.loop
        values, late = self._inputs_by_name(arguments), (*loop.late, *loop.mutated)
        updated = updated_in_place(loop.step, self._read)
        late += tuple(n for n in updated if _contains_numpy(self._read.get(n)))
        return _Inputs(values, late, len(self._by_rows.spec) - 1)

    def _inputs_by_name(self, arguments: Arguments) -> dict[str, Any]:
        """Return what the loop gives to the step; without a batch, also what the step reads."""
        given = dict(zip(self._program.loop.given, arguments.given, strict=True))
        if not self._reads_batch:
            return given
        return {n: v for n, v in self._read.items() if not may_change(v)} | given

    def _first_division(self) -> Division:
        inputs, state = self._inputs, self._state.saved().values()
        found: Division = "divided"
        if inputs.is_sharded or any(map(_is_sharded, state)):
            found = "mesh"
        elif self._program.loop.scan == "inside":
            found = "scan"
        elif any(map(is_pmapped, self._read.values())):
            found = "pmap"
        elif not inputs.rows:
            is_uneven = inputs.is_uneven_in(self._program.loop.given)
            found = "objects" if self._attribute() else "uneven" if is_uneven else "batch"
        elif inputs.rows % self.shards:
            found = "rows"
        elif "rank" in self._read:
            found = "rank"
        arrays = filter(is_own, (*inputs.arrays, *state))
        own = [list(_REASONS).index(found), inputs.rows, of_arrays(map(as_data, arrays))]
        every = self.gather(np.array(own, np.int32))
        return found if (every == every[0]).all() else "ranks"

    def header(self) -> str:
        program, where = self._program, f"{self._program.place}:"
        match self._division:
            case "divided":
                return split_header(program, self._inputs.rows, self.shards)
            case "mesh":
                return f"{where} the loop runs as written, on the mesh of its arrays"
        return f"{where} every worker computes the whole loop: {self._reason()}"

    def _reason(self) -> str:
        return _REASONS[self._division].format(
            rows=self._inputs.rows, shards=self.shards, attribute=self._attribute()
        )

    def _attribute(self) -> str:
        return array_of_object(self._program.loop.step, self._read, is_array)

    def constants(self, *, begins: bool = True) -> dict[str, Any]:
        """Return nothing: the step's functions run in Python."""
        del begins
        return {}

    def rebind(self, values: dict[str, Any]) -> bool:
        self._read = values
        self._state.reread(values)
        self._namespace.update(values)
        return True

    def batch(self, arguments: Arguments) -> Batch:
        self._arguments = arguments
        if not self._state.is_changed:  # the loop may have assigned other values meanwhile
            self._state.carried = dict(zip(self._state.carried, arguments.carried, strict=True))
        if not self._inputs.take(self._inputs_by_name(arguments)):
            self._inputs = self._inputs_of(arguments)
            self._kinds.add(self._inputs.kind)
        rows, arrays = self._inputs.rows, self._inputs.arrays
        whole = self._division != "divided" or rows % self.shards > 0
        divided = None if rows else 0
        return Batch(arrays, rows or 1, whole, everything=lambda: arrays, divided=divided)

    def ready(self, batch: Batch) -> None:
        """Do nothing: the step runs in Python."""

    def step(self, batch: Batch) -> Any:
        carried = self._arguments.carried
        if self._state.is_changed:
            carried = self._state.changed()
        with self._state.signals.recorded(self._state) as found:
            if batch.whole:
                outputs = self._whole(carried)
            elif self._outputs is not None:
                outputs = self._divided(carried)
            else:
                outputs = self._tried(carried)
            self._outputs = outputs
            self._state.carried = {name: outputs[name] for name in self._state.carried}
        return {**self._report(outputs), **found}

    def _whole(self, carried: tuple[Any, ...]) -> dict[str, Any]:
        """Run the step as written, on the whole batch."""
        self._namespace.update(self._read)
        return self._called(self._arguments.given, carried)

    def _divided(self, carried: tuple[Any, ...]) -> dict[str, Any]:
        """Run the step on a batch that is split over the mesh."""
        outputs = self._on_batch(self._inputs.placed(self._place), carried)
        self._state.replicate()
        return {name: _gathered(value) for name, value in outputs.items()}

    def _on_batch(self, placed: dict[str, Any], carried: tuple[Any, ...]) -> dict[str, Any]:
        """Run the step with these values of the batch, by the name of their parameter."""
        if self._reads_batch:
            self._namespace.update({n: v for n, v in placed.items() if n in self._read})
        pairs = zip(self._program.loop.given, self._arguments.given, strict=True)
        # A step cannot change an array itself.
        trees = {n: jax.tree.leaves(v) for n, v in placed.items() if not isinstance(v, jax.Array)}
        given = tuple(placed.get(name, value) for name, value in pairs)
        outputs = self._called(given, carried)
        values = self._inputs_by_name(self._arguments) if trees else {}
        for name, copies in trees.items():
            own = dict(zip(map(id, copies), _flattened(values[name])[0], strict=True))
            _repeat(values[name], placed[name], own)
        return outputs

    def _tried(self, carried: tuple[Any, ...]) -> dict[str, Any]:
        """Run the first step on a split batch, or on the whole one if its code needs all rows."""
        before = Snapshot(self._state, self._namespace)
        try:
            return self._divided(carried)
        except StepError as error:
            cause = error.__cause__
            if cause is None or self._program.loop.effect:  # the step cannot run a second time
                raise
        before.restore()
        self._division, self.replicas = "code", 1
        text = f"{self.header()} ({str(cause).split('. ')[0]})"
        context.current().reporter.note("strategy", text, warning=True)
        return self._whole(carried)

    def _called(self, given: tuple[Any, ...], carried: tuple[Any, ...]) -> dict[str, Any]:
        """Call the step.

        Raises:
            StepError: The step needs all rows of a batch in one place, or maps over more devices
                than this worker has.
        """
        try:
            _, outputs = self._function(*map(whole, given), *carried)
        except (ValueError, RuntimeError) as error:
            reason, where = str(error).split(". ")[0], self._program.place
            if self._division == "pmap" and any(text in reason for text in _MAPPED):
                raise StepError(
                    f"{where}: jax.pmap maps over the devices of one worker "
                    f"({jax.local_device_count()}), not over all ({jax.device_count()}): use "
                    "jax.local_device_count(), or jax.jit, for which nbdist splits the batch "
                    f"({reason})"
                ) from error
            if self._division != "divided" or not any(text in reason for text in _UNSPLIT):
                raise
            raise StepError(
                f"{where}: nbdist splits the batch over the workers, but "
                f"the step needs all of it on one device: convert arrays to NumPy and put them on "
                f"devices outside of the step, or run the cell with --no-lift ({reason})"
            ) from error
        return without_unassigned(outputs)

    def _place(self, array: Any) -> jax.Array:
        """Split an array that every process has over the mesh."""
        if isinstance(array, jax.Array):
            rows = np.asarray(array.addressable_data(0)).__getitem__
        else:
            found = array if isinstance(array, BatchArray) else raw(array)
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)

            def rows(index: Any) -> np.ndarray:
                own = found.part(*index) if isinstance(found, BatchArray) else found[index]
                return np.array(own, dtype, copy=True)  # the user may change the array

        placed = jax.make_array_from_callback(array.shape, self._by_rows, rows)
        is_weak = getattr(array, "weak_type", False)
        return _convert_element_type(placed, weak_type=True) if is_weak else placed

    def read(self, report: Any) -> StepResult:
        found = report[SIGNALS]() if SIGNALS in report else NO_SIGNALS
        values = {name: float(value) for name, value in report.items() if name != SIGNALS}
        return StepResult(values, all(map(math.isfinite, values.values())), signals=found)

    def outputs(self, names: Sequence[str]) -> tuple[Any, ...]:
        outputs = self._outputs or {}
        return tuple(outputs[name] for name in names)

    def assigned(self, names: Sequence[str]) -> dict[str, Any]:
        outputs = self._outputs or {}
        return {name: outputs[name] for name in names if name in outputs}

    def last(self, names: Sequence[str]) -> tuple[Any, ...]:
        return self.outputs(names)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        gathered_numbers: np.ndarray = processes.gather(numbers)
        return gathered_numbers

    def compilations(self) -> int:
        return len(self._kinds)

    def state(self) -> JaxState:
        """Return the checkpoint state of the step."""
        return JaxState(self._state, self.changes)

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        del warmup_steps, made
        raise StepError("--scale-lr works in step cells: %%dist_run --data NAME --scale-lr")

    def check(self, batch: Batch) -> Findings:
        """Compare the step on split batches with the step on whole ones.

        Raises:
            StepError: The step changes or shows something besides its outputs.
        """
        if batch.whole:
            return Findings((), ())
        loop = self._program.loop
        if loop.effect:
            raise StepError(
                f"--check runs the step of {self._program.place} on trial, but {loop.effect} would "
                "also run then: move it out of the step"
            )
        if loop.scan == "batches":
            raise StepError(
                f"--check compares rows of a batch, but the step of {self._program.place} scans "
                "over several batches: run the cell without --check"
            )
        rank = RankRows(
            rank=context.current().rank, ranks=jax.process_count(), replicas=self.shards
        )
        own = rank.batch(batch.rows, slicer(self._inputs.arrays))
        subject = LoopSubject(self._state, self._namespace, self._on_trial, self._report)
        return compare(subject, own, self.shards, coarse=False)

    def _on_trial(self, rows: tuple[Any, ...] | None) -> dict[str, Any]:
        """Run the step on these rows of the batch; on the split batch if they are None."""
        carried = tuple(self._state.carried.values())
        if rows is None:
            return self._divided(carried)
        left = iter(rows)
        return self._on_batch(self._inputs.placed(lambda _: next(left)), carried)

    def _report(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Return the float scalars that the step assigns and does not carry."""
        carried = self._program.loop.carried
        return _scalars({n: v for n, v in outputs.items() if n not in carried})

    def layout(self, batch: Batch) -> Plan:
        del batch
        raise PlanError("plans are for step cells: %%dist_plan --data NAME")

    def prepare(self, batch: Batch) -> None:
        """Do nothing: the step is compiled by the functions of the user."""

    def write_back(self) -> None:
        """Do nothing: the loop assigns the outputs of every step."""

    def finish(self) -> None:
        """Do nothing: nbdist has not changed the user's objects."""


def _flattened(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves and structure of a value.

    An object of Flax NNX is a leaf: a step changes it in place, and a copy would take the changes.
    """
    try:
        leaves, structure = jax.tree.flatten(value, is_leaf=is_of_nnx)
        return leaves, structure
    except (TypeError, ValueError):  # keys that cannot be sorted
        return [value], jax.tree.structure(0)


def _repeat(value: Any, copy: Any, own: dict[int, Any]) -> Any:
    """Change dicts and lists as a step has changed a copy of them, and return the result.

    Args:
        value: a part of a value that the user has passed to the step.
        copy: the same part of the copy.
        own: leaves of the value, by the ids of those that the copy had before the step.
    """
    if id(copy) in own:
        return own[id(copy)]
    if isinstance(copy, dict) and isinstance(value, dict):
        for key in value.keys() - copy.keys():
            del value[key]
        for key, part in copy.items():
            value[key] = _repeat(value.get(key), part, own)
        return value
    if isinstance(copy, (list, tuple)) and type(copy) is type(value):
        before = [*value, *[None] * len(copy)]
        parts = [_repeat(*pair, own) for pair in zip(before, copy, strict=False)]
        if isinstance(value, list):
            value[:] = parts
        return value
    is_same = type(copy) is type(value) and all(id(leaf) in own for leaf in jax.tree.leaves(copy))
    return value if is_same else _gathered(copy)


def _contains_numpy(value: Any) -> bool:
    """Return True if code can change arrays of a value in place."""
    return any(isinstance(leaf, np.ndarray) for leaf in _flattened(value)[0])


def _are_alike(leaf: Any, other: Any) -> bool:
    """Return True if two leaves have the same type, and arrays the same shape and dtype."""
    if type(leaf) is not type(other):
        return False
    shape = getattr(leaf, "shape", None)
    return shape is None or (shape == other.shape and leaf.dtype == other.dtype)


def _rows_of(leaves: Sequence[Any], axis: int) -> int:
    """Return the number of rows of arrays; 0 if they have no rows, or different numbers."""
    found = {leaf.shape[axis] for leaf in leaves if _has_rows(leaf, axis)}
    return found.pop() if len(found) == 1 else 0


def _has_rows(leaf: Any, axis: int) -> bool:
    """Return True if a leaf can be split by rows; a key for random numbers cannot."""
    if (
        not (is_array(leaf) or (isinstance(leaf, BatchArray) and isinstance(leaf.dtype, np.dtype)))
        or leaf.ndim <= axis
        or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ):
        return False
    return not (leaf.dtype == np.uint32 and leaf.shape[axis:] in _KEYS)


def _gathered(value: Any) -> Any:
    """Replicate the arrays of a value that are split over the mesh, such as predictions."""
    if not any(map(is_spread, jax.tree.leaves(value))):
        return value  # also an object whose identity matters
    return jax.tree.map(gathered, value)


def _is_sharded(leaf: Any) -> bool:
    """Return True if an array is split over devices, by the user or by an earlier cell."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_replicated


def _parts(array: Any) -> int:
    """Return the number of parts of an array's rows, as its sharding defines it."""
    if not _is_sharded(array):
        return 1
    indices = array.sharding.devices_indices_map(array.shape).values()
    return len({(index[0].start, index[0].stop) for index in indices})


def _scalars(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return the float scalars of values, by name and path."""
    found = {name: value for name, value in outputs.items() if _is_scalar(value)}
    others = {name: value for name, value in outputs.items() if not is_array(value)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(others):
        if _is_scalar(leaf):
            found[f"{path[0].key}{jax.tree_util.keystr(path[1:])}"] = leaf
    return found


def _is_scalar(value: Any) -> bool:
    return is_array(value) and not value.ndim and jnp.issubdtype(value.dtype, jnp.floating)
