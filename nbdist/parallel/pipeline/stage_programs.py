"""Compiled programs of a stage, forward and backward, on the devices of their inputs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.errors import NbdistError, UsageError
from nbdist.jaxpr.microbatches import accumulator_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.parallel.pipeline.stage_devices import StagePlace


@partial(jax.tree_util.register_dataclass, data_fields=["made"], meta_fields=["structure", "given"])
@dataclass(frozen=True)
class Residuals:
    """Values of a forward pass that the backward pass needs, beside the inputs.

    A program that returns an input copies it, and parameters would be stored once for each
    microbatch in flight.

    Attributes:
        made: arrays that the forward pass has made.
        structure: structure of the function from `jax.vjp`.
        given: for each of its leaves, the number of the input that it is; -1 if it is in `made`.
    """

    made: list[Any]
    structure: jax.tree_util.PyTreeDef
    given: tuple[int, ...]

    @classmethod
    def of(cls, back: Any, inputs: Any) -> Residuals:
        leaves, structure = jax.tree.flatten(back)
        place = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(inputs))}
        given = tuple(place.get(id(leaf), -1) for leaf in leaves)
        made = [leaf for leaf, number in zip(leaves, given, strict=True) if number < 0]
        return cls(made, structure, given)

    def back(self, inputs: Any) -> Callable[[Any], Any]:
        """Return the function from `jax.vjp`."""
        own, made = jax.tree.leaves(inputs), iter(self.made)
        leaves = [own[number] if number >= 0 else next(made) for number in self.given]
        function: Callable[[Any], Any] = jax.tree.unflatten(self.structure, leaves)
        return function


class Step:
    """A compiled stage.

    Args:
        stage_place: its devices, for errors.
        function: `(params, x) -> y`.
    """

    def __init__(self, stage_place: StagePlace, function: Callable[[Any, Any], Any]) -> None:
        self.stage_place = stage_place
        self._function = function
        self._alone = jax.jit(function)
        self._forward = jax.jit(self._residuals)
        self._backward = jax.jit(self._vjp, donate_argnums=0)

    def __call__(self, params: Any, x: Any) -> Any:
        with named_errors(self.stage_place.title):
            return self._alone(params, x)

    def forward(self, params: Any, x: Any) -> tuple[Any, Residuals]:
        """Return the stage's result for x, and the values that `backward` needs."""
        with named_errors(self.stage_place.title):
            made: tuple[Any, Residuals] = self._forward(params, x)
            return made

    def backward(
        self, total: Any, params: Any, x: Any, kept: Residuals, above: Any
    ) -> tuple[Any, Any]:
        """Add gradients of the parameters to the sums, which are donated, and return that of x.

        Args:
            total: sums of gradients so far, at least float32.
            params: parameters of the forward pass.
            x: input of the forward pass.
            kept: values from `forward`.
            above: gradient of the stage's result.

        Returns:
            The new sums, and the gradient of x; None for the first stage.
        """
        with named_errors(f"backward of {self.stage_place.title}"):
            pulled: tuple[Any, Any] = self._backward(total, params, x, kept, above)
            return pulled

    @property
    def _is_first(self) -> bool:
        return self.stage_place.number == 0

    def _residuals(self, params: Any, x: Any) -> tuple[Any, Residuals]:
        if self._is_first:  # x may hold integers, such as tokens
            made, back = jax.vjp(lambda own: self._function(own, x), params)
        else:
            made, back = jax.vjp(self._function, params, x)
        return made, Residuals.of(back, (params, x))

    def _vjp(self, total: Any, params: Any, x: Any, kept: Residuals, above: Any) -> tuple[Any, Any]:
        own, *of_x = kept.back((params, x))(above)
        added = jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), total, own)
        return added, of_x[0] if of_x else None


def zeros(params: Any) -> Any:
    """Return zeros for sums of gradients, at least float32, in the params' shapes and places."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype), device=leaf.sharding),
        params,
    )


def mean(total: Any, params: Any, micro: int) -> Any:
    """Return the mean over microbatches in the params' types and places."""
    return jax.tree.map(
        lambda sum_, leaf: jax.device_put(_over(sum_, micro, leaf.dtype), leaf.sharding),
        total,
        params,
    )


@partial(jax.jit, static_argnums=(1, 2))
def _over(total: jax.Array, micro: int, dtype: Any) -> jax.Array:
    return (total / micro).astype(dtype)


@contextlib.contextmanager
def named_errors(title: str) -> Iterator[None]:
    """Name the stage in errors.

    Raises:
        UsageError: an error inside, which is its cause.
    """
    try:
        yield
    except NbdistError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{title} failed: {reason}") from error
