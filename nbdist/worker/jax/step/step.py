"""A step under JAX, in global view: one jitted function over the mesh of all devices."""

from __future__ import annotations

import functools
import math
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from nbdist.records import DATA
from nbdist.worker.data.batches import kind_of, map_arrays
from nbdist.worker.jax.arrays import callbacks_patch
from nbdist.worker.jax.arrays.checkpoint import JaxState, check_fits, placed_like
from nbdist.worker.jax.arrays.leaves import placed
from nbdist.worker.jax.runtime import processes
from nbdist.worker.jax.step.leaked_tracers import check_leaks, live_tracers
from nbdist.worker.jax.step.names import check_numbers, check_same, take
from nbdist.worker.jax.step.parity import PjrtSubject
from nbdist.worker.planning.compiled_memory import taken
from nbdist.worker.planning.plan_step import (
    MeshWithTarget,
    batch_inputs,
    mesh_to_trace,
    outline,
    over,
    plan_of,
    target_of,
)
from nbdist.worker.planning.sharding import Lowered, is_cut, is_over, spec_of
from nbdist.worker.profiling.jax_profiler import PjrtTracer
from nbdist.worker.training import step_contract
from nbdist.worker.training.parity import compare
from nbdist.worker.training.warmup import Factor, learning_rates, rates_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    import numpy as np

    from nbdist.planner.graph.model import Role
    from nbdist.records import Plan, Rate, Spec, StepRequest
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.jax.step.carried import Carried
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.training.parity import Findings

_ON_ARRAYS = (
    "In a step, the value of an array is not there for Python's if, while, and, or: "
    "type jnp.where(condition, a, b), jax.lax.cond or jax.lax.while_loop"
)


class PlannedMesh(MeshWithTarget, Protocol):
    """The part of `PjRTStrategy` that a step uses."""

    def note_sharded(self, arrays: Iterable[jax.Array]) -> None:
        """Note that a plan has laid these arrays out."""
        ...

    def has_sharded(self, array: jax.Array) -> bool:
        """Return whether a plan, not the user, has laid the array out."""
        ...


