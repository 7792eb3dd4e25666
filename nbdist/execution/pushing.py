"""Binding of pushed objects on ranks, also again after a recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.worker.remote import transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Apply = Callable[[Callable[..., Any], Any, Sequence[int]], list[Any]]


def bind(apply: Apply, payload: bytes, ranks: Sequence[int], world_size: int) -> None:
    """Bind pickled objects on ranks.

    Objects of Keras are created in the scope of the strategy if all ranks receive them.

    Args:
        apply: calls a function with an argument on ranks.
        payload: the objects by name, pickled.
        ranks: the ranks to copy to.
        world_size: the number of ranks.
    """
    in_scope = apply(transfer.put, payload, ranks)
    if len(ranks) == world_size and all(in_scope):
        apply(transfer.put_in_scope, payload, ranks)
