"""Candidate places for a call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from nbdist.parallel.autoplace.candidates import Offer, constraints_of, offer

BIG = 1 << 50


def offered(*arguments: Any, out_bytes: int = 0) -> Offer:
    leaves, numbers = [], []
    for number, argument in enumerate(arguments):
        own = jax.tree.leaves(argument)
        leaves += own
        numbers += [number] * len(own)
    return offer(constraints_of(leaves), leaves, numbers, out_bytes)


def names(made: Offer) -> list[str]:
    return [candidate.name for candidate in made.candidates]


def specs(made: Offer, name: str) -> list[Any]:
    (candidate,) = [one for one in made.candidates if one.name == name]
    return [where and getattr(where, "spec", where) for where in candidate.shardings]


def reasons(made: Offer) -> dict[str, str]:
    return {left.name: left.why for left in made.left_out}


PARAMETERS = {"b": jnp.ones(16), "w": jnp.ones((32, 16))}
ROWS = np.ones((64, 32), "f")


def test_layouts_shard_rows_and_parameters() -> None:
    made = offered(PARAMETERS, ROWS)
    assert names(made) == ["default", "batch", "model", "full"]
    everywhere = jax.P()
    assert specs(made, "default") == [None, None, None]
    assert specs(made, "batch") == [everywhere, everywhere, jax.P("data")]
    assert specs(made, "model") == [jax.P("data"), jax.P(None, "data"), everywhere]
    assert specs(made, "full") == [jax.P("data"), jax.P("data"), jax.P("data")]
    assert reasons(made) == {"one device": "the same as default"}


def test_all_arrays_with_equal_rows_are_the_batch() -> None:
    made = offered(jnp.ones((256, 3)), jnp.ones((5, 5)), jnp.ones(256))
    assert specs(made, "batch") == [jax.P("data"), jax.P(), jax.P("data")]


def test_rows_of_last_argument_and_largest_array_are_candidates() -> None:
    made = offered(jnp.ones((512, 64)), jnp.ones((8, 512)))
    assert {"batch", "batch 512"} <= set(names(made))
    assert specs(made, "batch") == [jax.P(), jax.P("data")]
    assert specs(made, "batch 512") == [jax.P("data"), jax.P()]


def test_indivisible_dimensions_are_reported() -> None:
    made = offered(jnp.ones((7, 3)))
    assert names(made) == ["default"]
    assert reasons(made)["batch"] == "no dimension that it would cut divides by 8"


def test_numbers_are_left_to_jit() -> None:
    made = offered(1.0, np.float32(2), jnp.ones((8, 2)))
    assert specs(made, "batch") == [None, None, jax.P("data")]
    assert names(offered(1.0, True)) == ["default"]


def test_inputs_on_another_device_may_move_to_the_first() -> None:
    third = jax.devices()[3]
    made = offered(jax.device_put(jnp.ones((8, 8)), third))
    # A device that already has the inputs is preferred to equal ones.
    assert reasons(made)["one device"] == "the same as default"
    both = offered(jax.device_put([jnp.ones(4), jnp.ones(4)], [third, jax.devices()[5]]))
    assert "one device" in names(both)


def test_sharded_inputs_use_their_own_mesh() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((64, 32)), jax.NamedSharding(mesh, jax.P("data")))
    made = offered(jnp.ones((32, 16)), x)
    assert "one device" in names(made)
    # The rows are already sharded this way.
    assert specs(made, "batch") == [jax.P(), None]
    assert specs(made, "model") == [jax.P(None, "model"), jax.P()]


def test_only_layouts_over_the_current_mesh_are_candidates() -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        made = offered(PARAMETERS, ROWS)
        assert "one device" not in {*names(made), *reasons(made)}
        assert specs(made, "batch")[2] == jax.P("rows")


def test_candidates_that_do_not_fit_are_left_out() -> None:
    """All CPU devices share the memory of the host."""
    made = offered(PARAMETERS, ROWS, out_bytes=BIG)
    assert names(made) == ["default"]
    assert psutil.virtual_memory().available < BIG
    assert f"needs {8 * (BIG + 64 * 32 * 4 // 8 + 33 * 16 * 4):,} bytes" in reasons(made)["batch"]
