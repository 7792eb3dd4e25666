"""A step under JAX, in global view: one jitted function over the mesh of all devices."""

from __future__ import annotations

import math
import time
import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.errors import StepError
from nbdist.records import DATA
from nbdist.worker import processes, stepper
from nbdist.worker.agreement import check_state, checksum
from nbdist.worker.arguments import Arguments, is_argument
from nbdist.worker.captured import check_captures, held_elsewhere, holds_objects
from nbdist.worker.carried import Carried, Trees
from nbdist.worker.check import compare
from nbdist.worker.checkpoint_jax import JaxState, check_fits, placed_like
from nbdist.worker.compiled import taken
from nbdist.worker.data import kind_of, leaves, map_arrays
from nbdist.worker.leaves import as_data, is_own, placed
from nbdist.worker.lowered import Lowered, is_cut, is_over, spec_of
from nbdist.worker.pjrt_check import PjrtSubject
from nbdist.worker.pjrt_trace import PjrtTracer
from nbdist.worker.planning import batch_inputs, mesh_to_trace, outline, over, plan_of, target_of
from nbdist.worker.warm_up import Factor, learning_rates, rates_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from nbdist.plan.model import Role
    from nbdist.records import Plan, Rate, Spec, StepRequest
    from nbdist.worker.check import Findings
    from nbdist.worker.data import Batch
    from nbdist.worker.pjrt_strategy import PjRTStrategy
    from nbdist.worker.traces import Tracer

_ON_ARRAYS = (
    "In a step, the value of an array is not there for Python's if, while, and, or: "
    "type jnp.where(condition, a, b), jax.lax.cond or jax.lax.while_loop"
)


