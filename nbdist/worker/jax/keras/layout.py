"""`fit` with Keras on JAX, laid out as it was planned.

A train function of ours plans the model's own `train_step` once it has its first batch, puts the
model's variables where the plan has them, and compiles the step for that. What `evaluate` and
`predict` compile follows the variables. A variable that is cut is read and saved by all ranks
together.

Seen with Keras 3.15.1: of other versions nothing is planned.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.config import is_nnx_enabled
from keras.src.backend.jax import distribution_lib
from keras.src.backend.jax.core import JaxVariable
from keras.src.backend.jax.trainer import JAXTrainer

from nbdist.errors import StrategyError
from nbdist.records import Compiled, Planned, Planning
from nbdist.worker.jax.arrays.leaves import gathered, is_spread, placed
from nbdist.worker.jax.keras import patch as keras_patch
from nbdist.worker.jax.keras.planning import groups_of, paths, plan_of_fit
from nbdist.worker.planning.compiled_memory import taken
from nbdist.worker.planning.sharding import Lowered
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jax.sharding import Mesh, NamedSharding

    from nbdist.records import Plan
    from nbdist.worker.jax.arrays.distributed_dataset import Tree

State = tuple[list[Any], ...]
"""What Keras has its step carry: the trained, the others, the optimizer's, the metrics'."""

_array_upstream = JaxVariable.__array__
_read: dict[int, np.ndarray] | None = None
"""Values of variables that are cut, by the variable's id, while rank 0 writes them; else None."""


@functools.cache
def apply() -> None:
    """Have every train function that is made from here on lay its model out."""
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
        elif context.current().planning != Planning():
            text = "the model is not compiled (jit_compile, run_eagerly), and so not laid out"
            context.current().note("compiled", text, warning=True)

    JAXTrainer.make_train_function = make_train_function
    for name in ("test", "predict"):
        _follow(f"make_{name}_function", f"{name}_function")
    JaxVariable.__array__ = _array


class _Layout:
    """A plan of a model, and the step compiled for it.

    Args:
        plan: the plan.
        mesh: the strategy's.
        model: whose plan it is.

    Attributes:
        lowered: the plan on live devices.
        wanted: how each of the variables is to lie, group by group.
        executables: the step, by the kind of batch.
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
    """The train function of one model.

    Args:
        model: it is built, with its optimizer and metrics.
        upstream: Keras's own, which leaves every variable where it is.
    """

    def __init__(self, model: Any, upstream: Callable[..., Any]) -> None:
        self._model = model
        self._upstream = upstream
        self._function = model._make_function(self._make)
        self._step = self._pure  # one object: JAX keeps traces by it
        self._asked: Planning | None = None
        self._layout: _Layout | None = None
        self._told = 0
        self._last: Callable[[], Any] = lambda: None

    def __call__(self, carried: State, batches: Iterator[Any]) -> Any:
        worker = context.current()
        held = tuple(map(list, carried))
        try:
            if worker.planning != self._asked:
                first = next(batches)
                batches = itertools.chain((first,), batches)
                self._layout = self._planned(held, first, worker.planning)
                self._asked = worker.planning
            if self._layout is None:
                return self._upstream(carried, batches)
            self._tell(self._layout.plan)
            if _newest(carried) is not self._last():  # it is not what the step before has made
                self._move(held, self._layout)
                carried = held
            logs, after = self._function(carried, batches)
        except BaseException:
            self._give_back(held)
            raise
        self._last = weakref.ref(_newest(after))
        return logs, after

    def _planned(self, carried: State, batch: Any, asked: Planning) -> _Layout | None:
        """None where nothing was asked for, and no plan can be made: all have all, as ever."""
        strategy = context.current().strategies["pjrt"]
        batch = _full(batch)
        try:
            plan = plan_of_fit(self._model, self._step, carried, batch, asked, strategy)
        except Exception as error:
            if asked != Planning():
                raise
            text = f"every device has all of the model, for it was not planned: {error}"
            context.current().note("compiled", text, warning=True)
            return None
        # Those are for another layout.
        self._model.test_function = self._model.predict_function = None
        return _Layout(plan, strategy.mesh, self._model)

    def _tell(self, plan: Plan) -> None:
        """Each cell has its plan."""
        worker = context.current()
        if self._told != worker.cell and worker.rank == 0:
            worker.say(Planned(plan=plan, **worker.said()))
        self._told = worker.cell

    def _move(self, carried: State, layout: _Layout) -> None:
        """Put what Keras has given, of variables that may lie anywhere, where it is to lie."""
        before = [array for arrays in carried for array in arrays]
        seen: set[int] = set()
        groups = groups_of(self._model).values()
        for group, arrays, wanted in zip(groups, carried, layout.wanted, strict=True):
            for index, sharding in enumerate(wanted):
                arrays[index] = _moved(group[index], arrays[index], sharding, seen)
        for array in before:
            if id(array) not in seen and not array.is_deleted():
                array.delete()  # it makes room; the step would take it along anyway

    def _give_back(self, carried: State) -> None:
        """The variables have their values again: Keras has taken them away before the step."""
        for group, arrays in zip(groups_of(self._model).values(), carried, strict=True):
            for variable, array in zip(group, arrays, strict=True):
                if variable._value is None and not array.is_deleted():
                    variable._value = array

    def _make(self, carried: State, batch: Any) -> Any:
        layout = self._layout
        assert layout is not None
        batch = _over(layout.lowered.mesh, batch)
        leaves, structure = jax.tree.flatten(batch)
        kind = structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if kind not in layout.executables:
            layout.executables[kind] = self._compiled(layout, carried, batch)
        return layout.executables[kind](carried, batch)

    def _compiled(self, layout: _Layout, carried: State, batch: Any) -> Callable[..., Any]:
        lowered, worker = layout.lowered, context.current()
        step = jax.jit(
            lowered.over(self._step, layout.wanted),
            donate_argnums=0,
            out_shardings=(lowered.replicated, tuple(layout.wanted)),
        )
        began = time.perf_counter()
        with lowered.scope():
            made = step.lower(carried, batch).compile()
        seconds = time.perf_counter() - began
        if worker.rank == 0:
            found = taken(made, lowered.mesh.devices.flat[0].platform)
            worker.say(
                Compiled(
                    arguments=found.arguments,
                    temporaries=found.temporaries,
                    seconds=seconds,
                    **worker.said(),
                )
            )
        compiled: Callable[..., Any] = made
        return compiled

    def _pure(self, carried: State, batch: Any) -> tuple[Any, State]:
        """Keras's step; what it carries keeps its types."""
        logs, after = self._model.train_step(carried, batch)
        return logs, jax.tree.map(_typed_as, tuple(map(list, after)), carried)


