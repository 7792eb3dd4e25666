"""Step under JAX as a pure function of its state, its inputs, and a batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nbdist.worker.jax.step.leaked_tracers import check_leaks, live_tracers
from nbdist.worker.jax.step.names import check_same, take
from nbdist.worker.jax.step.trace_hints import hints
from nbdist.worker.planning.plan_step import batch_inputs, outline, over
from nbdist.worker.runtime import signals
from nbdist.worker.training import step_contract
from nbdist.worker.training.warmup import rates_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jax.sharding import AbstractMesh, Mesh

    from nbdist.planner.graph.model import Role
    from nbdist.records import StepRequest
    from nbdist.worker.jax.step.carried import Carried


class StepFunction:
    """Pure function of a step, with the names that it carries and reads.

    Args:
        request: Request of the step.
        define: Makes a function from source code, in the user's namespace, under the cell's name.
        namespace: Namespace of the user.

    Attributes:
        names: Names that the step uses; a trace may add to the carried ones.
        rates: Learning rates by name; the function scales them.
        call: The function. Takes the arrays of `arguments`, a factor of the rates, and a batch.
        effects: Effects of the last trace.

    Raises:
        StepError: The value of a name can neither be carried nor be read.
    """

    def __init__(
        self,
        request: StepRequest,
        define: Callable[[str], Callable[..., Any]],
        namespace: dict[str, Any],
    ) -> None:
        self._request = request
        self._define = define
        self._namespace = namespace
        self.rates = rates_by_name(request, namespace)
        self._lines = {**request.program.reads, **request.program.carried_lines}
        check_same({name: namespace[name] for name in sorted(self._lines)}, self._lines)
        self.names = take(request, namespace, set(self.rates))
        self._body = self._defined()
        self.call: Callable[..., Any] = self._pure  # one object: JAX caches traces by identity
        self.effects: Collection[object] = ()

    @property
    def carried(self) -> list[Carried]:
        return self.names.carried

    def arguments(self) -> tuple[list[list[jax.Array]], list[list[Any]]]:
        """Return the arrays that the step carries, and those that it reads."""
        return [group.arrays for group in self.carried], self.names.read.arrays

    def named_arrays(self) -> dict[str, jax.Array]:
        """Return the carried arrays by name and path."""
        return self.named_state([group.arrays for group in self.carried])

    def named_state(self, state: list[list[Any]]) -> dict[str, Any]:
        """Return the arrays of a state by name and path."""
        return {
            path: array
            for group, arrays in zip(self.carried, state, strict=True)
            for path, array in group.named(arrays).items()
        }

    def inputs(self, batch: Any) -> list[tuple[str, Role]]:
        """Return the path and the role of each input, for a batch with such arrays."""
        inputs: list[tuple[str, Role]] = [(name, "carried") for name in self.named_arrays()]
        inputs += [(path, "read") for paths in self.names.read.paths for path in paths]
        inputs.append(("the factor of learning rates", "read"))
        given = dict(zip(self._request.program.given, batch, strict=True))
        return [*inputs, *batch_inputs(given)]

    def rate_values(self, factor: float, read: dict[str, float]) -> dict[str, float]:
        """Return the learning rates of a step by the name of their signal.

        Args:
            factor: factor of the rates that `--scale-lr` scales.
            read: learning rates that the step reads, by name.
        """
        rates = {n: value * (factor if n in self.rates else 1) for n, value in read.items()}
        if len(rates) == 1:
            return dict.fromkeys([signals.RATE], *rates.values())
        return {f"{signals.RATE} of {name}": value for name, value in rates.items()}

    def settle(self) -> None:
        """Fix the list of carried objects; it must be the same on all ranks."""
        self.names.objects.settle()
        check_same(self.names.objects.originals(), self._lines)

    def trace(self, mesh: Mesh | AbstractMesh, batch: Any) -> Any:
        """Trace the step until the carried arrays and slots are known.

        Args:
            mesh: Mesh to trace for.
            batch: Shapes and dtypes of the batch.

        Returns:
            Closed jaxpr of the step.
        """
        tracers = live_tracers()
        while True:
            shapes = jax.tree.map(lambda array: outline(array, mesh), self.arguments())
            with over(mesh), hints():
                traced = jax.jit(self.call).trace(*shapes, 1.0, batch)
            if self.names.settle(self._namespace):
                self._body = self._defined()
                self.call = functools.partial(self._pure)
                continue
            unsettled = [group for group in self.carried if group.settle()]
            if not unsettled:
                check_leaks(tracers, self._lines, self._namespace)
                self.effects = traced.jaxpr.effects
                return traced.jaxpr

    def _defined(self) -> Callable[..., Any]:
        given = (*self.names.parameters, *self.rates, *self._request.program.given)
        return self._define(step_contract.function_source(self._request, given))

    def _pure(
        self, state: list[list[Any]], read: list[list[Any]], factor: Any, batch: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        program, names = self._request.program, self.names
        before: dict[str, Any] = {}
        for group, arrays in zip(names.carried, state, strict=True):
            before |= group.values(arrays)
        values = names.read.values(read)
        given = dict(zip(program.given, batch, strict=True))
        given |= {name: rate * factor for name, rate in self.rates.items()}
        with names.objects.tracing(before) as trace:
            given |= {name: self._namespace[name] for name in names.own}
            given |= {name: before[name] for group in names.groups for name in group.names}
            shared = names.states.shared(before | values)
            report, assigned = self._body(**values, **given)
            names.states.check(shared)
            after = before | dict(zip(program.carried, assigned, strict=True))
            self._namespace.update({name: after[name] for name in names.own})
            after |= names.objects.after(trace, names.read.changed(read, values))
            if names.objects.rebound:
                return {}, state
            state_after = [
                group.collect(arrays, before, after)
                for group, arrays in zip(names.carried, state, strict=True)
            ]
            report = step_contract.scalars(self._request, report, jnp.asarray)
            if all(group.is_settled for group in names.carried):
                trace.finish()
        return report, state_after
