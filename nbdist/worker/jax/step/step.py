"""Step under JAX, in global view: one jitted function over the mesh of all devices."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import jax

from nbdist.worker.data.batches import kind_of
from nbdist.worker.jax.arrays import callbacks_patch
from nbdist.worker.jax.arrays.checkpoint import JaxState, check_fits, placed_like
from nbdist.worker.jax.runtime import processes
from nbdist.worker.jax.runtime.step_signals import NAME as SIGNALS
from nbdist.worker.jax.runtime.watched_step import WatchedStep
from nbdist.worker.jax.step.function import StepFunction
from nbdist.worker.jax.step.layout import StepLayout
from nbdist.worker.jax.step.names import check_numbers
from nbdist.worker.jax.step.parity import PjrtSubject
from nbdist.worker.planning.compiled_memory import compiled
from nbdist.worker.planning.sharding import Lowered
from nbdist.worker.profiling.jax_profiler import PjrtTracer
from nbdist.worker.runtime import signals
from nbdist.worker.runtime.shell import is_program
from nbdist.worker.training import step_contract
from nbdist.worker.training.parity import compare
from nbdist.worker.training.warmup import Factor, learning_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np

    from nbdist.records import Plan, Rate, StepRequest
    from nbdist.worker.data.batches import Batch
    from nbdist.worker.jax.step.carried import Carried
    from nbdist.worker.jax.step.layout import PlannedMesh
    from nbdist.worker.jax.step.own_mesh import OwnMesh
    from nbdist.worker.profiling.trace import Tracer
    from nbdist.worker.training.parity import Findings


class _CompiledStep:
    """Planned step, compiled once for each kind of batch.

    Args:
        function: Function of the step.
        lowered: Shardings on the live devices; the arrays of the step are already placed.

    Attributes:
        footprint: Memory of the program that was compiled last.
    """

    def __init__(self, function: StepFunction, lowered: Lowered | OwnMesh) -> None:
        given = function.arguments()
        shardings = jax.tree.map(lambda leaf: leaf.sharding, given)
        self.lowered = lowered
        self.footprint: step_contract.Footprint | None = None
        self.signals = WatchedStep(function.named_state)
        self._function = function
        step = lowered.over(function.call, shardings)
        self._steps = [step, self.signals.over(step)] if signals.is_watched() else [step]
        self._shardings = lowered.replicated, shardings[0]
        self._executables: dict[tuple[bool, Any], list[jax.stages.Compiled]] = {}

    def __len__(self) -> int:
        return len(self._executables)

    def executable(self, batch: Batch, *, recorded: bool = False) -> jax.stages.Compiled:
        """Return the step compiled for batches like this one.

        Args:
            batch: the batch.
            recorded: the step has signals of training.
        """
        kind = batch.whole, kind_of(batch.values)
        if kind not in self._executables:
            check_numbers(batch)
            jax.effects_barrier()  # callbacks may change objects that a trace inspects and restores
            self._executables[kind] = [self._made(step, batch) for step in reversed(self._steps)]
        return self._executables[kind][0 if recorded else -1]

    def _made(self, step: Callable[..., Any], batch: Batch) -> jax.stages.Compiled:
        arguments: tuple[Any, ...] = *self._function.arguments(), 1.0, self.lowered.batch(batch)
        if step is not self._steps[0]:
            arguments += self.signals.due()
        jitted = jax.jit(step, donate_argnums=0, out_shardings=self._shardings)
        with self.lowered.scope():
            made, self.footprint = compiled(
                lambda: jitted.lower(*arguments), self.lowered.mesh.devices.flat[0].platform
            )
        return made


class PjrtStep:
    """Step whose carried state is donated and stays on the devices, and whose inputs are arguments.

    The state consists of names that the step reads and then assigns, and of objects of Flax NNX.
    Slots of other objects that the step rebinds belong to it too (`ObjectState`). The layout is
    planned for the first batch. Until then all arrays stay in the user's sharding.

    Args:
        request: Request of the step.
        define: Makes a function from source code, in the user's namespace, under the cell's name.
        namespace: Namespace of the user; carried names are read from it and written back.
        strategy: Strategy over all devices of all ranks.

    Attributes:
        plan: Layout of the step; None before `prepare`.

    Raises:
        StepError: The value of a name can neither be carried nor be read.
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
        self.tracer: Tracer = PjrtTracer()
        self._namespace = namespace
        self._strategy = strategy
        self._function = StepFunction(request, define, namespace)
        self._layout = StepLayout(self._function, request.options, strategy)
        self._compiled: _CompiledStep | None = None
        self._factor = Factor(1, 0)
        self._made = False
        self._reported: dict[str, jax.Array] = {}
        self._rates_read = learning_rates(request, namespace)

    @property
    def changes(self) -> tuple[str, ...]:
        return self._function.names.changes

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        return {**self._rates_read}

    @property
    def footprint(self) -> step_contract.Footprint | None:
        return None if self._compiled is None else self._compiled.footprint

    def scale_rates(self, warmup_steps: int, made: int) -> tuple[Rate, ...]:
        self._factor = Factor(self.replicas, warmup_steps, made)
        return self._factor.rates(self._function.rates)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        gathered: np.ndarray = processes.gather(numbers)
        return gathered

    def check(self, batch: Batch) -> Findings:
        compiled, function = self._prepared(batch), self._function
        callbacks_patch.check_repeatable(function.effects)
        subject = PjrtSubject(
            function.carried,
            function.names.read,
            step=compiled.executable(batch),
            pure=function.call,
            place=compiled.lowered.batch,
            namespace=self._namespace,
            mesh=compiled.lowered.mesh,
        )
        with callbacks_patch.muted():
            return compare(subject, batch, self.replicas, coarse=False)

    def layout(self, batch: Batch) -> Plan:
        return self._layout.plan(batch)

    def prepare(self, batch: Batch) -> None:
        """Plan, trace and place the step; state that changes its shape or type is refused here.

        Raises:
            PlanError: No layout fits on these devices.
        """
        self._prepared(batch)

    def _prepared(self, batch: Batch) -> _CompiledStep:
        if self._compiled is None:
            lowered = self._layout.on_own_mesh(batch) or self._planned(batch)
            self._function.settle()
            self.replicas = lowered.replicas
            self._layout.place(lowered)
            self._compiled = _CompiledStep(self._function, lowered)
        return self._compiled

    def _planned(self, batch: Batch) -> Lowered:
        self.plan = self.layout(batch)
        return Lowered(self.plan, self._strategy.mesh)

    def state(self) -> JaxState:
        """Return the checkpoint state of the step."""
        return JaxState(self, self.changes)

    def saved(self) -> dict[str, jax.Array]:
        return self._function.named_arrays()

    def alike(self) -> Iterator[tuple[str, jax.Array]]:
        yield from self.saved().items()
        yield from self._reported.items()

    def facts(self) -> dict[str, object]:
        return {**self._rates_read, "--scale-lr": self._factor.now}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        check_fits(arrays, self.saved())
        for group in self._function.carried:
            group.arrays = [
                placed_like(arrays[name], array) if array.size else array
                for name, array in group.named(group.arrays).items()
            ]
        self._made = True

    def step(self, batch: Batch) -> Any:
        compiled = self._prepared(batch)
        recorded = signals.is_recorded()
        executable = compiled.executable(batch, recorded=recorded)
        state, read = self._function.arguments()
        factor, placed = self._factor.next(), compiled.lowered.batch(batch)
        due = compiled.signals.due() if recorded else ()
        report, after = executable(state, read, factor, placed, *due)
        for group, arrays in zip(self._function.carried, after, strict=True):
            group.arrays = arrays
        self._made = True
        self._reported = {name: value for name, value in report.items() if name != SIGNALS}
        return report

    def read(self, report: Any) -> step_contract.StepResult:
        """Read a report; if it contains a loss, only the loss must be finite (as in `mirrored`)."""
        values = {name: float(value) for name, value in report.items() if name != SIGNALS}
        deciding = [values["loss"]] if "loss" in values else list(values.values())
        finite = all(math.isfinite(value) for value in deciding)
        if self._compiled is None or SIGNALS not in report:
            return step_contract.StepResult(values, finite)
        rates = self._function.rate_values(self._factor.now, self._rates_read)
        found = self._compiled.signals.read(report[SIGNALS], rates)
        return step_contract.StepResult(values, finite, signals=found)

    def compilations(self) -> int:
        return 0 if self._compiled is None else len(self._compiled)

    def write_back(self) -> None:
        """Write the carried state to the user's namespace; the next step donates it again."""
        jax.block_until_ready(self._function.arguments()[0])
        jax.effects_barrier()
        self.finish()

    def finish(self) -> None:
        if not self._made:
            return
        self._made = False
        names = self._function.names
        for group in names.groups:
            if self._is_whole(group):
                self._namespace.update(group.finals())
        if self._is_whole(names.objects.carried):
            names.objects.restore()

    def _is_whole(self, group: Carried) -> bool:
        """Return True if no failed step has consumed the buffers: such state cannot be restored."""
        if any(array.is_deleted() for array in group.arrays):
            if not is_program():
                names = ", ".join(f"`{name}`" for name in group.names)
                text = f"{names}: lost in the step that failed; run the cell that creates it again"
                warnings.warn(text, stacklevel=2)
            return False
        if self.plan is not None:
            self._strategy.note_sharded(group.arrays)
        return True
