"""Scope of a cell and strategy of its steps, the same in an engine and in an exported program."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any

from nbdist.private_api import jax as private_jax
from nbdist.private_api import keras as private_keras
from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.records import Planning
from nbdist.worker.lifting import lifted_loop, rewritten_loops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.records import CellRequest, Replicated, StepRequest, StrategyName
    from nbdist.worker.inspection.replicated import ReplicatedArrays
    from nbdist.worker.jax.cell_mesh import ContextMesh
    from nbdist.worker.lifting.rewrite import LoopProgram
    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.tensorflow.mirrored_variables import MirroredVariables
    from nbdist.worker.training.step_contract import StepStrategy

_CHECK = "use --check to compare the first step with one replica"
_NO_LIFT = "use --no-lift to run the loops of the cell as they stand, on every worker"


@contextlib.contextmanager
def opened(
    worker: Worker, request: CellRequest, source: Callable[[], str], namespace: dict[str, Any]
) -> Iterator[None]:
    """Enter the scope of the cell's strategy; Keras layers compute in the cell's precision.

    Args:
        worker: this rank.
        request: the cell.
        source: returns the text of the cell, without magics.
        namespace: namespace of the user, in which the scope sets `strategy`.
    """
    name, precision = request.strategy, request.options.precision
    with _scope(worker, request, source, namespace):
        if name is not None:
            namespace["strategy"] = worker.strategies[name]
        if precision is None or request.step is not None:
            yield
            return
        importlib.import_module("keras")  # first: the patches below must apply to this module
        from nbdist.worker.tensorflow.keras.fit_patch import with_precision

        with with_precision(precision):
            yield


def step_strategy(
    worker: Worker,
    request: CellRequest,
    define: Callable[[str], Callable[..., Any]],
    namespace: dict[str, Any],
) -> StepStrategy:
    """Return the strategy that runs the steps of a step cell.

    Args:
        worker: this rank.
        request: the cell.
        define: makes a function from source code, in the user's namespace.
        namespace: namespace of the user.
    """
    step = request.step
    assert step is not None
    strategy = worker.strategies[request.strategy or "mirrored"]
    if request.strategy == "pjrt":
        private_jax.STEP_CELLS.check(is_confirmed=step.options.check, instead=_CHECK)
        from nbdist.worker.jax.step.step import PjrtStep

        return PjrtStep(step, define, namespace, strategy)
    importlib.import_module("keras")  # first: see `opened`
    private_tensorflow.STEPS.check()
    private_keras.STEPS.check()
    from nbdist.worker.tensorflow.step import MirroredStep

    return MirroredStep(step, define, namespace, strategy, request.options.precision)


def check_options_used(worker: Worker) -> None:
    """Warn at the end of a plain cell if its options of a layout, or `--check`, had no effect."""
    request, note = worker.request, worker.reporter.note
    asked, step = request.planning, request.options.step
    if asked != Planning() and not asked.only and not worker.progress.batches:
        text = "the cell trains no Keras model on JAX with `fit`: layout options have no effect"
        note("compiled", text, warning=True)
    if step is not None and step.check and not worker.cell_state.loops:
        text = "--check: the cell has no training loop whose batches nbdist divides"
        note("strategy", text, warning=True)


def replicated_values(worker: Worker, namespace: dict[str, Any]) -> tuple[Replicated, ...]:
    """Digest the values that must be equal on all ranks after a plain cell.

    Under pjrt these are the replicated arrays (`worker/inspection/replicated.py`), under mirrored
    the mirrored variables (`worker/tensorflow/mirrored_variables.py`). The scan also runs with
    `--guard 0`: a later cell then reports only its own changes.

    Args:
        worker: this rank.
        namespace: namespace of the user.
    """
    if worker.world_size == 1 or worker.strategy is None:
        return ()
    names = worker.cell_state.names.bound()
    found = _values_under(worker.strategy).under(names, namespace)
    return found if worker.request.options.guard else ()


@functools.cache
def _values_under(strategy: StrategyName) -> ReplicatedArrays | MirroredVariables:
    if strategy == "pjrt":
        from nbdist.worker.inspection.replicated import ReplicatedArrays

        return ReplicatedArrays()
    from nbdist.worker.tensorflow.mirrored_variables import MirroredVariables

    return MirroredVariables()


def use_loops(worker: Worker) -> None:
    """Run the steps of training loops by the strategies of a rank."""
    rewritten_loops.use("mirrored", functools.partial(_mirrored_loops, worker))
    rewritten_loops.use("pjrt", functools.partial(_jax_loops, worker))


def _mirrored_loops(worker: Worker) -> lifted_loop.MakeStep:
    importlib.import_module("keras")  # first: see `opened`
    private_tensorflow.STEPS.check(instead=_NO_LIFT)
    private_keras.STEPS.check(instead=_NO_LIFT)
    from nbdist.worker.tensorflow.lifted_step import MirroredLoopStep

    strategy = worker.strategies["mirrored"]

    def make(
        request: StepRequest,
        program: LoopProgram,
        namespace: dict[str, Any],
        first: lifted_loop.Arguments,
        like: lifted_loop.LiftedStep | None,
    ) -> MirroredLoopStep:
        step = MirroredLoopStep(request, program, namespace, strategy, first)
        if isinstance(like, MirroredLoopStep):
            step.continue_trials(like)
        return step

    return make


def _jax_loops(worker: Worker) -> lifted_loop.MakeStep:
    private_jax.LOOPS.check(instead=_NO_LIFT)
    from nbdist.worker.jax.step.lifted_step import JaxLoopStep

    mesh = worker.strategies["pjrt"].mesh
    return lambda _request, program, namespace, first, _like: JaxLoopStep(
        program, namespace, mesh, first
    )


def _scope(
    worker: Worker, request: CellRequest, source: Callable[[], str], namespace: dict[str, Any]
) -> contextlib.AbstractContextManager[object]:
    """Return the scope of the cell; a plain cell under JAX has a context mesh if it uses it."""
    name, strategy = request.strategy, worker.strategies.get("pjrt")
    if name != "pjrt" or strategy is None or request.step is not None:
        return worker.scope(name)
    if _context_mesh().is_needed(source(), namespace, strategy.mesh):
        return worker.scope(name)
    scope: contextlib.AbstractContextManager[object] = strategy.keras_scope()
    return scope


@functools.cache
def _context_mesh() -> ContextMesh:
    from nbdist.worker.jax.cell_mesh import ContextMesh

    return ContextMesh()
