"""Plan of a cell that calls `fit` with Keras on JAX. A dry run ends at the first `fit`.

The model is built as `fit` builds it, with its optimizer and metrics, and its own `train_step` is
traced, including an override by the user.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from nbdist.errors import StepError
from nbdist.private_api.keras import JAXTrainer, unpack_x_y_sample_weight
from nbdist.records import Planned
from nbdist.worker.planning.plan_step import (
    batch_inputs,
    mesh_to_trace,
    outline,
    over,
    plan_of,
    target_of,
)
from nbdist.worker.planning.query import PlanQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.graph.model import Role
    from nbdist.records import Plan, Planning
    from nbdist.worker.planning.plan_step import MeshWithTarget
    from nbdist.worker.runtime.context import Worker

_NO_FIT = (
    "nothing to plan: the cell trains no Keras model on JAX with `fit` and contains no step; for a "
    "step, use --data NAME"
)
_fit_upstream = JAXTrainer.fit
_build_upstream = JAXTrainer._symbolic_build


class _FitIsPlanned(BaseException):
    """Signal that ends the cell; the user's `except Exception` does not catch it.

    Args:
        fault: Error of the planner; None if the plan was made.
    """

    def __init__(self, fault: Exception | None) -> None:
        super().__init__()
        self.fault = fault


@contextlib.contextmanager
def instead_of_fit(request: Planning, worker: Worker) -> Iterator[None]:
    """Plan the first `fit` instead of running it, and end the cell.

    Raises:
        PlanError: No layout fits on the devices.
        StepError: The cell called no `fit`.
    """

    def build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        _build_upstream(model, iterator, data_batch)
        fault = None
        try:
            strategy = worker.strategies["pjrt"]
            carried = tuple([v.value for v in group] for group in groups_of(model).values())
            batch = _first(iterator)
            plan = plan_of_fit(model, model.train_step, carried, batch, request, strategy)
        except Exception as error:  # noqa: BLE001 - raised again outside of the cell
            fault = error
        else:
            if worker.rank == 0:
                worker.reporter.send(
                    Planned(plan=plan, only=True, **worker.reporter.record_fields())
                )
        raise _FitIsPlanned(fault)

    def fit(model: Any, *given: Any, **options: Any) -> Any:
        JAXTrainer._symbolic_build = build
        try:
            return _fit_upstream(model, *given, **options)
        finally:
            JAXTrainer._symbolic_build = _build_upstream

    JAXTrainer.fit = fit
    try:
        yield
    except _FitIsPlanned as over:
        if over.fault is not None:
            raise over.fault from None
        return
    finally:
        JAXTrainer.fit = _fit_upstream
    raise StepError(_NO_FIT)


def _first(iterator: Any) -> Any:
    """Return the first batch; `fit` passes one, or an iterator over those of one execution."""
    _, _, found = next(iter(iterator))
    return found[0] if isinstance(found, (list, tuple)) else next(found)


def plan_of_fit(
    model: Any,
    step: Callable[..., Any],
    carried: tuple[list[Any], ...],
    batch: Any,
    request: Planning,
    strategy: MeshWithTarget,
) -> Plan:
    """Plan the sharding of the state that a model's train function carries.

    Args:
        model: Built model.
        step: Function of the state and a batch.
        carried: Values of the variables of `groups_of`.
        batch: Arrays or their shapes.
        request: Requested properties of the plan.
        strategy: Strategy with the devices.

    Raises:
        PlanError: No layout fits on the devices.
    """
    mesh = mesh_to_trace(request, strategy.mesh)
    outlines = jax.tree.map(lambda array: outline(array, mesh), (carried, batch))
    with over(mesh):
        traced = jax.jit(step).trace(*outlines).jaxpr
    names = list(paths(model))
    inputs: list[tuple[str, Role]] = [(path, "carried") for path in names]
    named = dict(zip(("x", "y", "sample_weight"), unpack_x_y_sample_weight(batch), strict=True))
    inputs += batch_inputs(named)
    request = msgspec.structs.replace(request, given=_named(request.given, names))
    return plan_of(PlanQuery(traced, inputs, target_of(request, strategy), request))


def _named(given: Plan | None, names: list[str]) -> Plan | None:
    """Rename the tensors of a given plan to Keras's current names: Keras numbers its models."""
    if given is None or len(given.tensors) < len(names):
        return given
    own = [
        msgspec.structs.replace(tensor, path=name)
        for tensor, name in zip(given.tensors, names, strict=False)
    ]
    return msgspec.structs.replace(given, tensors=(*own, *given.tensors[len(names) :]))


def groups_of(model: Any) -> dict[str, list[Any]]:
    """Return the variables that Keras's train function carries, in its order."""
    return {
        "model": model.trainable_variables,
        "model, not trained": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }


def paths(model: Any) -> Iterator[str]:
    """Yield paths such as `model.dense.kernel`; equal paths are numbered."""
    named = [
        f"{name}.{variable.path.replace('/', '.')}"
        for name, group in groups_of(model).items()
        for variable in group
    ]
    often, seen = Counter(named), Counter[str]()
    for path in named:
        yield f"{path}[{seen[path]}]" if often[path] > 1 else path
        seen[path] += 1
