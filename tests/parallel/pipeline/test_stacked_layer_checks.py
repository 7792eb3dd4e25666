"""Checks of layers, rows and options of a pipeline over a mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import nbdist
from nbdist.errors import UsageError
from nbdist.parallel.pipeline.stacked_layer_checks import (
    check_blocks,
    check_layer,
    check_layers,
    check_options,
    check_rows,
    wrong_counts,
)


def message(check: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as raised:
        check(*args, **options)
    return str(raised.value)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return nbdist.meshes({"stage": 4, "data": 2})


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2", None])
def test_counts_are_whole_numbers_from_1(count: Any) -> None:
    assert list(wrong_counts(micro=count)) == [f"micro={count!r}: use a whole number from 1"]


def test_each_wrong_count_is_named() -> None:
    assert list(wrong_counts(micro=1, rounds=0, other=-2)) == [
        "rounds=0: use a whole number from 1",
        "other=-2: use a whole number from 1",
    ]


def test_options_that_fit_are_accepted(mesh: jax.sharding.Mesh) -> None:
    for micro, rounds in ((1, 1), (4, 2), (5, 2)):
        check_options(mesh, "stage", micro=micro, rounds=rounds)


def test_faults_of_options_are_listed(mesh: jax.sharding.Mesh) -> None:
    assert message(check_options, mesh, "stages", micro=0, rounds=2) == (
        "axis='stages' is not in the mesh, whose axes are stage (4), data (2); "
        "micro=0: use a whole number from 1"
    )
    assert message(check_options, mesh, "stage", micro=3, rounds=2) == (
        "micro=3 is less than the 4 stages, so with rounds=2 the first stage would wait for the "
        "last: use micro=4 or more, or rounds=1"
    )
    explicit = jax.make_mesh((8,), ("stage",), axis_types=(AxisType.Explicit,))
    assert message(check_options, explicit, "stage", micro=8, rounds=1) == (
        "the mesh's axes are Explicit: make them Auto, as nbdist.meshes does"
    )


def test_layers_divide_into_blocks() -> None:
    check_layers({"w": np.ones((8, 3)), "b": np.ones(8)}, 4, 2)
    fault = "8 layers do not divide into 4 stages x 4 rounds: stack 16"
    assert message(check_layers, np.ones((8, 3)), 4, 4) == fault


def test_leaves_have_equally_many_layers() -> None:
    head = "dimension 0 of every leaf of params must be its layers, equal in all: "
    uneven = {"w": np.ones((8, 3)), "b": np.ones(4)}
    found = message(check_layers, uneven, 4, 1)
    assert found == f"{head}params['b'] has 4, params['w'] has 8"
    assert message(check_layers, {}, 4, 1) == f"{head}there are no leaves"
    assert message(check_layers, np.float32(1), 4, 1) == f"{head}params has None"


def test_blocks_are_rounds_by_stages_by_layers() -> None:
    check_blocks({"w": np.ones((2, 4, 3, 5)), "b": np.ones((2, 4, 3))}, 4, 2)
    wrong = {"a": np.ones((4, 2, 3)), "b": np.ones((2, 4)), "c": np.ones((2, 4, 3))}
    assert message(check_blocks, wrong, 4, 2) == (
        "with rounds=2 params have shapes [2 rounds, 4 stages, layers, ...], but these differ: "
        "params['a'] [4, 2, 3], params['b'] [2, 4]: call params = apply.place(params) once, "
        "before the steps"
    )
    uneven = {"a": np.ones((2, 4, 3)), "b": np.ones((2, 4, 1))}
    assert message(check_blocks, uneven, 4, 2).startswith("dimension 2 of every leaf of params")


def test_rows_divide_into_microbatches() -> None:
    check_rows({"x": np.ones((12, 3)), "mask": np.ones(12)}, 4)
    assert message(check_rows, np.ones((12, 3)), 5) == (
        "12 rows do not divide into micro=5: use a micro of 1, 2, 3, 4, 6, 12, or 10 or 15 rows"
    )
    assert message(check_rows, (np.ones(12), np.ones(6)), 2).endswith("x[0] has 12, x[1] has 6")


def test_layer_keeps_shapes_and_types() -> None:
    params, x = {"w": np.ones((2, 4, 3, 5, 5), np.float32)}, np.ones((12, 5), np.float32)
    seen = []

    def layer(own: Any, rows: Any) -> Any:
        seen.append((own["w"].shape, rows.shape))
        return rows @ own["w"]

    check_layer(layer, params, x, lead=3, micro=4)
    assert seen == [((5, 5), (3, 5))]


@pytest.mark.parametrize(
    ("layer", "made"),
    [
        (lambda _, x: x[:, :2], "float32[3,2]"),
        (lambda _, x: x.astype(jnp.bfloat16), "bfloat16[3, 5]"),
        (lambda _, x: (x, x), "('float32[3, 5]', 'float32[3, 5]')"),
    ],
)
def test_other_output_is_refused(layer: Any, made: str) -> None:
    found = message(
        check_layer, layer, np.ones((2, 5)), np.ones((12, 5), np.float32), lead=1, micro=4
    )
    shown = made.replace("3,2", "3, 2")
    pattern = f"^the layer returns {re.escape(shown)} for {re.escape('float32[3, 5]')}: in a pipel"
    assert re.search(pattern, found), found
