"""Stages compute the values of one device, limit the stored microbatches and report transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nbdist.errors import UsageError
from nbdist.parallel.pipeline.schedule import (
    Task,
    forward_only,
    one_forward_one_backward,
)
from nbdist.parallel.pipeline.stages import stages
from nbdist.parallel.pipeline.transfers import Leg
from nbdist.parallel.placement.meshes import meshes
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import nbdist

WORDS, ROWS, WIDTH, CLASSES = 11, 16, 8, 5


def embed(own: Any, words: Any) -> jax.Array:
    return own["table"][words]


def mix(own: Any, x: Any) -> jax.Array:
    return x + jnp.tanh(x @ own["w"] + own["b"])


def head(own: Any, x: Any) -> jax.Array:
    return x @ own["out"]


FUNCTIONS = (embed, mix, head)


def loss(made: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((made - y) ** 2)


def drawn(seed: int = 0) -> tuple[Any, np.ndarray, np.ndarray]:
    r = np.random.default_rng(seed)
    shapes = (
        {"table": (WORDS, WIDTH)},
        {"w": (WIDTH, WIDTH), "b": (WIDTH,)},
        {"out": (WIDTH, CLASSES)},
    )
    params = tuple(
        {name: r.normal(size=shape).astype(np.float32) for name, shape in own.items()}
        for own in shapes
    )
    y = r.normal(size=(ROWS, CLASSES)).astype(np.float32)
    return params, r.integers(0, WORDS, ROWS), y


def plain(params: Any, x: Any) -> jax.Array:
    for function, own in zip(FUNCTIONS, params, strict=True):
        x = function(own, x)
    return x


@jax.jit
def reference(params: Any, x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda own: loss(plain(own, x), y))(params)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max()),
        found,
        expected,
    )


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def one_device_each() -> list[Any]:
    return [jax.devices()[number] for number in (3, 1, 5)]


def devices_and_a_mesh() -> list[Any]:
    pair = Mesh(np.array(jax.devices()[2:4]), ("rows",))
    return [jax.devices()[0], pair, jax.devices()[0]]


@pytest.mark.parametrize(
    ("places", "micro"),
    [
        (lambda: None, 1),
        (one_device_each, 4),
        (devices_and_a_mesh, 4),
        pytest.param(one_device_each, 16, marks=pytest.mark.full),
        pytest.param(devices_and_a_mesh, 1, marks=pytest.mark.full),
        pytest.param(lambda: None, 4, marks=pytest.mark.full),
        pytest.param(lambda: None, 16, marks=pytest.mark.full),
        pytest.param(one_device_each, 1, marks=pytest.mark.full),
        pytest.param(devices_and_a_mesh, 16, marks=pytest.mark.full),
    ],
)
def test_gradients_equal_those_of_one_device(places: Any, micro: int) -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, devices=places(), micro=micro)
    own = piped.place(params)
    expected = reference(params, x, y)
    assert_close(piped.value_and_grad(loss)(own, x, y), expected)
    assert_close(jax.value_and_grad(lambda own: loss(piped(own, x), y))(own), expected)
    assert_close(piped(own, x), plain(params, x))


@pytest.mark.parametrize("places", [one_device_each, devices_and_a_mesh])
def test_training_equals_that_on_one_device(places: Any) -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, devices=places(), micro=4)
    own, step = piped.place(params), piped.value_and_grad(loss)
    found, expected = [], []
    for _ in range(4):
        value, gradients = step(own, x, y)
        found.append(float(value))
        own = jax.tree.map(lambda a, g: a - 0.1 * g, own, gradients)
        value, gradients = reference(params, x, y)
        expected.append(float(value))
        params = jax.tree.map(lambda a, g: a - 0.1 * g, params, gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert expected[0] > expected[-1]


def test_results_are_on_the_devices_of_their_stage() -> None:
    params, x, y = drawn()
    places = devices_and_a_mesh()
    piped = stages(*FUNCTIONS, devices=places, micro=2)
    sharding = NamedSharding(places[1], PartitionSpec(None, "rows"))
    params[1]["w"] = jax.device_put(params[1]["w"], sharding)
    own = piped.place(params)
    assert own[1]["w"].sharding == sharding
    assert own[1]["b"].sharding == NamedSharding(places[1], PartitionSpec())
    assert piped(own, x).devices() == {places[2]}
    _, gradients = piped.value_and_grad(loss)(own, x, y)
    jax.tree.map(check_same_sharding, gradients, own)


def check_same_sharding(found: jax.Array, expected: jax.Array) -> None:
    assert found.sharding.is_equivalent_to(expected.sharding, expected.ndim)
    assert found.dtype == expected.dtype


def test_the_same_call_gives_the_same_bits() -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, micro=8)
    own, step = piped.place(params), piped.value_and_grad(loss)
    first, second = step(own, x, y), step(own, x, y)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_small_types_are_accumulated_in_32_bits() -> None:
    """bfloat16 cannot represent a sum of 257 ones."""
    piped = stages(lambda own, x: own * x, devices=jax.devices()[:1], micro=1024)
    own = piped.place([np.ones((), jnp.bfloat16)])
    x = np.ones((1024, 1), jnp.bfloat16)
    _, (gradient,) = piped.value_and_grad(lambda made, y: jnp.sum(made))(own, x, x)
    assert gradient == 1
    assert gradient.dtype == jnp.bfloat16


def test_each_stage_is_compiled_once() -> None:
    params, x, y = drawn()
    traced = []

    def counted(own: Any, x: Any) -> jax.Array:
        traced.append(x.shape)
        return mix(own, x)

    piped = stages(embed, counted, head, micro=4)
    own, step = piped.place(params), piped.value_and_grad(loss)
    for _ in range(3):
        _, gradients = step(own, x, y)
        own = jax.tree.map(lambda a, g: a - g, own, gradients)
    assert traced == [(4, WIDTH)]


@given(st.integers(1, 6), st.integers(1, 12))
def test_schedules_run_each_task_once_and_in_order(count: int, micro: int) -> None:
    tasks = one_forward_one_backward(count, micro)
    place = {task: number for number, task in enumerate(tasks)}
    assert len(tasks) == len(place) == 2 * count * micro
    for stage, number, forward in tasks:
        before = Task(stage - 1, number, forward=True) if forward else Task(stage, number, True)
        behind = Task(stage + 1, number, forward=False)
        assert place.get(before, -1) < place[stage, number, forward]
        assert forward or place.get(behind, -1) < place[stage, number, forward]
    held, maximum = [0] * count, [0] * count
    for stage, _, forward in tasks:
        held[stage] += 1 if forward else -1
        maximum[stage] = max(maximum[stage], held[stage])
    assert maximum == [min(micro, count - stage) for stage in range(count)]
    ahead = forward_only(count, micro)
    assert sorted(ahead) == sorted(task for task in tasks if task.forward)
    assert all(
        ahead.index(task) > ahead.index(task._replace(stage=task.stage - 1))
        for task in ahead
        if task.stage
    )


class Watched(np.ndarray):
    """Rows that count the live arrays of each width whenever a microbatch is taken."""

    seen: list[dict[int, int]]

    def __getitem__(self, key: Any) -> Any:
        alive = [array.shape for array in jax.live_arrays() if not array.is_deleted()]
        self.seen.append({width: alive.count((2, width)) for width in (101, 102, 103)})
        return np.asarray(self)[key]


def test_stages_store_few_microbatches_and_no_copies_of_parameters() -> None:
    def widened(own: Any, x: Any) -> jax.Array:
        return jnp.tanh(x @ own["in"]) @ own["out"]

    r = np.random.default_rng(0)
    params = [
        {
            "in": r.normal(size=(3, width)).astype(np.float32),
            "out": r.normal(size=(width, 3)).astype(np.float32),
        }
        for width in (101, 102, 103)
    ]
    micro = 10
    piped = stages(*[widened] * 3, devices=jax.devices()[:3], micro=micro)
    own, step = piped.place(params), piped.value_and_grad(loss)
    x = np.ones((2 * micro, 3), np.float32)
    alone = x.view(Watched)
    alone.seen = []
    step(own, x, x)
    step(own, alone, alone)
    maximum = {width: max(seen[width] for seen in alone.seen) for width in (101, 102, 103)}
    # Number of such arrays per microbatch that the backward pass needs.
    each = maximum[103]
    assert (
        len(alone.seen) == 2 * micro
    )  # at the start of the first stage and at the end of the last one
    assert each > 0
    assert maximum[101] <= 3 * each
    assert maximum[102] <= 2 * each
    copies = [a for a in jax.live_arrays() if a.shape == (3, 101)]
    assert len(copies) <= 2  # the parameters, and gradients that are not collected yet


def test_transfers_are_reported() -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, devices=one_device_each(), micro=4)
    assert "3 stages, not called yet" in repr(piped)
    own = piped.place(params)
    piped(own, jnp.asarray(x))
    between = ROWS * WIDTH * 4
    assert piped.transfers.legs == (Leg(None, 0, ROWS * 4), Leg(0, 1, between), Leg(1, 2, between))
    piped.value_and_grad(loss)(own, x, y)
    assert set(piped.transfers.legs) == {
        Leg(None, 0, ROWS * 4),
        Leg(0, 1, between),
        Leg(1, 2, between),
        Leg(None, 2, ROWS * CLASSES * 4),
        Leg(2, 1, between),
        Leg(1, 0, between),
    }
    text = repr(piped).splitlines()
    assert text[0] == "nbdist: 3 stages, 2.4 KiB moved by the last call"
    assert text[4].split() == ["1", "mix", "cpu:1", "512", "B", "512", "B"]
    assert "<table" in piped._repr_mimebundle_()["text/html"]
    same = stages(*FUNCTIONS, devices=[jax.devices()[0]] * 3)
    own = same.place(params)
    same.value_and_grad(loss)(own, jnp.asarray(x), jnp.asarray(y))
    assert same.transfers.nbytes == 0


def test_devices_are_assigned_to_stages_in_order() -> None:
    devices = jax.devices()

    def stage_places(count: int) -> list[list[Any]]:
        return [
            list(stage_place.mesh.devices) for stage_place in stages(*[mix] * count).stage_places
        ]

    assert stage_places(1) == [devices]
    assert stage_places(3) == [devices[:2], devices[2:4], devices[4:6]]
    assert stage_places(8) == [[device] for device in devices]
    numbers = [stage_place[0].id for stage_place in stage_places(20)]
    assert numbers == sorted(numbers)
    assert {numbers.count(number) for number in range(8)} == {2, 3}


def test_trees_with_integers_pass_from_stage_to_stage() -> None:
    def opened(own: Any, x: Any) -> Any:
        return {"h": own * x["h"], "mask": x["mask"]}

    def closed(own: Any, x: Any) -> Any:
        return own * x["h"] * x["mask"][:, None]

    piped = stages(opened, opened, closed, devices=jax.devices()[:3], micro=2)
    own = piped.place([np.float32(2), np.float32(3), np.float32(4)])
    x = {"h": np.ones((4, 2), np.float32), "mask": np.array([0, 1, 1, 1])}
    value, gradients = piped.value_and_grad(lambda made, y: jnp.mean(made - y))(
        own, x, np.zeros((4, 2), np.float32)
    )
    assert float(value) == 18
    assert [float(gradient) for gradient in gradients] == [9, 6, 4.5]


def test_stages_work_with_a_current_mesh() -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, devices=one_device_each(), micro=2)
    own = piped.place(params)
    with jax.set_mesh(meshes({"data": -1})):
        assert_close(piped(own, x), plain(params, x))
        assert_close(piped.value_and_grad(loss)(own, x, y), reference(params, x, y))
        with pytest.raises(UsageError, match="a mesh is set"):
            jax.grad(lambda own: loss(piped(own, x), y))(own)


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ((), {"micro": 0}, "there are no stages.*; micro=0: use a whole number from 1"),
        ((mix, 3), {}, "stage 1 is 3, which is not a function"),
        (
            (mix, mix),
            {"devices": ["cpu:0"]},
            r"devices has 1 entries for 2 stages.*; devices\[0\]='cpu:0' has type str: give a jax",
        ),
    ],
)
def test_invalid_options_are_refused(functions: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stages(*functions, **options)


def test_invalid_arguments_of_a_call_are_refused() -> None:
    params, x, y = drawn()
    piped = stages(*FUNCTIONS, devices=one_device_each(), micro=3)
    own = piped.place(params)
    with pytest.raises(
        UsageError, match=r"16 rows .* micro=3: use a micro of 1, 2, 4, 8, 16, or 15"
    ):
        piped(own, x)
    with pytest.raises(UsageError, match=r"params has 2 entries for 3 stages \(embed, mix, head\)"):
        piped(own[:2], x)
    with pytest.raises(UsageError, match="params has type dict: give a tuple"):
        piped.place({"w": 1})
    with pytest.raises(
        UsageError, match=r"params\[1\]\['b'\] and 1 more is not on cpu:1.*; 16 rows"
    ):
        piped((own[0], params[1], own[2]), x)
    with pytest.raises(UsageError, match=r"Call them outside; jax.grad of the call works"):
        jax.jit(piped)(own, x)
    whole = (own[0], own[1] | {"step": jax.device_put(3, jax.devices()[1])}, own[2])
    with pytest.raises(UsageError, match=r"params\[1\]\['step'\] is int32, and gradients need"):
        piped.value_and_grad(loss)(whole, x, y)
    own[1]["w"].delete()
    with pytest.raises(UsageError, match=r"params\[1\]\['w'\] \[8, 8\] was donated"):
        piped(own, x)
    with pytest.raises(UsageError, match=r"params\[1\]\['w'\] \[8, 8\] was donated"):
        piped.place(own)


def test_a_stage_that_cannot_be_traced_is_reported() -> None:
    params, x, y = drawn()
    piped = stages(embed, head, mix, devices=one_device_each(), micro=2)
    own = piped.place((params[0], params[2], params[1]))
    message = r"stage 2 \(mix, on cpu:5\) failed: TypeError: "
    with pytest.raises(UsageError, match=message) as raised:
        piped(own, x)
    assert isinstance(raised.value.__cause__, TypeError)
    with pytest.raises(UsageError, match=message):
        piped.value_and_grad(loss)(own, x, y)
    right = stages(*FUNCTIONS, devices=one_device_each(), micro=2)
    with pytest.raises(UsageError, match="the loss failed: TypeError"):
        right.value_and_grad(lambda made, y: made)(right.place(params), x, y)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=4, framework="jax", devices_per_host=2) as running:
        yield running


CELL = """
import jax, jax.numpy as jnp, numpy as np
from nbdist.errors import UsageError
from nbdist.parallel.pipeline.stages import stages
def product(own, x):
    return x @ own
