"""Keras models on JAX with a planned layout train with the numbers of one device."""

from __future__ import annotations

import ast
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import CellError
from nbdist.planner.search.step_variants import REMATS
from nbdist.records import DATA, MODEL, Planning, Saving, StepOptions
from tests import clusters, references

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist
    from nbdist.execution.result import Run
    from nbdist.records import Remat

HOSTS, PER_HOST = 2, 2
DEVICES = HOSTS * PER_HOST

DATA_SETS = """
import numpy as np
rng = np.random.default_rng(3)
x = rng.normal(size=(56, 16)).astype("float32")
y = (x @ rng.normal(size=16) > 0).astype("float32")[:, None]
"""
MODEL_ = """
import keras
keras.utils.set_random_seed(5)
model = keras.Sequential([
    keras.Input((16,)),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dense(1, activation="sigmoid"),
])
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["mae"])
"""
FIT = """
history = model.fit(
    x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, validation_data=(x[:24], y[:24]))
"""
LOSSES = "[round(float(v), 7) for name in sorted(history.history) for v in history.history[name]]"
PLAIN = f"""
{DATA_SETS}
{MODEL_}
{FIT}
outcome = dict(
    losses={LOSSES},
    weights=[w.tolist() for w in model.get_weights()],
    predicted=model.predict(x[:10], verbose=0).tolist(),
)
"""
FITS = [(2, 2, 1), (4, 1, 0), (1, 4, 0), (4, 1, 3)]
SEVERAL = f"""
{MODEL_}
outcome["several"] = []
for _ in range({len(FITS)}):
    {FIT.strip()}
    outcome["several"] += {LOSSES} + model.evaluate(x, y, verbose=0)
"""
WEIGHTS = "[w.tolist() for w in model.get_weights()]"
SPECS = (
    "{v.path: str(v.value.sharding.spec) for v in (*model.variables, *model.optimizer.variables)}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=HOSTS, framework="jax", devices_per_host=PER_HOST) as running:
        yield running


def on_one_device(program: str) -> Any:
    return references.plainly({"it": program}, "jax", "keras", KERAS_BACKEND="jax")["it"]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    return on_one_device(PLAIN)


def run_fit(cluster: nbdist.Cluster, planning: Planning, cell: str = FIT) -> Run:
    step = StepOptions(data="", planning=planning)
    return cluster.run(cell, strategy="pjrt", step=step)


def losses_of(run: Run) -> list[float]:
    return [m.shared["loss"] for m in run.metrics if m.rank == 0]


def value_on_all_ranks(cluster: nbdist.Cluster, text: str) -> object:
    """Return the value of an expression that must be equal on all ranks."""
    values = set(cluster.run(text, strategy="pjrt").results.values())
    assert len(values) == 1
    return ast.literal_eval(values.pop())


@pytest.mark.parametrize(
    ("degrees", "remat"),
    [
        ((4, 1, 3), ""),
        pytest.param((2, 2, 1), "full", marks=pytest.mark.full),
        *(
            pytest.param(degrees, remat, marks=pytest.mark.full)
            for degrees in ((4, 1, 0), (2, 2, 0), (1, 4, 0))
            for remat in REMATS
        ),
    ],
)
def test_fit_trains_as_one_device(
    cluster: nbdist.Cluster,
    plain: dict[str, list[float]],
    degrees: tuple[int, int, int],
    remat: Remat,
) -> None:
    data, model, zero = degrees
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    run = run_fit(cluster, Planning(fixed={DATA: data, MODEL: model, "zero": zero}, remat=remat))
    assert run.plan is not None
    assert run.plan.axes == {DATA: data, MODEL: model}
    assert run.plan.remat == remat
    np.testing.assert_allclose(
        value_on_all_ranks(cluster, LOSSES), plain["losses"], rtol=1e-4, atol=1e-6
    )
    weights = value_on_all_ranks(cluster, WEIGHTS)
    for actual, expected in zip(weights, plain["weights"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)
    predicted = value_on_all_ranks(cluster, "model.predict(x[:10], verbose=0).tolist()")
    np.testing.assert_allclose(predicted, plain["predicted"], rtol=1e-3, atol=1e-5)
    specs = value_on_all_ranks(cluster, SPECS)
    assert any("model" in spec for spec in specs.values()) == (model > 1)
    assert any("data" in spec for spec in specs.values()) == (zero > 0)
    assert run.compiled is not None
    assert run.compiled.arguments == run.plan.memory.arguments


SAVE = """
import pathlib
folder = pathlib.Path({folder!r})
model.save(folder / "model.keras")
model.save_weights(folder / "model.weights.h5")
again = keras.models.load_model(folder / "model.keras")
kept = [(a == b).all() for a, b in zip(model.get_weights(), again.get_weights(), strict=True)]
optimizer = [(np.array(a) == np.array(b)).all() for a, b in zip(
    model.optimizer.variables, again.optimizer.variables, strict=True)]
before = model.get_weights()
model.set_weights([w + 1 for w in before])
model.load_weights(folder / "model.weights.h5")
back = [(a == b).all() for a, b in zip(model.get_weights(), before, strict=True)]
len(kept), all(kept), len(optimizer), all(optimizer), all(back)
"""


def test_sharded_model_is_saved_and_loaded(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """No rank holds the whole model; rank 0 writes the file.

    A read needs a collective, so a single rank that reads would wait forever.
    """
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    run_fit(cluster, Planning(fixed={MODEL: 2, "zero": 3}))
    with pytest.raises(CellError, match="is sharded over the ranks, and only this rank reads it"):
        cluster.run("model.get_weights()", ranks="0")
    assert value_on_all_ranks(cluster, SAVE.format(folder=str(tmp_path))) == (
        10,
        True,
        18,
        True,
        True,
    )
    assert any("model" in spec for spec in value_on_all_ranks(cluster, SPECS).values())


@pytest.mark.full  # the test with shared layers changes layouts too
def test_next_cell_changes_the_layout_of_the_model(
    cluster: nbdist.Cluster,
) -> None:
    """Training continues from the current weights, and evaluations use the new layout."""
    several = on_one_device(PLAIN + SEVERAL)["several"]
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    losses: list[float] = []
    for data, model, zero in FITS:
        run = run_fit(cluster, Planning(fixed={DATA: data, MODEL: model, "zero": zero}))
        assert run.plan is not None
        assert run.plan.axes == {DATA: data, MODEL: model}
        losses += value_on_all_ranks(cluster, LOSSES)
        losses += value_on_all_ranks(cluster, "model.evaluate(x, y, verbose=0)")
    np.testing.assert_allclose(losses, several, rtol=1e-3, atol=1e-6)


@pytest.mark.full  # test_sharded_state.py has a run without options
def test_cell_without_options_has_a_plan(cluster: nbdist.Cluster) -> None:
    """Without options the layout is pure data parallelism, and each run stores its plan."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    for _ in range(2):
        run = cluster.run(FIT, strategy="pjrt")
        assert run.plan is not None
        assert run.plan.axes == {DATA: DEVICES, MODEL: 1}
        assert run.plan.rows == 16


@pytest.mark.full  # tests/worker/planning/test_plan_step.py covers the budget
def test_fit_over_the_memory_budget_is_refused(cluster: nbdist.Cluster) -> None:
    """The refused fit leaves the model unchanged."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    whole = losses_of(run_fit(cluster, Planning()))
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    with pytest.raises(CellError, match="the step does not fit"):
        run_fit(cluster, Planning(budget=1000))
    assert losses_of(run_fit(cluster, Planning())) == whole


@pytest.mark.full
def test_sharded_model_resumes_from_its_checkpoint(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """The losses equal those of an uninterrupted fit."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    planning = Planning(fixed={MODEL: 2, "zero": 3})
    whole = losses_of(run_fit(cluster, planning))
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    step = StepOptions(data="", planning=planning)
    saving = Saving(folder=str(tmp_path), every_steps=3)
    first = cluster.run(
        FIT.replace("epochs=3", "epochs=2"), strategy="pjrt", step=step, saving=saving
    )
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    saving = Saving(folder=str(tmp_path), every_steps=3, resume=True)
    second = cluster.run(FIT, strategy="pjrt", step=step, saving=saving)
    assert losses_of(first) + losses_of(second) == whole


DISTRIBUTION = "from nbdist.worker.jax.keras import distribution as keras_distribution"
LARGE_MODEL = """
import keras, jax
import numpy as np
from nbdist.worker.jax.keras import distribution as keras_distribution
usual, keras_distribution.LARGE = keras_distribution.LARGE, 1 << 16
try:
    keras.utils.set_random_seed({seed})
    model = keras.Sequential([
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(8192, 16),
        keras.layers.Flatten(),
        keras.layers.Dense(512),
        keras.layers.Dense(1),
    ])
finally:
    keras_distribution.LARGE = usual
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
x = np.random.default_rng(1).integers(0, 8192, (32, 4)).astype("int32")
y = np.ones((32, 1), "float32")
table = model.layers[0].embeddings
"""
LARGE_FIT = """
losses = model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False).history["loss"]
"""
PLAIN_LARGE = f"""
{LARGE_MODEL.format(seed=7).replace(DISTRIBUTION, "class keras_distribution: LARGE = 0")}
outcome = dict(drawn=np.asarray(table).sum(axis=1).tolist()[::64])
{LARGE_FIT}
outcome["losses"] = losses
"""
PARTS = "{part.data.shape for part in table.value.addressable_shards}"


def test_large_variable_is_created_sharded(cluster: nbdist.Cluster) -> None:
    """No device holds the whole variable, and its values are those of one device."""
    reference = on_one_device(PLAIN_LARGE)
    cluster.run(LARGE_MODEL.format(seed=7), strategy="pjrt")
    assert value_on_all_ranks(cluster, PARTS) == {(8192 // DEVICES, 16)}
    row_sums = value_on_all_ranks(cluster, "np.asarray(table).sum(axis=1).tolist()[::64]")
    assert row_sums == reference["drawn"]
    run = run_fit(cluster, Planning(fixed={"zero": 3}), LARGE_FIT)
    assert run.plan is not None
    assert value_on_all_ranks(cluster, PARTS) == {(8192, 16 // DEVICES)}, (
        "the plan shards an embedding along its columns, because steps look up rows"
    )
    np.testing.assert_allclose(
        value_on_all_ranks(cluster, "losses"), reference["losses"], rtol=1e-5
    )


@pytest.mark.full  # `test_fit.py` seeds ranks differently
def test_differently_seeded_ranks_create_one_variable(cluster: nbdist.Cluster) -> None:
    cluster.run(LARGE_MODEL.format(seed="7 + rank"), strategy="pjrt")
    row_sums = value_on_all_ranks(cluster, "np.asarray(table).sum(axis=1).tolist()[::64]")
    cluster.run(LARGE_MODEL.format(seed=7), strategy="pjrt")
    assert value_on_all_ranks(cluster, "np.asarray(table).sum(axis=1).tolist()[::64]") == row_sums


@pytest.mark.full
def test_resume_at_a_smaller_last_batch_keeps_the_layout(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """The last of four batches contains 8 of the 56 samples."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    saving = Saving(folder=str(tmp_path), every_steps=3)
    cell = "model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)"
    cluster.run(cell, strategy="pjrt", saving=saving)
    for path in tmp_path.glob("step-*4"):
        shutil.rmtree(path)
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    saving = Saving(folder=str(tmp_path), every_steps=3, resume=True)
    run = cluster.run(cell, strategy="pjrt", saving=saving)
    assert run.plan is not None
    assert run.plan.rows == 16


def test_raising_generator_leaves_the_weights_unchanged(cluster: nbdist.Cluster) -> None:
    """At the time of the error Keras has already moved the values out of the variables."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    before = value_on_all_ranks(cluster, WEIGHTS)
    raising = "def broken():\n    raise ValueError('no data')\n    yield x, y\n"
    with pytest.raises(CellError, match="no data"):
        run_fit(cluster, Planning(fixed={MODEL: 2}), f"{raising}model.fit(broken(), verbose=0)")
    assert value_on_all_ranks(cluster, WEIGHTS) == before


SHARED = """
base = keras.Sequential([keras.Input((16,)), keras.layers.Dense(128), keras.layers.Dense(64)])
base.add(keras.layers.Dense(1))
base.compile(keras.optimizers.Adam(0.01), "mse")
other = keras.Sequential([base, keras.layers.Activation("sigmoid")])
other.compile(keras.optimizers.Adam(0.01), "mse")
def fits(model):
    return model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
"""
IN_TURN = ("fits(base)", "fits(other)", "fits(base)", "fits(other)")
PLAIN_SHARED = f"""
{DATA_SETS}{MODEL_}{SHARED}
outcome = [{", ".join(IN_TURN)}]
"""


@pytest.mark.full
def test_models_with_shared_layers_change_layouts_in_turn(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """Each fit starts from the layout that the previous fit gave to the shared layers."""
    expected = on_one_device(PLAIN_SHARED)
    cluster.run(DATA_SETS + MODEL_ + SHARED, strategy="pjrt")
    plans = {}, {"zero": 3}, {}, {MODEL: 2, "zero": 1}
    for fixed, fit, losses in zip(plans, IN_TURN, expected, strict=True):
        run = run_fit(cluster, Planning(fixed=fixed), fit)
        assert run.plan is not None
        actual = ast.literal_eval(run.results[0])
        np.testing.assert_allclose(actual, losses, rtol=1e-3, atol=1e-6)
    path = str(tmp_path / "other.keras")
    assert value_on_all_ranks(cluster, RELOAD_OTHER.format(path=path)) == [True]


RELOAD_OTHER = """
other.save({path!r})
again = keras.models.load_model({path!r})
[all((a == b).all() for a, b in zip(other.get_weights(), again.get_weights(), strict=True))]
"""


@pytest.mark.full
def test_other_training_calls_follow_the_plan(cluster: nbdist.Cluster) -> None:
    """Single batches, several steps per execution, frozen layers, a recompiled model."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    planning = Planning(fixed={MODEL: 2})
    run = run_fit(cluster, planning, "[float(l) for l in model.train_on_batch(x[:16], y[:16])]")
    assert run.plan is not None
    cell = (
        "model.layers[0].trainable = False\n"
        "frozen = model.layers[0].get_weights()[0]\n"
        "model.compile(keras.optimizers.Adam(0.01), 'binary_crossentropy', steps_per_execution=2)\n"
        "model.fit(x, y, batch_size=16, epochs=2, verbose=0)\n"
        "bool((frozen == model.layers[0].get_weights()[0]).all()), int(model.optimizer.iterations)"
    )
    run = run_fit(cluster, planning, cell)
    assert set(run.results.values()) == {"(True, 8)"}
    assert run.plan is not None
    assert run.plan.axes == {DATA: 2, MODEL: 2}


@pytest.mark.full
def test_plan_applies_to_a_recreated_model(cluster: nbdist.Cluster) -> None:
    """Keras gives the variables new names each time."""
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    first_plan = run_fit(cluster, Planning(fixed={MODEL: 2})).plan
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    run = run_fit(cluster, Planning(given=first_plan))
    assert run.plan is not None
    assert first_plan is not None
    assert [t.spec for t in run.plan.tensors] == [t.spec for t in first_plan.tensors]
    assert run.plan.axes == {DATA: 2, MODEL: 2}


def test_layout_options_without_a_fit_are_reported(cluster: nbdist.Cluster) -> None:
    run = run_fit(cluster, Planning(fixed={MODEL: 2}), "1 + 1")
    assert {note.text for note in run.notes} == {
        "the cell trains no Keras model on JAX with `fit`: layout options have no effect"
    }


DROPOUT_MODEL = MODEL_.replace("BatchNormalization()", "Dropout(0.3)")


@pytest.mark.full
def test_fit_in_microbatches_has_the_losses_of_whole_batches(cluster: nbdist.Cluster) -> None:
    values = []
    for micro in (1, 2):
        cluster.run(DATA_SETS + DROPOUT_MODEL, strategy="pjrt")
        run = run_fit(cluster, Planning(fixed={DATA: 4, "micro": micro}))
        assert run.plan is not None
        assert run.plan.micro == micro
        values.append(value_on_all_ranks(cluster, LOSSES))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-5)


def test_batch_normalization_excludes_microbatches(cluster: nbdist.Cluster) -> None:
    cluster.run(DATA_SETS + MODEL_, strategy="pjrt")
    with pytest.raises(CellError, match=r"no microbatches: .* the sum over all rows for each"):
        run_fit(cluster, Planning(fixed={"micro": 2}))
