"""What the rules of JAX's primitives are given, and what several of them do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.planner.graph.dims import Dims
    from nbdist.planner.graph.model import Kind, Value

    Rule = Callable[["Builder", Any, list[Value]], list[Value]]


class Builder(Protocol):
    """What rules are given."""

    dims: Dims

    def new(self, aval: Any) -> Value:
        """A value of that type, with dimensions that nothing ties."""
        ...

    def emit(
        self,
        kind: Kind,
        ins: Sequence[Value],
        outs: Sequence[Value],
        summed: Sequence[int] = (),
        flops: float = 0.0,
        contract: int = 1,
    ) -> None:
        """Note an operation."""
        ...

    def inline(self, jaxpr: Any, args: list[Value]) -> list[Value]:
        """What a nested program leaves."""
        ...

    def note(self, text: str) -> None:
        """Note what could not be looked into."""
        ...

    def part(self, why: str) -> None:
        """Note why the batch and the model cannot both be cut."""
        ...


def outs_of(build: Builder, eqn: Any) -> list[Value]:
    """Values of the types that an equation leaves."""
    return [build.new(var.aval) for var in eqn.outvars]