here = stages(product, product, micro=2)
own = here.place([np.full((2, 2), 1 + rank, np.float32)] * 2)
value, gradients = here.value_and_grad(lambda made, y: jnp.mean(made - y))(
    own, np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
)
try:
    stages(product, product, devices=jax.devices()[:2])
    message = ""
except UsageError as error:
    message = str(error)
float(value), message
"""


def test_each_process_has_its_own_stages(cluster: nbdist.Cluster) -> None:
    results = cluster.run(CELL, strategy="pjrt").results
    assert set(results) == {0, 1, 2, 3}
    for rank, result in results.items():
        assert result.startswith(f"({4.0 * (1 + rank) ** 2}")
        assert ("another process" in result) == (rank != 0)


def test_invalid_loss_devices_and_stages_are_refused() -> None:
    both = stages(one, one, devices=jax.devices()[:2], micro=2)
    params = both.place((jnp.eye(4), jnp.eye(4)))
    with pytest.raises(UsageError, match="loss is 3, which is not a function"):
        both.value_and_grad(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="devices is one Mesh: give a list"):
        stages(one, one, devices=meshes({"data": -1}))  # type: ignore[arg-type]
    ends = stages(one, lambda p, x: (x @ p).sum(), devices=jax.devices()[:2], micro=2)
    with pytest.raises(UsageError, match="the last stage returns a number"):
        ends(params, jnp.ones((4, 4)))


def one(params: jax.Array, x: jax.Array) -> jax.Array:
    return x @ params