class PjrtStep:
    """What the step carries is donated and stays on the devices; what it reads is an argument.

    Carried are names that it reads and then assigns, objects of Flax NNX, and the slots of other
    objects that it rebinds (`ObjectState`). How all of it lies on the devices is planned once the
    first batch is known: until then it stays where the user has it.

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
        strategy: PlannedMesh,
    ) -> None:
        self.shards: int = strategy.mesh.size
        self.replicas = self.shards
        self.plan: Plan | None = None
        self.footprint: step_contract.Footprint | None = None
        self.tracer: Tracer = PjrtTracer()
        self._request = request
        self._namespace = namespace
        self._strategy = strategy
        self._traced_for = mesh_to_trace(request.options.planning, strategy.mesh)
        self._rates = rates_by_name(request, namespace)
        self._lines = {**request.program.reads, **request.program.carried_lines}
        check_same({name: namespace[name] for name in sorted(self._lines)}, self._lines)
        self._names = take(request, namespace, set(self._rates))
        self._define = define
        self._body = self._defined()
        self._function: Callable[..., Any] = self._pure  # one object: JAX keeps traces by it
        self._step: jax.stages.Wrapped | None = None
        self._executables: dict[tuple[bool, Any], jax.stages.Compiled] = {}
        self._lowered: Lowered
        self._factor = Factor(1, 0)
        self._effects: Collection[object] = ()
        self._made = False
        self._reported: dict[str, jax.Array] = {}
        self._rates_read = learning_rates(request, namespace)

    @property
    def changes(self) -> tuple[str, ...]:
        return self._names.changes

    @property
    def _carried(self) -> list[Carried]:
        return self._names.carried

    def _defined(self) -> Callable[..., Any]:
        """The step as a function of what it is given now."""
        given = (*self._names.parameters, *self._rates, *self._request.program.given)
        return self._define(step_contract.function_source(self._request, given))

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        self._factor = Factor(self.replicas, warmup_steps, made)
        return self._factor.rates(self._rates)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        gathered: np.ndarray = processes.gather(numbers)
        return gathered

    def check(self, batch: Batch) -> Findings:
        self.prepare(batch)
        assert self._step is not None
        callbacks_patch.check_repeatable(self._effects)
        subject = PjrtSubject(
            self._carried,
            self._names.read,
            step=self._made_step(batch),
            pure=self._pure,
            place=self._lowered.batch,
            namespace=self._namespace,
        )
        with callbacks_patch.muted():
            return compare(subject, batch, self.replicas, coarse=False)

    def layout(self, batch: Batch) -> Plan:
        check_numbers(batch)
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
            self._names.objects.settle()
            check_same(self._names.objects.originals(), self._lines)
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
            self._state(), self._names.read.arrays, self._factor.next(), self._lowered.batch(batch)
        )
        for group, arrays in zip(self._carried, after, strict=True):
            group.arrays = arrays
        self._made = True
        self._reported = report
        return report

    def read(self, report: Any) -> step_contract.StepResult:
        """Of values that are not finite, the loss decides, as under the mirrored strategy."""
        values = {name: float(value) for name, value in report.items()}
        deciding = [values["loss"]] if "loss" in values else list(values.values())
        return step_contract.StepResult(values, all(math.isfinite(value) for value in deciding))

    def compilations(self) -> int:
        return len(self._executables)

    def write_back(self) -> None:
        """Put what is carried into the user's namespace; the next step takes its buffers again."""
        jax.block_until_ready(self._state())
        jax.effects_barrier()
        self.finish()

    def finish(self) -> None:
        if not self._made:
            return
        self._made = False
        for group in self._names.groups:
            if self._is_whole(group):
                self._namespace.update(group.finals())
        if self._is_whole(self._names.objects.carried):
            self._names.objects.restore()

    def _is_whole(self, group: Carried) -> bool:
        """Whether no failed step took its buffers along: such state cannot be put back."""
        if any(array.is_deleted() for array in group.arrays):
            names = ", ".join(f"`{name}`" for name in group.names)
            text = f"{names}: lost with the step that failed; run the cell that makes it again"
            warnings.warn(text, stacklevel=2)
            return False
        self._strategy.note_sharded(group.arrays)
        return True

    def _made_step(self, batch: Batch) -> jax.stages.Compiled:
        """The step, compiled for batches like this one."""
        kind = batch.whole, kind_of(batch.values)
        if kind not in self._executables:
            check_numbers(batch)
            assert self._step is not None
            jax.effects_barrier()  # callbacks change objects that a trace looks at and restores
            began = time.perf_counter()
            with self._lowered.scope():
                lowered = self._step.lower(
                    self._state(), self._names.read.arrays, 1.0, self._lowered.batch(batch)
                )
            self._executables[kind] = made = lowered.compile()
            seconds = time.perf_counter() - began
            found = taken(made, self._strategy.mesh.devices.flat[0].platform)
            self.footprint = step_contract.Footprint(found.arguments, found.temporaries, seconds)
        return self._executables[kind]

    def _state(self) -> list[list[jax.Array]]:
        return [group.arrays for group in self._carried]

    def _settled(self, batch: Any) -> Any:
        """The step's jaxpr, once it is known which numbers and which slots it carries."""
        tracers = live_tracers()
        while True:
            shapes = jax.tree.map(self._outline, (self._state(), self._names.read.arrays))
            try:
                with over(self._traced_for):
                    traced = jax.jit(self._function).trace(*shapes, 1.0, batch)
            except jax.errors.TracerBoolConversionError as error:
                error.args = (f"{error}\n{_ON_ARRAYS}",)
                raise
            if self._names.settle(self._namespace):
                self._body = self._defined()
                self._function = functools.partial(self._pure)
                continue
            unsettled = [group for group in self._carried if group.settle()]
            if not unsettled:
                check_leaks(tracers, self._lines, self._namespace)
                self._effects = traced.jaxpr.effects
                return traced.jaxpr

    def _outline(self, array: Any) -> jax.ShapeDtypeStruct:
        return outline(array, self._traced_for)

    def _planned(self, traced: Any, batch: Any) -> Plan:
        inputs: list[tuple[str, Role]] = [
            (name, "carried") for group in self._carried for name in group.named(group.arrays)
        ]
        inputs += [(path, "read") for paths in self._names.read.paths for path in paths]
        inputs.append(("the factor of learning rates", "read"))
        given = dict(zip(self._request.program.given, batch, strict=True))
        inputs += batch_inputs(given)
        planning = self._request.options.planning
        target = target_of(planning, self._strategy)
        return plan_of(traced, inputs, target, planning, self._pinned())

    def _pinned(self) -> dict[str, Spec]:
        """How arrays lie that their user has cut over the strategy's mesh."""
        arrays = [item for group in self._carried for item in group.named(group.arrays).items()]
        for paths, own in zip(self._names.read.paths, self._names.read.arrays, strict=True):
            arrays += zip(paths, own, strict=True)
        return {
            path: spec_of(array)
            for path, array in arrays
            if self._stays(array) and is_over(array.sharding, self._strategy.mesh)
        }

    def _stays(self, array: Any) -> bool:
        """Whether its user has cut it over these devices; what an earlier plan has cut may move."""
        return is_cut(array, self._strategy.mesh) and not self._strategy.has_sharded(array)

    def _place(self) -> None:
        """Put everything where the plan has it."""

        def at(path: str, array: Any) -> jax.Array:
            return array if self._stays(array) else placed(array, self._lowered.sharding(path))

        def donated(path: str, array: Any) -> jax.Array:
            """On the mesh, and nobody else's: what is donated is gone."""
            leaf = at(path, array)
            if id(leaf) in self._names.held:
                leaf = leaf.copy()
            self._names.held.add(id(leaf))
            return leaf

        for group in self._carried:
            group.place(donated)
        self._names.read.place(at)

    def _compiled(self) -> jax.stages.Wrapped:
        given = self._state(), self._names.read.arrays
        shardings = jax.tree.map(lambda leaf: leaf.sharding, given)
        return jax.jit(
            self._lowered.over(self._function, shardings),
            donate_argnums=0,
            out_shardings=(self._lowered.replicated, shardings[0]),
        )

    def _pure(
        self, state: list[list[Any]], read: list[list[Any]], factor: Any, batch: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        program, names = self._request.program, self._names
        before: dict[str, Any] = {}
        for group, arrays in zip(names.carried, state, strict=True):
            before |= group.values(arrays)
        values = names.read.values(read)
        given = dict(zip(program.given, batch, strict=True))
        given |= {name: rate * factor for name, rate in self._rates.items()}
        with names.objects.tracing(before) as trace:
            given |= {name: self._namespace[name] for name in names.own}
            given |= {name: before[name] for group in names.groups for name in group.names}
            report, assigned = self._body(**values, **given)
            after = before | dict(zip(program.carried, assigned, strict=True))
            self._namespace.update({name: after[name] for name in names.own})
            after |= names.objects.after(trace, names.read.changed(read, values))
            if names.objects.rebound:
                return {}, state
            state_after = [
                group.collect(arrays, before, after)
                for group, arrays in zip(names.carried, state, strict=True)
            ]
            report = step_contract.scalars(self._request, report, jnp.asarray)
            if all(group.is_settled for group in names.carried):
                trace.finish()
        return report, state_after
