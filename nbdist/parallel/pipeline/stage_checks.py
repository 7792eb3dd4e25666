"""Checks that stages, their parameters and rows fit; errors name the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.errors import ConcretizationTypeError

from nbdist.errors import UsageError
from nbdist.jaxpr.core import concrete_or_error
from nbdist.parallel.pipeline.stacked_layer_checks import check_rows, wrong_counts
from nbdist.parallel.placement.leaves import GONE
from nbdist.utils.listing import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.parallel.pipeline.stage_devices import StagePlace


def check_options(functions: Sequence[Callable[..., Any]], micro: int) -> None:
    """Check the options of stages.

    Raises:
        UsageError: options do not fit; all faults are listed.
    """
    wrong = [*_wrong_functions(functions), *wrong_counts(micro=micro)]
    if wrong:
        raise UsageError("; ".join(wrong))


def check_placed(params: Sequence[Any], stage_places: Sequence[StagePlace]) -> None:
    """Check that there are parameters for each stage.

    Raises:
        UsageError: some are missing or were donated; all faults are listed.
    """
    wrong = [*_wrong_length(params, stage_places), *_faults(params, "params")]
    if wrong:
        raise UsageError("; ".join(wrong))


def check_call(
    params: Sequence[Any],
    x: Any,
    stage_places: Sequence[StagePlace],
    micro: int,
    *,
    gradients: bool = False,
) -> None:
    """Check the arguments of a call.

    Args:
        params: parameters of each stage.
        x: leaves with rows first.
        stage_places: places of the stages.
        micro: number of microbatches.
        gradients: True if gradients of all parameters are needed.

    Raises:
        UsageError: arguments do not fit; all faults are listed.
    """
    if _is_abstract((params, x)):
        raise UsageError(
            "stages cannot run inside jax.jit or jax.vmap: each is compiled for its own "
            "devices. Call them outside; jax.grad of the call works"
        )
    check_placed(params, stage_places)
    wrong = [*_faults(x, "x"), *_elsewhere(params, stage_places)]
    if gradients:
        wrong += _whole_numbers(params)
    try:
        check_rows(x, micro)
    except UsageError as error:
        wrong.append(str(error))
    if wrong:
        raise UsageError("; ".join(wrong))


def _wrong_functions(functions: Sequence[Any]) -> Iterator[str]:
    if not functions:
        yield "there are no stages: give functions (params, x) -> y, nbdist.stages(f, g)"
    for number, function in enumerate(functions):
        if not callable(function):
            yield f"stage {number} is {function!r}, which is not a function (params, x) -> y"


def _wrong_length(params: Sequence[Any], stage_places: Sequence[StagePlace]) -> Iterator[str]:
    if not isinstance(params, (tuple, list)):
        yield (
            f"params has type {type(params).__name__}: give a tuple with the parameters of each "
            "stage"
        )
    elif len(params) != len(stage_places):
        names = ", ".join(stage_place.function for stage_place in stage_places)
        yield (
            f"params has {len(params)} entries for {len(stage_places)} stages ({names}): "
            "give one each"
        )


def _faults(tree: Any, root: str) -> Iterator[str]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if array and leaf.is_deleted():
            yield f"{root}{jax.tree_util.keystr(path)} {list(leaf.shape)} {GONE}"
        elif array and not leaf.is_fully_addressable:
            yield (
                f"{root}{jax.tree_util.keystr(path)} {list(leaf.shape)} is on several "
                "processes, and stages use devices of one process: give a NumPy array, "
                "or use nbdist.pipelined over a mesh of all"
            )


def _is_abstract(tree: Any) -> bool:
    try:
        for leaf in jax.tree.leaves(tree):
            concrete_or_error(None, leaf)
    except ConcretizationTypeError:
        return True
    return False


def _elsewhere(params: Sequence[Any], stage_places: Sequence[StagePlace]) -> Iterator[str]:
    for stage_place, own in zip(stage_places, params, strict=True):
        wrong = [
            jax.tree_util.keystr((jax.tree_util.SequenceKey(stage_place.number), *path))
            for path, leaf in jax.tree_util.tree_leaves_with_path(own)
            if not _is_on(concrete_or_error(None, leaf), stage_place)
        ]
        if wrong:
            yield (
                f"params{listed(wrong, 1)} is not on {stage_place.where}, where "
                f"{stage_place.title} runs: call params = stages.place(params) once, before the "
                "steps"
            )


def _is_on(leaf: Any, stage_place: StagePlace) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    there: bool = leaf.is_deleted() or leaf.sharding.device_set == stage_place.devices
    return there


def _whole_numbers(params: Sequence[Any]) -> Iterator[str]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            yield (
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}, and "
                "gradients need floating-point numbers: let the function close over it"
            )
