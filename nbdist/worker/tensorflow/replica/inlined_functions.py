"""Functions of the user that are compiled with `tf.function`, traced as parts of a step.

TensorFlow allows no synchronization of replicas inside of an inner function.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.tensorflow import Function, ag_ctx, api
from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function as `tf.function` does. `tf.autograph.to_graph` loses its line numbers."""
    status = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    result: Callable[..., Any] = api.tf_convert(function, status)
    return result


@contextlib.contextmanager
def inlined_functions(*, in_replicas: bool = True) -> Iterator[None]:
    """Trace compiled functions as parts of the step.

    Enter this context outside of replicas, which have threads of their own.

    Args:
        in_replicas: False to do so outside of replicas too. The functions keep no trace of it.
    """

    def call(function: Function, *args: Any, **kwargs: Any) -> Any:
        if in_replicas and tf.distribute.in_cross_replica_context():
            return upstream(function, *args, **kwargs)
        return converted(function.python_function)(*args, **kwargs)

    upstream = Function.__call__
    with replaced(Function, "__call__", call):
        yield