class PjrtStep:
    """What the step carries is donated and stays on the devices; what it reads is an argument.

    Carried are names that it reads and then assigns, and objects of Flax NNX. How all of it lies on
    the devices is planned once the first batch is known: until then it stays where the user has it.

    Args:
        request: the step.
        define: makes a function of a source, in the user's namespace, under the cell's name.
        namespace: the user's; carried names are taken from it and put back.
        strategy: over all devices of all ranks.

    Attributes:
        plan: how the step is laid out, from `prepare` on.

    Raises:
        StepError: a name's value can neither be carried nor be read.
    """

    reduced = True

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        namespace: dict[str, Any],
        strategy: PjRTStrategy,
    ) -> None:
        self.shards: int = strategy.mesh.size
        self.replicas = self.shards
        self.plan: Plan | None = None
        self.footprint: stepper.Footprint | None = None
        self.tracer: Tracer = PjrtTracer()
        self._request = request
        self._namespace = namespace
        self._strategy = strategy
        self._traced_for = mesh_to_trace(request.options.planning, strategy.mesh)
        self._rates = rates_by_name(request, namespace)
        _check_same(request, namespace)
        self._carried, self._read, self._held = _take(request, namespace, set(self._rates))
        parameters = [name for group in self._carried for name in group.names]
        parameters += [*self._read.names, *self._rates, *request.program.given]
        self._body = define(stepper.function_source(request, tuple(parameters)))
        self._function = self._pure  # one object: JAX keeps traces by it
        self._step: jax.stages.Wrapped | None = None
        self._executables: dict[tuple[bool, Any], jax.stages.Compiled] = {}
        self._lowered: Lowered
        self._factor = Factor(1, 0)
        self._made = False
        self._reported: dict[str, jax.Array] = {}
        self._rates_read = learning_rates(request, namespace)

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(name for group in self._carried for name in group.names)

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        self._factor = Factor(self.replicas, warmup_steps, made)
        return self._factor.rates(self._rates)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        gathered: np.ndarray = processes.gather(numbers)
        return gathered

    def check(self, batch: Batch) -> Findings:
        self.prepare(batch)
        assert self._step is not None
        subject = PjrtSubject(
            self._carried,
            self._read,
            step=self._made_step(batch),
            pure=self._pure,
            place=self._lowered.batch,
            namespace=self._namespace,
        )
        return compare(subject, batch, self.replicas, coarse=False)

    def layout(self, batch: Batch) -> Plan:
        _check_numbers(batch)
        whole = map_arrays(self._outline, batch.everything())
        traced = self._settled(whole)
        full = self._full(whole, batch.rows)
        return self._planned(traced if full is whole else self._settled(full), full)

    def _full(self, batch: Any, rows: int) -> Any:
        """The batch with as many rows as others have: it may be the last one of an epoch.

        A run that goes on from there is to be laid out as it was.
        """
        usual = self._request.options.batch
        if usual in (0, rows):
            return batch

        def larger(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (usual, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape
            return leaf.update(shape=shape)

        return map_arrays(larger, batch)

    def prepare(self, batch: Batch) -> None:
        """State that changes its shape or type is refused here, before it does harm.

        Raises:
            PlanError: the step fits on these devices in no way.
        """
        if self._step is None:
            self.plan = self.layout(batch)
            self.replicas = self.plan.axes[DATA]
            self._lowered = Lowered(self.plan, self._strategy.mesh)
            self._place()
            self._step = self._compiled()

    def state(self) -> JaxState:
        """All that the step carries."""
        return JaxState(self, self.changes)

    def saved(self) -> dict[str, jax.Array]:
        every: dict[str, jax.Array] = {}
        for group in self._carried:
            every |= group.named(group.arrays)
        return every

    def alike(self) -> Iterator[tuple[str, jax.Array]]:
        yield from self.saved().items()
        yield from self._reported.items()

    def facts(self) -> dict[str, object]:
        return {**self._rates_read, "--scale-lr": self._factor.now}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        check_fits(arrays, self.saved())
        for group in self._carried:
            group.arrays = [
                placed_like(arrays[name], array) if array.size else array
                for name, array in group.named(group.arrays).items()
            ]
        self._made = True

    def step(self, batch: Batch) -> Any:
        self.prepare(batch)
        assert self._step is not None
        report, after = self._made_step(batch)(
            self._state(), self._read.arrays, self._factor.next(), self._lowered.batch(batch)
        )
        for group, arrays in zip(self._carried, after, strict=True):
            group.arrays = arrays
        self._made = True
        self._reported = report
        return report

    def read(self, report: Any) -> stepper.Landed:
        """Of values that are not finite, the loss decides, as under the mirrored strategy."""
        values = {name: float(value) for name, value in report.items()}
        deciding = [values["loss"]] if "loss" in values else list(values.values())
        return stepper.Landed(values, all(math.isfinite(value) for value in deciding))

    def compilations(self) -> int:
        return len(self._executables)

    def finish(self) -> None:
        """State whose buffers a failed step took with it cannot be put back."""
        if not self._made:
            return
        for group in self._carried:
            if any(array.is_deleted() for array in group.arrays):
                names = ", ".join(f"`{name}`" for name in group.names)
                text = f"{names}: lost with the step that failed; run the cell that makes it again"
                warnings.warn(text, stacklevel=2)
            else:
                group.restore(self._namespace)
                self._strategy.note_laid(group.arrays)

    def _made_step(self, batch: Batch) -> jax.stages.Compiled:
        """The step, compiled for batches like this one."""
        kind = batch.whole, kind_of(batch.values)
        if kind not in self._executables:
            _check_numbers(batch)
            assert self._step is not None
            began = time.perf_counter()
            with self._lowered.scope():
                lowered = self._step.lower(
                    self._state(), self._read.arrays, 1.0, self._lowered.batch(batch)
                )
            self._executables[kind] = made = lowered.compile()
            seconds = time.perf_counter() - began
            found = taken(made, self._strategy.mesh.devices.flat[0].platform)
            self.footprint = stepper.Footprint(found.arguments, found.temporaries, seconds)
        return self._executables[kind]

    def _state(self) -> list[list[jax.Array]]:
        return [group.arrays for group in self._carried]

    def _settled(self, batch: Any) -> Any:
        """The step's jaxpr, once it is known which numbers it carries."""
        while True:
            shapes = jax.tree.map(self._outline, (self._state(), self._read.arrays))
            try:
                with over(self._traced_for):
                    traced = jax.jit(self._function).trace(*shapes, 1.0, batch)
            except jax.errors.TracerBoolConversionError as error:
                error.args = (f"{error}\n{_ON_ARRAYS}",)
                raise
            unsettled = [group for group in self._carried if group.settle()]
            if not unsettled:
                return traced.jaxpr

    def _outline(self, array: Any) -> jax.ShapeDtypeStruct:
        return outline(array, self._traced_for)

    def _planned(self, traced: Any, batch: Any) -> Plan:
        inputs: list[tuple[str, Role]] = [
            (name, "carried") for group in self._carried for name in group.named(group.arrays)
        ]
        inputs += [(path, "read") for paths in self._read.paths for path in paths]
        inputs.append(("the factor of learning rates", "read"))
        given = dict(zip(self._request.program.given, batch, strict=True))
        inputs += batch_inputs(given)
        planning = self._request.options.planning
        target = target_of(planning, self._strategy)
        return plan_of(traced, inputs, target, planning, self._pinned())

    def _pinned(self) -> dict[str, Spec]:
        """How arrays lie that their user has cut over the strategy's mesh."""
        arrays = [item for group in self._carried for item in group.named(group.arrays).items()]
        for paths, own in zip(self._read.paths, self._read.arrays, strict=True):
            arrays += zip(paths, own, strict=True)
        return {
            path: spec_of(array)
            for path, array in arrays
            if self._stays(array) and is_over(array.sharding, self._strategy.mesh)
        }

    def _stays(self, array: Any) -> bool:
        """Whether its user has cut it over these devices; what an earlier plan has cut may move."""
        return is_cut(array, self._strategy.mesh) and not self._strategy.has_laid(array)

    def _place(self) -> None:
        """Put everything where the plan has it."""

        def at(path: str, array: Any) -> jax.Array:
            return array if self._stays(array) else placed(array, self._lowered.sharding(path))

        def donated(path: str, array: Any) -> jax.Array:
            """On the mesh, and nobody else's: what is donated is gone."""
            leaf = at(path, array)
            if id(leaf) in self._held:
                leaf = leaf.copy()
            self._held.add(id(leaf))
            return leaf

        for group in self._carried:
            group.place(donated)
        self._read.place(at)

    def _compiled(self) -> jax.stages.Wrapped:
        given = self._state(), self._read.arrays
        shardings = jax.tree.map(lambda leaf: leaf.sharding, given)
        return jax.jit(
            self._lowered.over(self._function, shardings),
            donate_argnums=0,
            out_shardings=(self._lowered.replicated, shardings[0]),
        )

    def _pure(
        self, state: list[list[Any]], read: list[list[Any]], factor: Any, batch: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        before: dict[str, Any] = {}
        for group, arrays in zip(self._carried, state, strict=True):
            before |= group.values(arrays)
        values = self._read.values(read)
        rates = {name: rate * factor for name, rate in self._rates.items()}
        given = dict(zip(self._request.program.given, batch, strict=True))
        report, assigned = self._body(**before, **values, **rates, **given)
        after = before | dict(zip(self._request.program.carried, assigned, strict=True))
        self._read.check(read, values)
        state_after = [
            group.collect(arrays, before, after)
            for group, arrays in zip(self._carried, state, strict=True)
        ]
        return stepper.scalars(self._request, report, jnp.asarray), state_after


def _check_numbers(batch: Batch) -> None:
    """Raises StepError for what JAX cannot hold."""
    for leaf in leaves(batch.values):
        if leaf.dtype.kind in "OUS":
            raise StepError(
                f"the batch has an array of {leaf.dtype}, and JAX holds numbers only: encode it in "
                "the cell that makes the data"
            )


def _check_same(request: StepRequest, namespace: dict[str, Any]) -> None:
    """What is not on the mesh yet becomes one array there: every rank must have the same."""
    if jax.process_count() == 1:
        return
    lines = {**request.program.reads, **request.program.carried_lines}
    sums = {}
    for name in sorted(lines):
        own = [leaf for leaf in jax.tree.leaves(namespace[name]) if is_own(leaf)]
        if own:
            sums[name] = checksum(map(as_data, own))
    check_state(sums, lines, processes.gather)


def _take(
    request: StepRequest, namespace: dict[str, Any], apart: set[str]
) -> tuple[list[Carried], Arguments, set[int]]:
    """What the step carries and what it only reads, out of the user's namespace.

    Names in `apart` are given to the step in another way.

    Returns:
        Both, and the identities of arrays that other names mean.
    """
    program = request.program
    reads = {n: line for n, line in program.reads.items() if n not in apart}
    lines = {**reads, **program.carried_lines}
    objects = {n: line for n, line in lines.items() if holds_objects(namespace[n])}
    trees = {n: line for n, line in program.carried_lines.items() if n not in objects}
    read = {n: line for n, line in reads.items() if n not in objects and is_argument(namespace[n])}

    def values(names: dict[str, int]) -> tuple[Any, ...]:
        return tuple(namespace[name] for name in names)

    in_place = values({n: line for n, line in objects.items() if n not in program.carried})
    own = {*objects, *trees}
    closed = {n: line for n, line in lines.items() if n not in own and n not in read}
    check_captures(closed, set(program.carried), namespace, values(objects))
    held = held_elsewhere(namespace, own, in_place)
    carried = [Carried(trees, values(trees), Trees())]
    if objects:
        from nbdist.worker.nnx_objects import Objects, check_places

        check_places(objects, values(objects))
        carried.append(Carried(objects, values(objects), Objects()))
    return carried, Arguments(read, values(read)), held
