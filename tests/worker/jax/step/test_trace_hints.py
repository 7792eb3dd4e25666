"""Errors of a traced step contain what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.worker.jax.step.trace_hints import hints

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        (lambda x: float(x.sum()), r"float\(x\).*x.astype\(float\).*jax.debug.print"),
        (lambda x: x.sum().item(), r"x.item\(\) cannot read an array"),
        (np.asarray, r"np.asarray\(x\).*jax.numpy"),
        (lambda x: np.dot(np.ones(3), x), r"functions of NumPy.*jax.numpy"),
        (lambda x: [1.0, 2.0][x[0].astype(int)], "jax.lax.dynamic_slice"),
        (lambda x: 1.0 if x.sum() > 0 else 0.0, r"jnp.where\(condition, a, b\)"),
        (lambda x: print(x, x), "print or text of an array.*jax.debug.print"),
        (lambda x: print({"loss": x}), "print or text of an array"),
        (lambda x: print(f"{x}"), "print or text of an array"),
        (lambda x: f"{x.sum():.3f}", "print or text of an array"),
    ],
)
def test_message_contains_a_hint(step: Callable[[Any], Any], hint: str) -> None:
    with pytest.raises((jax.errors.JAXTypeError, StepError), match=f"(?s){hint}"), hints():
        jax.jit(step).trace(jnp.ones(3))


def test_other_prints_and_errors_stay(capsys: pytest.CaptureFixture[str]) -> None:
    with hints():
        jax.jit(lambda x: print("rows", x.shape, len(x))).trace(jnp.ones(3))
    assert capsys.readouterr().out == "rows (3,) 3\n"
    with pytest.raises(TypeError, match=r"^add got incompatible shapes"), hints():
        jax.jit(lambda x: x + jnp.ones(4)).trace(jnp.ones(3))
    print("after")  # the original function is back
    assert capsys.readouterr().out == "after\n"