def _newest(carried: State) -> Any:
    """An array that Keras makes anew where it has put the state back: that of the last metric."""
    return carried[-1][-1]


def _moved(variable: Any, array: jax.Array, sharding: NamedSharding, seen: set[int]) -> jax.Array:
    """The variable's array where it is to lie, and nobody else's: the step takes it along."""
    own = jax.process_count() > 1 and array.is_fully_addressable  # of a model made out of the scope
    moved = distribution_lib.distribute_tensor(array, sharding) if own else placed(array, sharding)
    variable._layout = sharding
    if id(moved) in seen:
        moved = moved.copy()
    if variable._value is not None:
        variable._value = moved
    seen.add(id(moved))
    return moved


def _full(batch: Any) -> Any:
    """The batch with as many rows as one that a run that goes on has passed over.

    It is to be laid out as it was, and may begin with the last batch of an epoch.
    """
    passed = context.current().passed_rows
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
    """Have functions of the trainer's take batches to where the model's variables are."""
    upstream = getattr(JAXTrainer, maker)

    def make(self: Any, force: bool = False) -> Any:
        made = getattr(self, name) is None or force
        upstream(self, force)
        mesh = _mesh_of(self)
        if made and mesh is not None:
            function = getattr(self, name)
            setattr(self, name, lambda carried, all_: function(carried, _all_over(mesh, all_)))
        return getattr(self, name)

    setattr(JAXTrainer, maker, make)


def _mesh_of(model: Any) -> Mesh | None:
    """The mesh that the model is laid out over, if it is not the strategy's."""
    layouts = (variable._layout for variable in model.variables)
    meshes = (layout.mesh for layout in layouts if isinstance(layout, jax.NamedSharding))
    return next((mesh for mesh in meshes if len(mesh.axis_names) > 1), None)


def _all_over(mesh: Mesh, batches: Iterable[Any]) -> Iterator[Any]:
    return (_over(mesh, batch) for batch in batches)


def _over(mesh: Mesh, batch: Tree) -> Tree:
    """The same rows on the same devices, by the axes of another mesh."""

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
    """A variable as NumPy's array; all ranks have to ask for one that is cut.

    Raises:
        StrategyError: it is cut, and this rank asks alone.
    """
    value = self._value
    if not isinstance(value, jax.Array) or not is_spread(value):
        return _array_upstream(self, dtype)
    if _read is not None and id(self) in _read:
        return np.array(_read[id(self)], dtype, copy=copy)
    if _read is not None or keras_patch.current() is None:
        raise StrategyError(
            f"`{self.path}` is cut over the ranks, and this one asks for all of it alone: read it "
            "on all ranks, in a --strategy pjrt cell"
        )
    return np.array(gathered(self.value), dtype, copy=copy)


@contextlib.contextmanager
def read_by_all(model: Any, *, keep: bool) -> Iterator[None]:
    """Within it, this process alone can read what is cut; all ranks have to enter.

    Args:
        model: whose variables and optimizers are read, and those of the models within it.
        keep: whether this is a process that reads.
    """
    global _read  # noqa: PLW0603 - what reads is Keras's own
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
