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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from keras.src.backend.config import is_nnx_enabled
from keras.src.backend.jax import distribution_lib
from keras.src.backend.jax.core import JaxVariable
from keras.src.backend.jax.trainer import JAXTrainer

from nbdist.records import Compiled, Planned, Planning
from nbdist.worker import keras_jax_patch, state
from nbdist.worker.keras_planning import groups_of, paths, plan_of_fit
from nbdist.worker.leaves import gathered, placed
from nbdist.worker.lowered import Lowered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jax.sharding import Mesh

    from nbdist.records import Plan
    from nbdist.worker.distributed_data import Tree

State = tuple[list[Any], ...]
"""What Keras has its step carry: the trained, the others, the optimizer's, the metrics'."""

_array_upstream = JaxVariable.__array__
_read: dict[int, np.ndarray] = {}
"""Values of variables that are cut, while rank 0 writes them, by the variable's id."""


@functools.cache
def apply() -> None:
    """Have every train function that is made from here on lay its model out."""
    if not keras_jax_patch.apply():
        return
    make_train = JAXTrainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> None:
        if self.train_function is not None and not force:
            return
        make_train(self, force)
        if _is_planned(self):
            self.train_function = _Training(self)

    JAXTrainer.make_train_function = make_train_function
    for name in ("test", "predict"):
        _follow(f"make_{name}_function", f"{name}_function")
    JaxVariable.__array__ = _array


def _is_planned(model: Any) -> bool:
    compiles = model.jit_compile and not model.run_eagerly and not is_nnx_enabled()
    return compiles and keras_jax_patch.current() is not None


class _Training:
    """The train function of one model.

    Args:
        model: it is built, with its optimizer and metrics.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._function = model._make_function(self._make)
        self._step = self._pure  # one object: JAX keeps traces by it
        self._executables: dict[Any, Callable[..., Any]] = {}
        self._asked = Planning()
        self._told = 0
        self._plan: Plan | None = None
        self._lowered: Lowered

    def __call__(self, carried: State, batches: Iterator[Any]) -> Any:
        worker = state.current()
        if self._plan is None or worker.planning != self._asked:
            first = next(batches)
            batches = itertools.chain((first,), batches)
            with _kept(self._model, carried):
                carried = self._lay_out(carried, first, worker.planning)
        if self._told != worker.cell and worker.rank == 0:
            assert self._plan is not None
            worker.say(Planned(plan=self._plan, **worker.said()))
        self._told = worker.cell
        return self._function(carried, batches)

    def _lay_out(self, carried: State, batch: Any, asked: Planning) -> State:
        """Put every variable, and what is carried in its place, where a plan has it."""
        model = self._model
        strategy = state.current().strategies["pjrt"]
        whole = _full(batch)
        self._plan = plan_of_fit(model, self._step, carried, whole, asked, strategy)
        self._asked, self._lowered = asked, Lowered(self._plan, strategy.mesh)
        self._executables.clear()
        model.test_function = model.predict_function = None  # they are for the old layout
        words = iter(paths(model))
        return tuple(
            [
                _move(variable, array, self._lowered.sharding(next(words)))
                for variable, array in zip(group, arrays, strict=True)
            ]
            for group, arrays in zip(groups_of(model).values(), carried, strict=True)
        )

    def _make(self, carried: State, batch: Any) -> Any:
        batch = _over(self._lowered.mesh, batch)
        leaves, structure = jax.tree.flatten(batch)
        kind = structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if kind not in self._executables:
            self._executables[kind] = self._compiled(carried, batch)
        return self._executables[kind](carried, batch)

    def _compiled(self, carried: State, batch: Any) -> Callable[..., Any]:
        lowered, worker = self._lowered, state.current()
        step = jax.jit(
            lowered.over(self._step),
            donate_argnums=0,
            out_shardings=(lowered.replicated, jax.tree.map(lambda a: a.sharding, carried)),
        )
        began = time.perf_counter()
        with lowered.scope():
            made = step.lower(carried, batch).compile()
        told = made.memory_analysis()
        if told is not None and worker.rank == 0:
            worker.say(
                Compiled(
                    arguments=told.argument_size_in_bytes,
                    temporaries=told.temp_size_in_bytes,
                    seconds=time.perf_counter() - began,
                    **worker.said(),
                )
            )
        compiled: Callable[..., Any] = made
        return compiled

    def _pure(self, carried: State, batch: Any) -> tuple[Any, State]:
        """Keras's step; what it carries keeps its types."""
        logs, after = self._model.train_step(carried, batch)
        return logs, jax.tree.map(_typed_as, after, carried)


def _full(batch: Any) -> Any:
    """The batch with as many rows as the first of its data has: a run that goes on may begin later.

    It is to be laid out as it was.
    """
    placement = keras_jax_patch.current()
    rows = max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), default=0)
    if placement is None or rows >= placement.rows:
        return batch

    def larger(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = (placement.rows, *leaf.shape[1:]) if leaf.shape[:1] == (rows,) else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(larger, batch)


@contextlib.contextmanager
def _kept(model: Any, carried: State) -> Iterator[None]:
    """The variables have their values back where it fails: Keras has taken them away."""
    try:
        yield
    except BaseException:
        for group, arrays in zip(groups_of(model).values(), carried, strict=True):
            for variable, array in zip(group, arrays, strict=True):
                if variable._value is None and not array.is_deleted():
                    variable._value = array
        raise


def _typed_as(new: Any, old: Any) -> Any:
    return jnp.asarray(new, old.dtype)


def _move(variable: Any, array: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
    """The variable's array elsewhere. The old one makes room: the step would take it anyway."""
    own = jax.process_count() > 1 and array.is_fully_addressable  # of a model made out of the scope
    moved = distribution_lib.distribute_tensor(array, sharding) if own else placed(array, sharding)
    variable._layout = sharding
    if variable._value is not None:
        variable._value = moved
    if moved is not array:
        array.delete()
    return moved


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
        if not isinstance(array, jax.Array) or array.sharding.mesh == mesh:
            return array
        spec = jax.P() if array.is_fully_replicated else jax.P(mesh.axis_names)
        parts = [part.data for part in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            array.shape, jax.NamedSharding(mesh, spec), parts
        )

    return jax.tree.map(over, batch)


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """A variable as NumPy's array; all ranks have to ask for one that is cut."""
    value = self._value
    if id(self) in _read:
        return np.array(_read[id(self)], dtype, copy=copy)
    if isinstance(value, jax.Array) and _is_spread(value):
        return np.array(gathered(self.value), dtype, copy=copy)
    return _array_upstream(self, dtype)


def _is_spread(array: jax.Array) -> bool:
    """Whether no process has all of it."""
    return not (array.is_fully_addressable or array.is_fully_replicated)


@contextlib.contextmanager
def read_by_all(model: Any, *, keep: bool) -> Iterator[None]:
    """Within it, this process alone can read what is cut; all ranks have to enter.

    Args:
        model: whose variables and optimizer are read.
        keep: whether this is a process that reads.
    """
    variables = [*model.variables, *getattr(vars(model).get("optimizer"), "variables", ())]
    spread = [v for v in variables if v._value is not None and _is_spread(v._value)]
    try:
        for variable in spread:
            whole = gathered(variable._value)
            if keep:
                _read[id(variable)] = np.asarray(whole)
        yield
    finally:
        for variable in spread:
            _read.pop(id(variable), None)
