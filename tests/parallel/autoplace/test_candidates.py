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


def names(offered_places: Offer) -> list[str]:
    return [candidate.name for candidate in offered_places.candidates]


def specs(offered_places: Offer, name: str) -> list[Any]:
    (candidate,) = [one for one in offered_places.candidates if one.name == name]
    return [where and getattr(where, "spec", where) for where in candidate.shardings]


def reasons(offered_places: Offer) -> dict[str, str]:
    return {left.name: left.why for left in offered_places.left_out}


PARAMETERS = {"b": jnp.ones(16), "w": jnp.ones((32, 16))}
ROWS = np.ones((64, 32), "f")


def test_layouts_shard_rows_and_parameters() -> None:
    offered_places = offered(PARAMETERS, ROWS)
    assert names(offered_places) == ["default", "batch", "model", "full"]
    everywhere = jax.P()
    assert specs(offered_places, "default") == [None, None, None]
    assert specs(offered_places, "batch") == [everywhere, everywhere, jax.P("data")]
    assert specs(offered_places, "model") == [jax.P("data"), jax.P(None, "data"), everywhere]
    assert specs(offered_places, "full") == [jax.P("data"), jax.P("data"), jax.P("data")]
    assert reasons(offered_places) == {"one device": "the same as default"}


def test_all_arrays_with_equal_rows_are_the_batch() -> None:
    offered_places = offered(jnp.ones((256, 3)), jnp.ones((5, 5)), jnp.ones(256))
    assert specs(offered_places, "batch") == [jax.P("data"), jax.P(), jax.P("data")]


def test_rows_of_last_argument_and_largest_array_are_candidates() -> None:
    offered_places = offered(jnp.ones((512, 64)), jnp.ones((8, 512)))
    assert {"batch", "batch 512"} <= set(names(offered_places))
    assert specs(offered_places, "batch") == [jax.P(), jax.P("data")]
    assert specs(offered_places, "batch 512") == [jax.P("data"), jax.P()]


def test_indivisible_dimensions_are_reported() -> None:
    offered_places = offered(jnp.ones((7, 3)))
    assert names(offered_places) == ["default"]
    assert reasons(offered_places)["batch"] == "no dimension that it would shard divides by 8"


def test_numbers_are_left_to_jit() -> None:
    offered_places = offered(1.0, np.float32(2), jnp.ones((8, 2)))
    assert specs(offered_places, "batch") == [None, None, jax.P("data")]
    assert names(offered(1.0, True)) == ["default"]


def test_inputs_on_another_device_may_move_to_the_first() -> None:
    third = jax.devices()[3]
    offered_places = offered(jax.device_put(jnp.ones((8, 8)), third))
    # A device that already has the inputs is preferred to equal ones.
    assert reasons(offered_places)["one device"] == "the same as default"
    both = offered(jax.device_put([jnp.ones(4), jnp.ones(4)], [third, jax.devices()[5]]))
    assert "one device" in names(both)


def test_sharded_inputs_use_their_own_mesh() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((64, 32)), jax.NamedSharding(mesh, jax.P("data")))
    offered_places = offered(jnp.ones((32, 16)), x)
    assert "one device" in names(offered_places)
    # The rows are already sharded this way.
    assert specs(offered_places, "batch") == [jax.P(), None]
    assert specs(offered_places, "model") == [jax.P(None, "model"), jax.P()]


def test_only_layouts_over_the_current_mesh_are_candidates() -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        offered_places = offered(PARAMETERS, ROWS)
        assert "one device" not in {*names(offered_places), *reasons(offered_places)}
        assert specs(offered_places, "batch")[2] == jax.P("rows")


def test_candidates_that_do_not_fit_are_left_out() -> None:
    """All CPU devices share the memory of the host."""
    offered_places = offered(PARAMETERS, ROWS, out_bytes=BIG)
    assert names(offered_places) == ["default"]
    assert psutil.virtual_memory().available < BIG
    assert (
        f"needs {8 * (BIG + 64 * 32 * 4 // 8 + 33 * 16 * 4):,} bytes"
        in reasons(offered_places)["batch"]
    )
