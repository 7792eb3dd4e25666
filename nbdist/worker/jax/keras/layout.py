"""`fit` with Keras on JAX in the layout of a plan.

When the first batch arrives, nbdist's train function plans the model's own `train_step`, moves the
model's variables to their planned shardings, and compiles the step. The functions of `evaluate` and
`predict` follow the variables. Reading or saving a sharded variable is a collective operation.

Tested with Keras 3.15.1; other versions are not planned.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from msgspec import structs

from nbdist.errors import StrategyError
from nbdist.private_api.keras import JAXTrainer, JaxVariable, distribution_lib, is_nnx_enabled
from nbdist.records import Planned, Planning
from nbdist.worker.jax.arrays.leaves import gathered, is_spread, placed
from nbdist.worker.jax.keras import patch as keras_patch
from nbdist.worker.jax.keras.planning import groups_of, paths, plan_of_fit
from nbdist.worker.jax.keras.watched import KerasSignals
from nbdist.worker.planning.compiled_memory import compiled
from nbdist.worker.planning.sharding import Lowered
from nbdist.worker.runtime import context, signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jax.sharding import Mesh, NamedSharding

    from nbdist.records import Plan
    from nbdist.worker.jax.arrays.distributed_dataset import Tree

State = tuple[list[Any], ...]
"""State of Keras's step: trainable, other, optimizer and metric variables."""

_array_upstream = JaxVariable.__array__
_read: dict[int, np.ndarray] | None = None
"""Values of sharded variables by the variable's id while rank 0 writes them; otherwise None."""


@functools.cache
def apply() -> None:
    """Patch Keras so that new train functions shard their model."""
    if not keras_patch.apply():
        return
    make_train = JAXTrainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> None:
        if self.train_function is not None and not force:
            return
        make_train(self, force)
        if keras_patch.current() is None:
            return
        if self.jit_compile and not self.run_eagerly and not is_nnx_enabled():
            self.train_function = _Training(self, self.train_function)
        elif context.current().request.planning != Planning():
            text = "the model is not compiled (jit_compile, run_eagerly), so it is not sharded"
            context.current().reporter.note("compiled", text, warning=True)

    JAXTrainer.make_train_function = make_train_function
    for name in ("test", "predict"):
        _follow(f"make_{name}_function", f"{name}_function")
    JaxVariable.__array__ = _array


class _Layout:
    """Plan of a model, and the step compiled for it.

    Args:
        plan: Plan of the model.
        mesh: Mesh of the strategy.
        model: Planned model.

    Attributes:
        lowered: Plan on the live devices.
        wanted: Planned sharding of each variable, by group.
        executables: Compiled steps by the structure, shapes and shardings of the batch.
    """

    def __init__(self, plan: Plan, mesh: Mesh, model: Any) -> None:
        self.plan = plan
        self.lowered = Lowered(plan, mesh)
        words = iter(paths(model))
        self.wanted = [
            [self.lowered.sharding(next(words)) for _ in group]
            for group in groups_of(model).values()
        ]
        self.executables: dict[Any, Callable[..., Any]] = {}


