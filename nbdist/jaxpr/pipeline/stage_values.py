"""Operations on rows that one stage has, such as the gradients that leave the layers.

All stages compute them at the same time, and the results of the other stages are discarded. So no
rows are sent to other stages, only sums over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nbdist.jaxpr.core import DropVar
from nbdist.jaxpr.flatten import variables
from nbdist.jaxpr.pipeline.schedule import StageRows, of_stage
from nbdist.records import STAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax.extend.core import Jaxpr, Var

    from nbdist.jaxpr.pipeline.schedule import Schedule


class StageValue(NamedTuple):
    """A value with the rows of the whole batch that one stage has.

    Attributes:
        array: [stages, ...]; the values of other stages are meaningless.
        stage: number of the stage.
    """

    array: Any
    stage: int


def reads_stage(eqn: Any, values: Mapping[Var, Any]) -> bool:
    """Return True if an equation reads rows of one stage."""
    return any(_is_of_stage(values.get(var)) for var in variables(eqn.invars))


def run_on_stages(
    jaxpr: Jaxpr,
    eqn: Any,
    values: dict[Var, Any],
    read: Callable[[Any], Any],
    schedule: Schedule,
) -> None:
    """Run an equation that reads rows of one stage.

    Args:
        jaxpr: the program.
        eqn: one of its equations.
        values: values by variable; the results are added.
        read: returns a value in its original form.
        schedule: schedule of the pipeline.
    """
    given = list(dict.fromkeys(variables(eqn.invars)))
    held = [values.get(var) for var in given]
    stage = next(filter(_is_of_stage, held)).stage
    arrays: list[Any] = []
    axes: list[int | None] = []
    for var, one in zip(given, held, strict=True):
        if _is_of_stage(one) and one.stage == stage:
            arrays.append(_on_stages(one, var, schedule))
            axes.append(0)
        else:
            arrays.append(read(var))
            axes.append(None)
    outvars = [var for var in eqn.outvars if not isinstance(var, DropVar)]
    body = jaxpr.replace(constvars=[], invars=given, eqns=[eqn], outvars=outvars)
    run = jax.vmap(jaxpr_as_fun(ClosedJaxpr(body, [])), axes, spmd_axis_name=STAGE)
    for var, array in zip(outvars, run(*arrays), strict=True):
        has_rows = var in schedule.rows.dims
        values[var] = StageValue(array, stage) if has_rows else of_stage(array, stage)


def _is_of_stage(value: Any) -> TypeGuard[StageRows | StageValue]:
    return isinstance(value, StageRows | StageValue)


def _on_stages(value: StageRows | StageValue, var: Var, schedule: Schedule) -> Any:
    """Return a value of one stage as [stages, ...], with the rows of the whole batch."""
    if isinstance(value, StageValue):
        return value.array
    array = jnp.broadcast_to(value.array, (schedule.micro, schedule.stages, *value.array.shape[2:]))
    joined = jax.vmap(lambda own: schedule.joined(own, var), in_axes=1, spmd_axis_name=STAGE)
    return schedule.sharded(joined(array), parts=False)
