"""Different functions in stages, each on its own devices, with transfers between them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from nbdist.errors import UsageError
from nbdist.jaxpr.core import concrete_or_error
from nbdist.parallel.pipeline import stage_checks
from nbdist.parallel.pipeline.schedule import forward_only, one_forward_one_backward
from nbdist.parallel.pipeline.stage_devices import stage_places_of
from nbdist.parallel.pipeline.stage_programs import Step, mean, named_errors, zeros
from nbdist.parallel.pipeline.transfers import Leg, Transfers
from nbdist.worker.jax.runtime.processes import NO_MESH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax import Device
    from jax.sharding import Mesh, Sharding

    from nbdist.parallel.pipeline.stage_devices import StagePlace
    from nbdist.parallel.pipeline.stage_programs import Residuals
    from nbdist.records import MimeBundle


def stages(
    *functions: Callable[[Any, Any], Any],
    devices: Sequence[Device | Mesh] | None = None,
    micro: int = 1,
) -> Stages:
    """Return functions as a pipeline in which each has devices of its own.

    The functions may differ, but each must take what the function before it returns. Each is
    compiled separately, for its devices. For many equal layers, and for several processes, use
    `nbdist.pipelined`.

    Args:
        functions: `(params, x) -> y` each. x and y are arrays, or trees of them, of shape
            [rows, ...].
        devices: One device for each function, or one mesh of this process. Rows are sharded over
            the first axis of a mesh if they divide. Default: the devices of this process in
            order, an equal number for each function, in meshes with one axis `data` (spare
            devices are idle). If functions outnumber devices, each device has a block of
            functions.
        micro: Number of microbatches. A stage works on one while the stage before it works on the
            next.

    Returns:
        `Stages`: call it as `stages(params, x)`, with a tuple of parameters, one entry for each
        function.

    Raises:
        UsageError: No function was given, or devices do not fit; each fault is named.

    Examples:
        >>> def hidden(w, x):
        ...     return jnp.tanh(x @ w)
        >>> def head(w, x):
        ...     return x @ w
        >>> model = nbdist.stages(hidden, head, devices=jax.devices()[:2], micro=2)
        >>> params = model.place([jnp.ones((4, 8)), jnp.ones((8, 1))])
        >>> model(params, jnp.ones((6, 4))).shape  # 6 rows
        (6, 1)
        >>> step = model.value_and_grad(lambda y, target: ((y - target) ** 2).mean())
        >>> loss, gradients = step(params, jnp.ones((6, 4)), jnp.zeros((6, 1)))
        >>> [gradient.shape for gradient in gradients]
        [(4, 8), (8, 1)]
    """
    stage_checks.check_options(functions, micro)
    return Stages(functions, stage_places_of(functions, devices), micro)


class Stages:
    """Functions in stages: `stages(params, x)`; params is a tuple with those of each stage.

    Args:
        functions: `(params, x) -> y` each.
        stage_places: devices of each.
        micro: number of microbatches.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[Any, Any], Any]],
        stage_places: tuple[StagePlace, ...],
        micro: int,
    ) -> None:
        self.stage_places = stage_places
        self.micro = micro
        self._steps = [
            Step(stage_place, f) for stage_place, f in zip(stage_places, functions, strict=True)
        ]
        self._moved: Counter[tuple[int | None, int]] = Counter()

    def __repr__(self) -> str:
        return repr(self.transfers)

    def _repr_mimebundle_(self, **_: object) -> MimeBundle:
        return self.transfers._repr_mimebundle_()

    @property
    def transfers(self) -> Transfers:
        """Transfers of the last call; those of gradients only after `value_and_grad`."""
        legs = (Leg(source, target, nbytes) for (source, target), nbytes in self._moved.items())
        return Transfers(self.stage_places, tuple(legs))

    def place(self, params: Sequence[Any]) -> tuple[Any, ...]:
        """Place each stage's parameters on its devices.

        Args:
            params: a tree of arrays for each stage. They are replicated over a mesh, unless a leaf
                has a `NamedSharding` over that mesh.

        Raises:
            UsageError: the number of trees differs, or arrays were donated; all faults are listed.
        """
        stage_checks.check_placed(params, self.stage_places)
        return tuple(
            jax.device_put(own, jax.tree.map(stage_place.of_params, own))
            for own, stage_place in zip(params, self.stage_places, strict=True)
        )

    def __call__(self, params: Sequence[Any], x: Any) -> Any:
        """Return the last stage's result for all rows, on its devices.

        It returns before devices are done. It may run under `jax.grad`, but not inside `jax.jit`.

        Args:
            params: parameters, as `place` returns them.
            x: leaves of shape [rows, ...]; the rows are a multiple of `micro`.

        Raises:
            UsageError: sizes do not divide, arrays are elsewhere, deleted or traced by `jax.jit`,
                or a stage fails; then the error names it, with the cause.
        """
        stage_checks.check_call(params, x, self.stage_places, self.micro)
        self._moved = Counter()
        made: dict[tuple[int, int], Any] = {}
        with _no_mesh(params, x):
            for stage, micro, _ in forward_only(len(self.stage_places), self.micro):
                above = made.pop((stage - 1, micro), None)
                fed = self._fed(stage, above if stage else self._part(x, micro))
                made[stage, micro] = self._steps[stage](params[stage], fed)
            last = len(self.stage_places) - 1
            return _joined([made[last, micro] for micro in range(self.micro)])

    def value_and_grad(
        self, loss: Callable[[Any, Any], Any]
    ) -> Callable[[Sequence[Any], Any, Any], tuple[jax.Array, tuple[Any, ...]]]:
        """Return a function for values and gradients, like `jax.value_and_grad`, under 1F1B.

        Stage i stores the values for the backward pass of at most `len(stages) - i` microbatches;
        see `nbdist.parallel.pipeline.schedule`. Gradients are summed at least in float32 and in a
        fixed order: the same call gives the same bits.

        Args:
            loss: `(result of the last stage, y) -> number`, a mean over the rows of a microbatch.

        Returns:
            `step(params, x, y) -> (value, gradients)`: the mean of the losses of all microbatches,
                and a tuple of each stage's gradients in the types and places of its parameters. If
                stages do not mix rows, this is the result of all rows at once on one device.

        Raises:
            UsageError: the errors of `stages(params, x)`, when the step is called.
        """
        if not callable(loss):
            raise UsageError(
                f"loss is {loss!r}, which is not a function (result of the last stage, y) -> number"
            )
        graded = jax.jit(jax.value_and_grad(loss, allow_int=True))

        def step(params: Sequence[Any], x: Any, y: Any) -> tuple[jax.Array, tuple[Any, ...]]:
            stage_checks.check_call(params, (x, y), self.stage_places, self.micro, gradients=True)
            self._moved = Counter()
            with _no_mesh(params, (x, y)):
                return _Pass(self, params, graded).run(x, y)

        return step

    def _part(self, tree: Any, micro: int) -> Any:
        """Return the rows of a microbatch."""

        def part(leaf: Any) -> Any:
            rows = len(leaf) // self.micro
            return leaf[micro * rows : (micro + 1) * rows]

        return jax.tree.map(part, tree)

    def _fed(self, stage: int, tree: Any) -> Any:
        return self._to(stage, stage - 1 if stage else None, tree)

    def _to(self, target: int, source: int | None, tree: Any) -> Any:
        """Return the tree with its rows on a stage's devices."""
        stage_place = self.stage_places[target]

        def moved(leaf: Any) -> Any:
            if jax.dtypes.result_type(leaf) == jax.dtypes.float0:  # gradient of an integer
                return leaf
            there = stage_place.of_rows(leaf)
            self._moved[source, target] += _arriving(leaf, there)
            return jax.device_put(leaf, there)

        return jax.tree.map(moved, tree)