class _Training:
    """Train function of one model.

    Args:
        model: Built model with its optimizer and metrics.
        upstream: Keras's train function, which moves no variables.
    """

    def __init__(self, model: Any, upstream: Callable[..., Any]) -> None:
        self._model = model
        self._upstream = upstream
        self._function = model._make_function(self._make)
        self._step = self._pure  # one object: JAX caches traces by identity
        self._requested: Planning | None = None
        self._layout: _Layout | None = None
        self._reported = 0
        self._signals = KerasSignals(model)
        self._last: Callable[[], Any] = lambda: None

    def __call__(self, carried: State, batches: Iterator[Any]) -> Any:
        worker = context.current()
        held = tuple(map(list, carried))
        try:
            requested = worker.request.planning
            if requested != self._requested:
                first = next(batches)
                batches = itertools.chain((first,), batches)
                self._layout = self._planned(held, first, requested)
                self._requested = requested
            if self._layout is None:
                return self._upstream(carried, batches)
            self._report_plan(self._layout.plan)
            if _newest(carried) is not self._last():  # it is not what the step before has made
                self._move(held, self._layout)
                carried = held
            logs, after = self._function(carried, batches)
        except BaseException:
            self._return_values(held)
            raise
        self._last = weakref.ref(_newest(after))
        return self._signals.readable(logs), after

    def _planned(self, carried: State, batch: Any, requested: Planning) -> _Layout | None:
        """Plan the model; returns None if no plan was requested and none can be made.

        Without a plan every device holds the whole model.
        """
        strategy = context.current().strategies["pjrt"]
        batch = _full(batch)
        try:
            plan = plan_of_fit(self._model, self._step, carried, batch, requested, strategy)
        except Exception as error:
            if requested != Planning():
                raise
            text = f"planning failed, and every device holds the whole model: {error}"
            context.current().reporter.note("compiled", text, warning=True)
            return None
        # They were compiled for another layout.
        self._model.test_function = self._model.predict_function = None
        return _Layout(plan, strategy.mesh, self._model)

    def _report_plan(self, plan: Plan) -> None:
        """Report the plan once per cell."""
        reporter = context.current().reporter
        if self._reported != reporter.cell and reporter.rank == 0:
            reporter.send(Planned(plan=plan, **reporter.record_fields()))
        self._reported = reporter.cell

    def _move(self, carried: State, layout: _Layout) -> None:
        """Move the variables' values from Keras to their planned shardings."""
        before = [array for arrays in carried for array in arrays]
        seen: set[int] = set()
        groups = groups_of(self._model).values()
        for group, arrays, wanted in zip(groups, carried, layout.wanted, strict=True):
            for index, sharding in enumerate(wanted):
                arrays[index] = _moved(group[index], arrays[index], sharding, seen)
        for array in before:
            if id(array) not in seen and not array.is_deleted():
                array.delete()  # frees memory; the step would donate it anyway

    def _return_values(self, carried: State) -> None:
        """Return the values to the variables; Keras removed them before the step."""
        for group, arrays in zip(groups_of(self._model).values(), carried, strict=True):
            for variable, array in zip(group, arrays, strict=True):
                if variable._value is None and not array.is_deleted():
                    variable._value = array

    def _make(self, carried: State, batch: Any) -> Any:
        layout = self._layout
        assert layout is not None
        batch = _over(layout.lowered.mesh, batch)
        leaves, structure = jax.tree.flatten(batch)
        recorded = signals.is_recorded(self._model.steps_per_execution)
        due = self._signals.due(self._model.steps_per_execution) if recorded else ()
        kind = (
            *(structure, recorded, len(due)),
            *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves),
        )
        if kind not in layout.executables:
            over = self._signals.over if recorded else None
            layout.executables[kind] = self._compiled(layout, (carried, batch, *due), over)
        return layout.executables[kind](carried, batch, *due)

    def _compiled(
        self,
        layout: _Layout,
        arguments: tuple[Any, ...],
        over: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> Callable[..., Any]:
        lowered = layout.lowered
        function = lowered.over(self._step, layout.wanted)
        step = jax.jit(
            function if over is None else over(function),
            donate_argnums=0,
            out_shardings=(lowered.replicated, tuple(layout.wanted)),
        )
        platform = lowered.mesh.devices.flat[0].platform
        with lowered.scope():
            made, footprint = compiled(lambda: step.lower(*arguments), platform)
        context.current().reporter.compiled(*structs.astuple(footprint))
        executable: Callable[..., Any] = made
        return executable

    def _pure(self, carried: State, batch: Any) -> tuple[Any, State]:
        """Run Keras's step; the carried state keeps its dtypes."""
        logs, after = self._model.train_step(carried, batch)
        return logs, jax.tree.map(_typed_as, tuple(map(list, after)), carried)


def _newest(carried: State) -> Any:
    """Return the last metric's array: Keras makes a new one when it puts the state back."""
    return carried[-1][-1]


def _moved(variable: Any, array: jax.Array, sharding: NamedSharding, seen: set[int]) -> jax.Array:
    """Move a variable's array to its sharding, as a copy if shared: the step donates it."""
    own = jax.process_count() > 1 and array.is_fully_addressable  # made outside of the scope
    moved = distribution_lib.distribute_tensor(array, sharding) if own else placed(array, sharding)
    variable._layout = sharding
    if id(moved) in seen:
        moved = moved.copy()
    if variable._value is not None:
        variable._value = moved
    seen.add(id(moved))
    return moved


def _full(batch: Any) -> Any:
    """Return the batch, with as many rows as the batches that a resumed run skipped.

    The first batch may be the smaller last batch of an epoch, and the layout must not change.
    """
    passed = context.current().progress.passed_rows
    rows = max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), default=0)
    if rows >= passed:
        return batch

    def larger(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = (passed, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(larger, batch)


def _typed_as(new: Any, old: Any) -> Any:
    return jnp.asarray(new, old.dtype)


def _follow(maker: str, name: str) -> None:
    """Patch the trainer to place batches on the mesh of the model's variables."""
    upstream = getattr(JAXTrainer, maker)

    def make(self: Any, force: bool = False) -> Any:
        made = getattr(self, name) is None or force
        upstream(self, force)
        mesh = _mesh_of(self)
        if made and mesh is not None:
            function = getattr(self, name)
            over = functools.partial(_over, mesh)
            setattr(self, name, lambda carried, batches: function(carried, map(over, batches)))
        return getattr(self, name)

    setattr(JAXTrainer, maker, make)


def _mesh_of(model: Any) -> Mesh | None:
    """Return the mesh of the model's layout; None if it is the strategy's mesh."""
    layouts = (variable._layout for variable in model.variables)
    meshes = (layout.mesh for layout in layouts if isinstance(layout, jax.NamedSharding))
    return next((mesh for mesh in meshes if len(mesh.axis_names) > 1), None)


def _over(mesh: Mesh, batch: Tree) -> Tree:
    """Express arrays on the axes of another mesh; the rows stay on their devices."""

    def over(array: jax.Array) -> jax.Array:
        sharded = isinstance(array, jax.Array) and isinstance(array.sharding, jax.NamedSharding)
        if not sharded or array.sharding.mesh == mesh:
            return array
        spec = jax.P() if array.is_fully_replicated else jax.P(mesh.axis_names)
        parts = [part.data for part in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            array.shape, jax.NamedSharding(mesh, spec), parts
        )

    return jax.tree.map(over, batch)


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """Convert a variable to NumPy; collective if it is sharded.

    Raises:
        StrategyError: The variable is sharded, and only this rank reads it.
    """
    value = self._value
    if not isinstance(value, jax.Array) or not is_spread(value):
        return _array_upstream(self, dtype)
    if _read is not None and id(self) in _read:
        return np.array(_read[id(self)], dtype, copy=copy)
    if _read is not None or keras_patch.current() is None:
        raise StrategyError(
            f"`{self.path}` is sharded over the ranks, and only this rank reads it: read it on all "
            "ranks, in a --strategy pjrt cell"
        )
    return np.array(gathered(self.value), dtype, copy=copy)


@contextlib.contextmanager
def read_by_all(model: Any, *, keep: bool) -> Iterator[None]:
    """Let this process alone read sharded variables. Collective.

    Args:
        model: Model whose variables and optimizers are read, including its inner models.
        keep: True if this process reads them.
    """
    global _read  # noqa: PLW0603 - Keras's own code reads it
    variables = {id(variable): variable for variable in model.variables}
    for layer in model._flatten_layers():
        for part in vars(layer).values():
            if isinstance(part, keras.optimizers.Optimizer):
                variables |= {id(variable): variable for variable in part.variables}
    there = {key: v._value for key, v in variables.items() if v._value is not None}
    values: dict[int, np.ndarray] = {}
    for key, value in there.items():
        if is_spread(value):
            whole = gathered(value)
            if keep:
                values[key] = np.asarray(whole)
    _read = values
    try:
        yield
    finally:
        _read = None
