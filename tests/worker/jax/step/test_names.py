"""Names of a step, sorted by the way their values enter it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import StepOptions, StepProgram, StepRequest
from nbdist.worker.data.batches import Batch
from nbdist.worker.jax.step.names import StepNames, check_numbers, take


class Model:
    """Object with attributes of its own."""

    def __init__(self) -> None:
        self.weights = jnp.ones(2)


def names_of(
    namespace: dict[str, Any], reads: str = "", carried: str = "", body: str = "    pass\n"
) -> StepNames:
    """Sort the names of a step; `reads` and `carried` list names by their first letters."""
    program = StepProgram(
        body=body,
        given=("batch",),
        reads=dict.fromkeys(reads.split(), 2),
        carried=tuple(carried.split()),
        carried_lines=dict.fromkeys(carried.split(), 3),
        report="loss",
    )
    request = StepRequest(program, StepOptions(data="train"))
    return take(request, {"train": np.ones((4, 2)), **namespace}, set())


def test_assigned_trees_are_carried_and_read_trees_are_arguments() -> None:
    w, b, scale = {"a": jnp.ones(2)}, jnp.ones(3), jnp.ones(4)
    names = names_of({"w": w, "b": b, "scale": scale}, reads="scale", carried="w b")
    assert [*names.groups[0].names] == ["w", "b"]
    assert [*names.read.names] == ["scale"]
    assert names.own == ()
    assert names.parameters == ["w", "b", "scale"]
    assert names.changes == ("w", "b")
    assert names.carried == [*names.groups, names.objects.carried]


def test_assigned_object_is_used_without_a_copy() -> None:
    names = names_of({"model": Model(), "w": jnp.ones(2)}, carried="model w")
    assert [*names.groups[0].names] == ["w"]
    assert names.own == ("model",)
    assert names.parameters == ["w", "model"]


def test_functions_and_modules_stay_globals() -> None:
    names = names_of({"jnp": jnp, "f": lambda x: x, "w": jnp.ones(2)}, "jnp f", "w")
    assert [*names.read.names] == []
    assert names.parameters == ["w"]


def test_container_that_an_inner_function_changes_is_no_argument() -> None:
    body = "    def f():\n        log.append(1)\n    f()\n    return 0, ()\n"
    namespace = {"log": [jnp.ones(2)], "seen": [jnp.ones(2)]}
    names = names_of(namespace, reads="log seen", body=body)
    assert [*names.read.names] == ["seen"]


def test_array_with_another_name_must_not_be_donated() -> None:
    w, own = jnp.ones(2), jnp.ones(3)
    names = names_of({"w": w, "own": own, "backup": w}, carried="w own")
    assert id(w) in names.held
    assert id(own) not in names.held


@pytest.mark.parametrize("column", [np.array(["a", "b"]), np.array([None, 1]), np.array([b"a"])])
def test_batch_of_texts_is_refused(column: np.ndarray) -> None:
    values = (np.ones(2), {"text": column})
    batch = Batch(values, 2, whole=False, everything=lambda: values)
    with pytest.raises(StepError, match="the batch contains an array of "):
        check_numbers(batch)


def test_batch_of_numbers_is_accepted() -> None:
    values = (np.ones(2), np.ones(2, bool), np.ones(2, "int8"))
    check_numbers(Batch(values, 2, whole=False, everything=lambda: values))
