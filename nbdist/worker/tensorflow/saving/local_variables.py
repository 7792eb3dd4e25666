"""Variables that each worker creates locally under MultiWorkerMirroredStrategy.

TensorFlow 2.21 broadcasts the initial value of every variable from the chief. Saving creates some
variables: Keras 3.15 constructs an optimizer to list its attributes, and `tf.train.Checkpoint` has
a counter. A save on one rank would wait for the others in that broadcast. The values are the same
on all ranks, so every rank skips the broadcast.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nbdist.private_api.tensorflow import CollectiveAllReduceExtended

if TYPE_CHECKING:
    from collections.abc import Iterator

_upstream = CollectiveAllReduceExtended._get_variable_creator_initial_value


@contextlib.contextmanager
def local_variables() -> Iterator[None]:
    """Create variables without a broadcast of their initial values."""

    def initial_value(
        self: Any, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        if replica_id == 0:
            return kwargs["initial_value"]
        return _upstream(self, replica_id, device, primary_var, **kwargs)

    before = CollectiveAllReduceExtended._get_variable_creator_initial_value
    CollectiveAllReduceExtended._get_variable_creator_initial_value = initial_value
    try:
        yield
    finally:
        CollectiveAllReduceExtended._get_variable_creator_initial_value = before
