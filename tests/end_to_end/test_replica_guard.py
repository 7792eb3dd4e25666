"""The guard names the rank and the variable that differ from the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.records import StepOptions
from tests import clusters, training
from tests import jax_programs as programs

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "mirrored": {"hosts": RANKS},
    "pjrt": {"hosts": RANKS, "framework": "jax"},
}
"""Cluster options by strategy: Keras uses TensorFlow if both frameworks are installed."""

EVERY = 3
SPOILED_AT = 5
"""Step before which rank 1 changes its state; the guard reports it at `FOUND_AT`."""

FOUND_AT = 6

FLIP = """
def flipped(value):
    value = np.array(value)
    value.view("int32")[-1, -1] ^= 1
    return value
"""
"""Flip the lowest bit of one element."""

SPOIL_MIRRORED = f"""{FLIP}
def spoil():
    component = model.layers[0].kernel.value.values[0]
    component.assign(flipped(component.numpy()))
"""
SPOIL_JAX = f"""{FLIP}
import jax
def spoil():
    model.jax_state_sync()
    kernel = model.layers[0].kernel
    own = jax.device_put(flipped(kernel.value.addressable_data(0)), jax.local_devices()[0])
    kernel._value = jax.make_array_from_single_device_arrays(
        own.shape, kernel.value.sharding, [own])
"""
BATCHES = f"""
def train():
    for epoch in range(2):
        for i in range(4):
            if rank == 1 and 4 * epoch + i + 1 == {SPOILED_AT}:
                spoil()
            yield x[:12], y[:12]
"""
CALLBACK = f"""
class Spoils(keras.callbacks.Callback):
    made = 0
    def on_train_batch_begin(self, batch, logs=None):
        self.made += 1
        if rank == 1 and self.made == {SPOILED_AT}:
            spoil()
"""


DIFFERING_ARRAY = """
own = jax.make_array_from_single_device_arrays(
    (), jax.NamedSharding(mesh, jax.P()),
    [jax.device_put(np.float32(1e-7 * rank), jax.local_devices()[0])])
"""


@dataclass(frozen=True)
class Spoiled:
    """Training in which rank 1 changes its state.

    Attributes:
        form: The training.
        setup: Cell text to append to its set-up.
        named: Pattern of the variable's name in the error.
        cell: The training cell, or an empty string for the cell of the form.
    """

    form: training.Form
    setup: str
    named: str
    cell: str = ""

    def run(self, cluster: nbdist.Cluster, guard: int) -> None:
        cluster.run(self.form.setup + self.setup, strategy=self.form.strategy, guard=0)
        step = StepOptions(data="train", epochs=2, steps=8)
        cluster.run(
            self.cell or self.form.cell,
            strategy=self.form.strategy,
            step=step if self.form.is_step else None,
            guard=guard,
        )


def _fit(name: str, spoil: str) -> Spoiled:
    form = training.FORMS[name]
    cell = form.cell.replace("callbacks=[At()]", "callbacks=[At(), Spoils()]")
    return Spoiled(
        form, spoil + CALLBACK, r"model( of the fit)?: sequential\S*/dense\S*/kernel", cell
    )


_PJRT = training.FORMS["pjrt step"]
SPOILED = {
    "mirrored step": Spoiled(
        training.FORMS["mirrored step"],
        SPOIL_MIRRORED + BATCHES,
        r"model( of the fit)?: sequential\S*/dense\S*/kernel",
    ),
    # A replicated array holds a different number on each device.
    "pjrt step": Spoiled(
        _PJRT,
        BATCHES.replace("spoil()", "pass") + DIFFERING_ARRAY,
        r"params\['w'\]",
        _PJRT.cell.replace(
            "count = count + 1",
            'params["w"] = params["w"] + jnp.where('
            f"count >= {SPOILED_AT - 1}, own, 0.0)\ncount = count + 1",
        ),
    ),
    "mirrored fit": _fit("mirrored fit", SPOIL_MIRRORED),
    "keras on jax": _fit("keras on jax", SPOIL_JAX),
}


def _with_moments(name: str) -> tuple[str, str]:
    """Return the set-up and the cell of a training with added moving means."""
    form = training.FORMS[name]
    dropout = "keras.layers.Dropout(0.25)"
    assert dropout in form.setup
    setup = form.setup.replace(dropout, f"keras.layers.BatchNormalization(), {dropout}")
    logits = "model(inputs, training=True)"
    return setup, form.cell.replace(logits, f"tf.cast({logits}, 'float32')")


RANK_LOCAL: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "moments, float16 step": (*_with_moments("mirrored step"), True, {"precision": "float16"}),
    "moments, float16 fit": (*_with_moments("mirrored fit"), False, {}),
    "moments, keras on jax": (*_with_moments("keras on jax"), False, {}),
    "nnx": (programs.DATA + programs.NNX.setup, programs.NNX.step, True, {}),
}
"""Trainings with rank-local state: set-up, cell, a flag for step cells, options."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "moments, float16 step", marks=pytest.mark.full
        ),  # the fit has more rank-local state
        pytest.param("moments, float16 fit", marks=pytest.mark.full),
        pytest.param(
            "moments, keras on jax", marks=pytest.mark.full
        ),  # one program for all ranks, like NNX
        pytest.param("nnx", marks=pytest.mark.full),  # the pjrt step covers its state
    ],
)
@pytest.mark.parametrize(
    "epochs", [2, pytest.param(60, marks=pytest.mark.full, id="long enough to drift")]
)
def test_rank_local_state_raises_no_error(name: str, epochs: int) -> None:
    setup, cell, is_step, options = RANK_LOCAL[name]
    strategy = "pjrt" if name in ("nnx", "moments, keras on jax") else "mirrored"
    with clusters.cluster(**OPTIONS[strategy]) as cluster:
        setup_precision = "float16" if name == "moments, float16 fit" else None
        cluster.run(setup, strategy=strategy, precision=setup_precision)
        step = StepOptions(data="train", batch=training.BATCH, epochs=epochs, scale_lr="16" in name)
        run = cluster.run(
            cell.replace(f"epochs={training.EPOCHS}", f"epochs={epochs}"),
            strategy=strategy,
            step=step if is_step else None,
            guard=1,
            **options,
        )
    assert run.summary.epochs == epochs