class _Pass:
    """One call of the function from `value_and_grad`."""

    def __init__(
        self, stages: Stages, params: Sequence[Any], graded: Callable[..., tuple[Any, Any]]
    ) -> None:
        self._stages = stages
        self._params = params
        self._graded = graded
        self._totals = [zeros(own) for own in params]
        self._values: list[jax.Array] = []
        self._made: dict[tuple[int, int], Any] = {}
        self._above: dict[tuple[int, int], Any] = {}
        self._held: dict[tuple[int, int], tuple[Any, Residuals]] = {}

    def run(self, x: Any, y: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        micro, last = self._stages.micro, len(self._stages.stage_places) - 1
        for stage, number, forward in one_forward_one_backward(last + 1, micro):
            if not forward:
                self._back(stage, number)
                continue
            self._forward(stage, number, x)
            if stage == last:
                self._run_loss(number, y)
        gradients = (
            mean(total, own, micro) for total, own in zip(self._totals, self._params, strict=True)
        )
        return sum(self._values[1:], self._values[0]) / micro, tuple(gradients)

    def _forward(self, stage: int, number: int, x: Any) -> None:
        whole = self._made.pop((stage - 1, number)) if stage else self._stages._part(x, number)
        fed = self._stages._fed(stage, whole)
        made, kept = self._stages._steps[stage].forward(self._params[stage], fed)
        self._made[stage, number] = made
        self._held[stage, number] = fed, kept

    def _run_loss(self, number: int, y: Any) -> None:
        last = len(self._stages.stage_places) - 1
        wanted = self._stages._to(last, None, self._stages._part(y, number))
        with named_errors("the loss"):
            value, above = self._graded(self._made.pop((last, number)), wanted)
        self._values.append(value)
        self._above[last, number] = above

    def _back(self, stage: int, number: int) -> None:
        fed, kept = self._held.pop((stage, number))
        step, above = self._stages._steps[stage], self._above.pop((stage, number))
        self._totals[stage], below = step.backward(
            self._totals[stage], self._params[stage], fed, kept, above
        )
        if stage:
            self._above[stage - 1, number] = self._stages._to(stage - 1, stage, below)


def _joined(parts: list[Any]) -> Any:
    """Return the rows of all microbatches, in order."""
    if len(parts) == 1:
        return parts[0]
    if not all(map(np.ndim, jax.tree.leaves(parts[0]))):
        raise UsageError(
            "the last stage returns a number, and with several microbatches it must "
            "return rows: use value_and_grad(loss), whose loss returns the number"
        )
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _arriving(leaf: Any, there: Sharding) -> int:
    """Return the bytes that devices receive, without those that they have."""
    now = concrete_or_error(None, leaf)
    shape = np.shape(now)
    if isinstance(now, jax.Array) and now.sharding.is_equivalent_to(there, len(shape)):
        return 0
    part: int = math.prod(there.shard_shape(shape)) * len(there.device_set)
    return part * int(np.dtype(jax.dtypes.result_type(now)).itemsize)


@contextlib.contextmanager
def _no_mesh(params: Any, x: Any) -> Iterator[None]:
    """Leave the mesh of `jax.set_mesh`, under which JAX refuses arrays on some of its devices.

    Raises:
        UsageError: gradients are traced under a mesh, so that it cannot be left.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, x))):
        raise UsageError(
            "a mesh is set (jax.set_mesh, or a cell's strategy), which stages cannot "
            "leave within jax.grad: use stages.value_and_grad(loss), or call "
            "jax.grad outside of the mesh"
        )
    with jax.set_mesh(NO_MESH):
        yield
