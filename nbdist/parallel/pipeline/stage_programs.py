"""A stage forward, and back: each compiled once, on the devices of what it is given."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.errors import NbdistError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.parallel.pipeline.stage_devices import StagePlace


@partial(jax.tree_util.register_dataclass, data_fields=["made"], meta_fields=["structure", "given"])
@dataclass(frozen=True)
class Kept:
    """What backward needs of a forward pass, beside what that was given.

    A program that returns what it was given makes a copy, and parameters would be there once for
    each microbatch under way.

    Attributes:
        made: arrays that forward has made.
        structure: of the function that `jax.vjp` returned.
        given: of each of its leaves, which of the inputs it is; -1 where it is of `made`.
    """

    made: list[Any]
    structure: jax.tree_util.PyTreeDef
    given: tuple[int, ...]

    @classmethod
    def of(cls, back: Any, inputs: Any) -> Kept:
        leaves, structure = jax.tree.flatten(back)
        place = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(inputs))}
        given = tuple(place.get(id(leaf), -1) for leaf in leaves)
        made = [leaf for leaf, number in zip(leaves, given, strict=True) if number < 0]
        return cls(made, structure, given)

    def back(self, inputs: Any) -> Callable[[Any], Any]:
        """The function that `jax.vjp` returned."""
        own, made = jax.tree.leaves(inputs), iter(self.made)
        leaves = [own[number] if number >= 0 else next(made) for number in self.given]
        function: Callable[[Any], Any] = jax.tree.unflatten(self.structure, leaves)
        return function


class Step:
    """A stage, compiled.

    Args:
        stage_place: where it runs, for errors.
        function: `(params, x) -> y`.
    """

    def __init__(self, stage_place: StagePlace, function: Callable[[Any, Any], Any]) -> None:
        self.stage_place = stage_place
        self._function = function
        self._alone = jax.jit(function)
        self._forward = jax.jit(self._kept)
        self._backward = jax.jit(self._pulled, donate_argnums=0)

    def __call__(self, params: Any, x: Any) -> Any:
        with told(self.stage_place.title):
            return self._alone(params, x)

    def forward(self, params: Any, x: Any) -> tuple[Any, Kept]:
        """What the stage makes of x, and what `backward` needs."""
        with told(self.stage_place.title):
            made: tuple[Any, Kept] = self._forward(params, x)
            return made

    def backward(self, total: Any, params: Any, x: Any, kept: Kept, above: Any) -> tuple[Any, Any]:
        """Gradients added to those there are, which are used up, and that of x.

        Args:
            total: gradients so far, of at least 32 bits.
            params: as they were forward.
            x: as it was forward.
            kept: what forward returned.
            above: the gradient of what the stage made.

        Returns:
            The new total; the gradient of x, or None for the first stage.
        """
        with told(f"backward of {self.stage_place.title}"):
            pulled: tuple[Any, Any] = self._backward(total, params, x, kept, above)
            return pulled

    @property
    def _is_first(self) -> bool:
        return self.stage_place.number == 0

    def _kept(self, params: Any, x: Any) -> tuple[Any, Kept]:
        if self._is_first:  # x may be of whole numbers, such as tokens
            made, back = jax.vjp(lambda own: self._function(own, x), params)
        else:
            made, back = jax.vjp(self._function, params, x)
        return made, Kept.of(back, (params, x))

    def _pulled(self, total: Any, params: Any, x: Any, kept: Kept, above: Any) -> tuple[Any, Any]:
        own, *of_x = kept.back((params, x))(above)
        added = jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), total, own)
        return added, of_x[0] if of_x else None


def zeros(params: Any) -> Any:
    """Where gradients are added up: of params' shapes and places, and of 32 bits or more."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, _wide(leaf.dtype), device=leaf.sharding), params
    )


def mean(total: Any, params: Any, micro: int) -> Any:
    """The total over microbatches, as params: their types, and their places."""
    return jax.tree.map(
        lambda sum_, leaf: jax.device_put(_over(sum_, micro, leaf.dtype), leaf.sharding),
        total,
        params,
    )


@partial(jax.jit, static_argnums=(1, 2))
def _over(total: jax.Array, micro: int, dtype: Any) -> jax.Array:
    return (total / micro).astype(dtype)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


@contextlib.contextmanager
def told(title: str) -> Iterator[None]:
    """What fails in here is told with the stage's name.

    Raises:
        UsageError: whatever was raised; that is its cause.
    """
    try:
        yield
    except NbdistError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(f"{title} cannot be run: {said}") from error
