"""Checks of the functions, parameters and arguments of stages."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from nbdist.errors import UsageError
from nbdist.parallel.pipeline.stage_checks import check_call, check_options, check_placed
from nbdist.parallel.pipeline.stage_devices import StagePlace, stage_places_of
from nbdist.parallel.placement.leaves import GONE


def embed(own: Any, x: Any) -> Any:
    return own["w"] + x


def head(own: Any, x: Any) -> Any:
    return own["w"] * x


@pytest.fixture(scope="module")
def places() -> tuple[StagePlace, ...]:
    return stage_places_of((embed, head), jax.devices()[:2])


def on(number: int, value: Any = 1.0) -> dict[str, jax.Array]:
    array = np.full(3, value, np.float32 if isinstance(value, float) else np.int32)
    return {"w": jax.device_put(array, jax.devices()[number])}


def faults(check: Any, *args: Any, **options: Any) -> list[str]:
    with pytest.raises(UsageError) as raised:
        check(*args, **options)
    return str(raised.value).split("; ")


X = np.ones((4, 3), np.float32)


def test_options_that_fit_are_accepted() -> None:
    check_options((embed, head), 4)


def test_faults_of_options_are_listed() -> None:
    assert faults(check_options, (), 1) == [
        "there are no stages: give functions (params, x) -> y, nbdist.stages(f, g)"
    ]
    assert faults(check_options, (embed, 3, "x"), 0) == [
        "stage 1 is 3, which is not a function (params, x) -> y",
        "stage 2 is 'x', which is not a function (params, x) -> y",
        "micro=0: use a whole number from 1",
    ]


def test_each_stage_has_parameters(places: tuple[StagePlace, ...]) -> None:
    for params in ((on(0), on(1)), [on(0), on(1)]):
        check_placed(params, places)
    assert faults(check_placed, (on(0),), places) == [
        "params has 1 entries for 2 stages (embed, head): give one each"
    ]
    assert faults(check_placed, {"a": on(0), "b": on(1)}, places) == [
        "params has type dict: give a tuple with the parameters of each stage"
    ]


def test_deleted_parameters_are_named(places: tuple[StagePlace, ...]) -> None:
    gone = on(0)
    gone["w"].delete()
    first, second = faults(check_placed, (gone,), places)
    assert first.startswith("params has 1 entries")
    assert second == f"params[0]['w'] [3] {GONE}"


def test_call_that_fits_is_accepted(places: tuple[StagePlace, ...]) -> None:
    check_call((on(0), on(1)), X, places, 2)
    check_call((on(0), on(1)), X, places, 2, gradients=True)


def test_parameters_are_on_the_devices_of_their_stage(places: tuple[StagePlace, ...]) -> None:
    assert faults(check_call, (on(1), on(1)), X, places, 2) == [
        (
            "params[0]['w'] is not on cpu:0, where stage 0 (embed, on cpu:0) runs: call "
            "params = stages.place(params) once, before the steps"
        )
    ]
    many = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}
    assert faults(check_call, (on(0), many), X, places, 2)[0].startswith(
        "params[1]['a'] and 2 more is not on cpu:1, where stage 1 (head, on cpu:1) runs"
    )


def test_every_fault_of_a_call_is_listed(places: tuple[StagePlace, ...]) -> None:
    gone = jax.device_put(X)
    gone.delete()
    found = faults(check_call, (on(1), on(1, 2)), gone, places, 3, gradients=True)
    assert [text[:12] for text in found] == [
        "x [4, 3] was",
        "params[0]['w",
        "params[1]['w",
        "4 rows do no",
    ]
    assert found[2] == (
        "params[1]['w'] is int32, and gradients need floating-point numbers: let the function "
        "close over it"
    )


def test_gradients_need_floating_point_numbers(places: tuple[StagePlace, ...]) -> None:
    check_call((on(0), on(1, 2)), X, places, 2)
    assert len(faults(check_call, (on(0, 2), on(1, 2)), X, places, 2, gradients=True)) == 2


def test_stages_do_not_run_in_programs(places: tuple[StagePlace, ...]) -> None:
    params = on(0), on(1)

    def inside(x: Any) -> Any:
        with pytest.raises(UsageError, match=r"^stages cannot run inside jax.jit or jax.vmap"):
            check_call(params, x, places, 3)
        return x

    jax.make_jaxpr(inside)(X)


def test_stages_run_in_gradients(places: tuple[StagePlace, ...]) -> None:
    def loss(params: Any) -> Any:
        check_call(params, X, places, 2, gradients=True)
        return params[0]["w"]

    params = on(0), on(1)
    jax.jvp(loss, (params,), (params,))
