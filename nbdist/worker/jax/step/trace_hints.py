"""Hints for code of a step that needs values, which do not exist while the step is traced."""

from __future__ import annotations

import builtins
import contextlib
import re
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from nbdist.errors import StepError
from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHOW = (
    "To see a value, assign a scalar such as `loss`, which nbdist reports, or call "
    'jax.debug.print("{}", x)'
)
_PRINTED = (
    "print or text of an array in a step: the step is traced once, when arrays have no values yet. "
    f"{_SHOW}"
)
_HINTS: dict[type[Exception], str] = {
    jax.errors.TracerBoolConversionError: (
        "In a step, Python's if, while, and, or cannot use the value of an array: "
        "use jnp.where(condition, a, b), jax.lax.cond or jax.lax.while_loop"
    ),
    jax.errors.TracerIntegerConversionError: (
        "In a step, an array cannot be an index of a list, nor a size: use an index of a jnp "
        "array, jax.lax.dynamic_slice, or a Python number from outside of the step"
    ),
    jax.errors.TracerArrayConversionError: (
        "In a step, np.asarray(x) and other functions of NumPy cannot read an array of JAX: use "
        f"those of jax.numpy, or jax.pure_callback. {_SHOW}"
    ),
    jax.errors.ConcretizationTypeError: (
        "In a step, float(x), int(x) and x.item() cannot read an array: use the array itself, or "
        f"x.astype(float) to convert it. {_SHOW}"
    ),
}
"""Errors of JAX, special ones first, with the hint to add to the message."""

_TRACER_TEXT = re.compile(r"\b\w*Tracer\W")


@contextlib.contextmanager
def hints() -> Iterator[None]:
    """Add a hint to errors of a trace, and refuse `print` of a traced array.

    Raises:
        StepError: The step prints an array, or formats it as text.
    """
    with replaced(builtins, "print", _print):
        try:
            yield
        except tuple(_HINTS) as error:
            _raise_with_hint(error)
        except TypeError as error:
            if "Tracer.__format__" in str(error):
                raise StepError(_PRINTED) from error
            raise


def _raise_with_hint(error: Exception) -> NoReturn:
    hint = next(text for kind, text in _HINTS.items() if isinstance(error, kind))
    error.args = (f"{error}\n{hint}",)
    raise error


_print_upstream = builtins.print


def _print(*values: Any, **options: Any) -> None:
    has_tracer = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))
    texts = (value for value in values if isinstance(value, str))
    if has_tracer or any(map(_TRACER_TEXT.search, texts)):
        raise StepError(_PRINTED)
    _print_upstream(*values, **options)