AVERAGES = {
    "variable": "average = tf.Variable(0.0, trainable=False)",
    "Keras variable": "import keras\naverage = keras.Variable(0.0, trainable=False)",
    "module": """
class Average(tf.Module):
    def __init__(self):
        self.value = tf.Variable(0.0, trainable=False, name="value")
    def assign(self, value):
        self.value.assign(value)
average = Average()
""",
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_of_own_rows_is_named(kind: str) -> None:
    """Each replica would keep another average. Values that replicas have in common pass."""
    with clusters.cluster(**OPTIONS["mirrored"]) as cluster:
        cluster.run(f"import numpy as np, tensorflow as tf\n{AVERAGES[kind]}")
        cluster.run("data = np.arange(24.0, dtype='float32')[:, None]")
        step = StepOptions(data="data", batch=8)
        cell = "loss = tf.reduce_mean(batch)\naverage.assign({})"
        cluster.run(cell.format("3.0"), step=step)
        with pytest.raises(nbdist.CellError, match=r"different `average.* after step 1") as raised:
            cluster.run(cell.format("loss"), step=step)
        assert "a value assigned from the rank's own samples" in str(raised.value)


def trainings(*quick: str) -> pytest.MarkDecorator:
    """Parametrize over all trainings, and mark those not in `quick` as full."""
    params = [pytest.param(n, marks=() if n in quick else pytest.mark.full) for n in SPOILED]
    return pytest.mark.parametrize("spoiled", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def spoiled(request: pytest.FixtureRequest) -> Spoiled:
    return SPOILED[request.param]


@pytest.fixture(scope="module")
def cluster(spoiled: Spoiled) -> Iterator[nbdist.Cluster]:
    with clusters.cluster(**OPTIONS[spoiled.form.strategy]) as running:
        yield running


@trainings("mirrored step", "pjrt step")
def test_differing_rank_is_named(cluster: nbdist.Cluster, spoiled: Spoiled) -> None:
    with pytest.raises(nbdist.CellError, match=spoiled.named) as raised:
        spoiled.run(cluster, EVERY)
    assert raised.value.rank == 1
    assert raised.value.ename == "StepError"
    assert "rank 1 has a different `" in raised.value.evalue
    assert f" than rank 0 after step {FOUND_AT}." in raised.value.evalue
    assert raised.value.evalue.endswith("Use --guard 0 to disable the comparison")


@trainings("pjrt step")
def test_guard_0_compares_nothing(cluster: nbdist.Cluster, spoiled: Spoiled) -> None:
    spoiled.run(cluster, 0)


@trainings("pjrt step")
def test_equal_ranks_pass(cluster: nbdist.Cluster, spoiled: Spoiled) -> None:
    """Dropout, moments, metrics and an uneven last batch, compared after each step."""
    cluster.run(spoiled.form.setup, strategy=spoiled.form.strategy)
    run = spoiled.form.run(cluster, guard=1)
    assert run.summary.epochs == training.EPOCHS
