"""Saves with one path on all ranks, on one rank, and on hosts without a shared file system.

Folders on one machine replace hosts without shared files. Each rank works in its own folder, with
relative paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import nbdist
from tests import clusters
from tests.references import plainly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MODEL = """
import json, os, pathlib
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
y = x.sum(1, keepdims=True)
def made():
    model = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones"),
        keras.layers.Dense(1, kernel_initializer="ones"),
    ])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model
def fit(model, epochs=2, callbacks=()):
    return model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0,
                     callbacks=[*callbacks])
def alike(one, other):
    return all(map(np.array_equal, one.get_weights(), other.get_weights()))
model = made()
history = fit(model)
"""
REFERENCE = (
    MODEL
    + """
fit(model, epochs=3)
outcome = [w.tolist() for w in model.get_weights()]
"""
)
SHARED, SEPARATE = "one folder", "a folder for each rank"
ONE_FOLDER = pytest.mark.parametrize(
    "layout", [SHARED, pytest.param(SEPARATE, marks=pytest.mark.full)]
)
SEPARATE_FOLDERS = pytest.mark.parametrize(
    "layout", [pytest.param(SHARED, marks=pytest.mark.full), SEPARATE]
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="tensorflow") as running:
        running.run(MODEL)
        yield running


@pytest.fixture(scope="module")
def reference() -> Any:
    return plainly({"one": REFERENCE}, "tensorflow", "keras")["one"]


def work_in(cluster: nbdist.Cluster, folder: Path, layout: str = SHARED) -> None:
    """Set the working folder of the ranks to `folder`, or to a separate subfolder for each rank."""
    below = "str(rank)" if layout != SHARED else "''"
    cluster.run(
        "import os\nfolder = os.path.join("
        f"{str(folder)!r}, {below})\nos.makedirs(folder, exist_ok=True)\nos.chdir(folder)"
    )


def shared_result(results: Mapping[int, str]) -> str:
    """Return the one result that all ranks share."""
    (one,) = set(results.values())
    return one


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "nbdist" in path.name]


def test_loaded_model_continues_as_in_one_process(
    cluster: nbdist.Cluster, tmp_path: Path, reference: Any
) -> None:
    """Check the weights after more training, so that the optimizer's state is included."""
    work_in(cluster, tmp_path, SEPARATE)
    cluster.run("model.save('m.keras')")
    cluster.run("other = keras.models.load_model('m.keras')\nfit(other, epochs=3)")
    cluster.run("outcome = [w.tolist() for w in other.get_weights()]")
    for objects in cluster.pull(["outcome"]).values():
        for ours, theirs in zip(objects["outcome"], reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@SEPARATE_FOLDERS
def test_keras_saves_and_loads_in_one_cell(
    cluster: nbdist.Cluster, tmp_path: Path, layout: str
) -> None:
    work_in(cluster, tmp_path, layout)
    run = cluster.run("""
found = []
for name in ("model.keras", "model.h5"):
    for _ in range(3):
        model.save(name)
        compiled = name == "model.keras"  # Keras 3.15 does not read "mse" from HDF5
        found.append(alike(model, keras.models.load_model(name, compile=compiled)))
for name, options in (("m.weights.h5", {}), ("s.weights.json", {"max_shard_size": 1})):
    model.save_weights(name, **options)
    other = made()
    other.load_weights(name)
    found.append(alike(model, other))
model.export("exported", verbose=False)
loaded = tf.saved_model.load("exported")
found.append(np.allclose(loaded.serve(x), model(x), atol=1e-6))
class Scaled(tf.Module):
    def __init__(self):
        self.factor = tf.Variable(3.0)
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def __call__(self, x):
        return self.factor * x
tf.saved_model.save(Scaled(), "saved")
found.append(tf.saved_model.load("saved")([2.0]).numpy().tolist() == [6.0])
found
""")
    assert shared_result(run.results) == str([True] * 10)
    names = {"model.keras", "model.h5", "m.weights.h5", "s.weights.json", "exported", "saved"}
    folders = [tmp_path] if layout == SHARED else [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        assert names | {"s_00000.weights.h5"} == {path.name for path in folder.iterdir()}
    assert not temporary_files(tmp_path)


def test_save_to_hdf5_keeps_the_optimizer(
    cluster: nbdist.Cluster, tmp_path: Path, reference: Any
) -> None:
    """Keras removes it. A later `.keras` file then loads RMSprop, and the loss is NaN."""
    work_in(cluster, tmp_path)
    run = cluster.run("""
for name in ("m.keras", "m.h5") * 3:
    model.save(name)
    keras.models.load_model(name, compile=name == "m.keras")
model.save("m.keras")
other = keras.models.load_model("m.keras")
clone = keras.models.clone_model(model)
clone.compile_from_config(model.get_compile_config())
fit(other, epochs=3)
outcome = [w.tolist() for w in other.get_weights()]
type(other.optimizer).__name__, type(clone.optimizer).__name__
""")
    assert shared_result(run.results) == "('SGD', 'SGD')"
    for objects in cluster.pull(["outcome"]).values():
        for ours, theirs in zip(objects["outcome"], reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@ONE_FOLDER
def test_tensorflow_checkpoints_are_restored(
    cluster: nbdist.Cluster, tmp_path: Path, layout: str
) -> None:
    work_in(cluster, tmp_path, layout)
    run = cluster.run("""
checkpoint = tf.train.Checkpoint(model=model)
path = checkpoint.save("one/c")
weights = model.get_weights()
model.set_weights([w + 1 for w in weights])
checkpoint.restore(tf.train.latest_checkpoint("one"))
restored = all(map(np.array_equal, weights, model.get_weights()))
written = checkpoint.write("two/w")
model.set_weights([w + 1 for w in weights])
checkpoint.read(written)
read = all(map(np.array_equal, weights, model.get_weights()))
manager = tf.train.CheckpointManager(checkpoint, "three", max_to_keep=2)
for _ in range(4):
    newest = manager.save()
model.set_weights([w + 1 for w in weights])
checkpoint.restore(manager.latest_checkpoint)
managed = all(map(np.array_equal, weights, model.get_weights()))
there = sorted(path.name for path in pathlib.Path("three").glob("*.index"))
path, restored, written, read, newest, managed, manager.checkpoints, there
""")
    kept = ["three/ckpt-4", "three/ckpt-5"]
    expected = ("one/c-1", True, "two/w", True, "three/ckpt-5", True, kept)
    assert eval(shared_result(run.results)) == (*expected, ["ckpt-4.index", "ckpt-5.index"])
    folder = tmp_path if layout == SHARED else tmp_path / "1"
    assert (folder / "three" / "checkpoint").is_file()
    assert not temporary_files(tmp_path)


def test_manager_continues_from_existing_checkpoints(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    work_in(cluster, tmp_path, SEPARATE)
    cell = """
checkpoint = tf.train.Checkpoint(model=model)
manager = tf.train.CheckpointManager(checkpoint, "c", max_to_keep=3)
status = checkpoint.restore(manager.latest_checkpoint)
manager.save()
manager.latest_checkpoint
"""
    assert shared_result(cluster.run(cell).results) == "'c/ckpt-1'"
    assert shared_result(cluster.run(cell).results) == "'c/ckpt-2'"


@ONE_FOLDER
def test_callbacks_write_one_file(
    cluster: nbdist.Cluster, tmp_path: Path, layout: str, reference: Any
) -> None:
    work_in(cluster, tmp_path, layout)
    cluster.run("""
os.makedirs("c", exist_ok=True)
K = keras.callbacks
trained = made()
fit(trained)
logged = fit(trained, 3, [
    K.ModelCheckpoint("c/{epoch}.keras"),
    K.ModelCheckpoint("c/{epoch}.weights.h5", save_weights_only=True),
    K.ModelCheckpoint("c/best.keras", save_best_only=True, monitor="loss"),
    K.CSVLogger("rows.csv"),
    K.CSVLogger("added.csv", append=True),
    K.TensorBoard("events"),
    K.BackupAndRestore("backup"),
])
last = keras.models.load_model("c/3.keras")
same = alike(last, trained)
outcome = [w.tolist() for w in trained.get_weights()]
losses = logged.history["loss"]
""")
    found = cluster.pull(["same", "outcome", "losses"])
    for objects in found.values():
        assert objects["same"]
        for ours, theirs in zip(objects["outcome"], reference, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    chief = tmp_path if layout == SHARED else tmp_path / "0"
    other = tmp_path if layout == SHARED else tmp_path / "1"
    names = {f"{epoch}{end}" for epoch in (1, 2, 3) for end in (".keras", ".weights.h5")}
    for folder in (chief, other):
        assert {path.name for path in (folder / "c").iterdir()} == names | {"best.keras"}
        assert not (folder / "backup").exists()
        for csv in ("rows.csv", "added.csv"):
            header, *rows = (folder / csv).read_text().splitlines()
            assert header.startswith("epoch,loss,mae")
            losses = [float(row.split(",")[1]) for row in rows]
            assert losses == pytest.approx(found[0]["losses"])
    assert len([*(chief / "events" / "train").glob("events*")]) == 1
    assert (other / "events").exists() == (layout == SHARED)
    assert not temporary_files(tmp_path)


@SEPARATE_FOLDERS
def test_failed_fit_continues_from_its_backup(
    cluster: nbdist.Cluster, tmp_path: Path, layout: str
) -> None:
    work_in(cluster, tmp_path, layout)
    cluster.run("""
class Fails(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 7: raise ValueError("it fails")
trained = made()
""")
    with pytest.raises(nbdist.CellError, match="it fails"):
        cluster.run("fit(trained, 4, [keras.callbacks.BackupAndRestore('b'), Fails()])")
    assert shared_result(cluster.run("sorted(os.listdir('b'))").results) == (
        "['latest.weights.h5', 'training_metadata.json']"
    )
    run = cluster.run("""
whole, again = made(), made()
fit(whole, 4)
epochs = fit(again, 4, [keras.callbacks.BackupAndRestore('b')]).epoch
epochs, all(map(np.allclose, again.get_weights(), whole.get_weights())), os.path.exists('b')
""")
    assert shared_result(run.results) == "([2, 3], True, False)"


@pytest.mark.parametrize("saver", [pytest.param(0, marks=pytest.mark.full), 1])
def test_save_on_one_rank_needs_no_other_rank(
    cluster: nbdist.Cluster, tmp_path: Path, saver: int
) -> None:
    """All ranks continue training in the same cell, and the models stay equal."""
    work_in(cluster, tmp_path)
    run = cluster.run(f"""
if rank == {saver}:
    model.save("m.keras")
    model.save_weights("m.weights.h5")
    model.export("e", verbose=False)
    tf.saved_model.save(model, "s")
    first = tf.train.Checkpoint(model=model)
    first.save("c/c")
    first.write("c/w")
    tf.train.CheckpointManager(first, "m", max_to_keep=1).save()
before = model.get_weights()
fit(made())
True
""")
    assert shared_result(run.results) == "True"
    run = cluster.run("""
same = [alike(model, keras.models.load_model("m.keras"))]
for path in (tf.train.latest_checkpoint("c"), "c/w", tf.train.latest_checkpoint("m")):
    other = made()
    tf.train.Checkpoint(model=other).read(path).expect_partial()
    same.append(alike(model, other))
same, np.allclose(tf.saved_model.load("e").serve(x), model(x), atol=1e-6), len(os.listdir("s"))
""")
    assert shared_result(run.results) == "([True, True, True, True], True, 4)"
    assert not temporary_files(tmp_path)


def test_file_saved_by_rank_0_is_loaded_by_all(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    work_in(cluster, tmp_path, SEPARATE)
    cluster.run("old = made()")
    cluster.run("if rank == 1:\n    old.save('m.keras')\n    old.save_weights('m.weights.h5')")
    cluster.run("""
if rank == 0:
    model.save("m.keras")
    model.save_weights("m.weights.h5")
    model.export("e", verbose=False)
    tf.train.Checkpoint(model=model).save("c/c")
""")
    run = cluster.run("""
other, third = made(), made()
other.load_weights("m.weights.h5")
tf.train.Checkpoint(model=third).restore(tf.train.latest_checkpoint("c")).expect_partial()
loaded = keras.models.load_model("m.keras"), other, third
[alike(model, each) for each in loaded], np.allclose(
    tf.saved_model.load("e").serve(x), model(x), atol=1e-6)
""")
    assert shared_result(run.results) == "([True, True, True], True)"


def test_each_rank_may_save_to_its_own_path(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    work_in(cluster, tmp_path)
    run = cluster.run("""
model.save(f"model_{rank}.keras")
tf.train.Checkpoint(model=model).write(f"worker-{rank}/c")
fit(made(), callbacks=[keras.callbacks.CSVLogger(f"rows-{rank}.csv")])
mine = keras.models.load_model(f"model_{rank}.keras")
alike(mine, model), sorted(os.listdir(f"worker-{rank}"))
""")
    assert shared_result(run.results) == "(True, ['c.data-00000-of-00001', 'c.index'])"
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model_0.keras", "model_1.keras", "rows-0.csv", "rows-1.csv"} <= names
    assert not temporary_files(tmp_path)


def test_failed_save_on_rank_0_fails_on_all_ranks(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    work_in(cluster, tmp_path)
    with pytest.raises(nbdist.CellError, match="FileNotFoundError on rank 0@"):
        cluster.run("model.save('missing/m.keras')")
    with pytest.raises(nbdist.CellError, match=r"rank 0 could not save missing/m\.keras") as error:
        cluster.run("try:\n    model.save('missing/m.keras')\nexcept FileNotFoundError: pass")
    assert error.value.rank == 1
    assert shared_result(cluster.run("alike(model, model)").results) == "True"


@ONE_FOLDER
def test_path_is_saved_after_a_failed_save(
    cluster: nbdist.Cluster, tmp_path: Path, layout: str
) -> None:
    work_in(cluster, tmp_path, layout)
    run = cluster.run("""
class Fussy(keras.layers.Dense):
    fails = True
    def get_config(self):
        if self.fails: raise ValueError("not yet")
        return super().get_config()
fussy = keras.Sequential([keras.Input((4,)), Fussy(1)])
try:
    fussy.save("f.keras")
except ValueError:
    Fussy.fails = False
fussy.save("f.keras")
alike(fussy, keras.models.load_model("f.keras", custom_objects={"Fussy": Fussy}))
""")
    assert shared_result(run.results) == "True"
    assert not temporary_files(tmp_path)


def test_exports_to_other_formats_match_rank_0(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """If a format's package is missing, all ranks raise the error of one process.

    Ranks have different weights on purpose. All use the file of rank 0.
    """
    work_in(cluster, tmp_path, SEPARATE)
    run = cluster.run(
        """
other = made()
other(x)
other.set_weights([w + rank for w in other.get_weights()])
before = other.get_weights()
def exported(end, format):
    try:
        other.export(f"m.{end}", format=format, verbose=False)
    except ImportError as error:
        return error.name
    return format
outcome = [exported("onnx", "onnx"), exported("xml", "openvino"), exported("tflite", "litert")]
fit(made())
outcome, all(map(np.array_equal, before, other.get_weights()))
""",
        guard=0,
    )
    assert shared_result(run.results) == "(['onnx', 'openvino', 'litert'], True)"
    theirs, own = (sorted((tmp_path / rank).iterdir()) for rank in "01")
    assert "m.tflite" in {path.name for path in own}
    assert [path.read_bytes() for path in own] == [path.read_bytes() for path in theirs]


@pytest.mark.full  # rare
def test_weights_file_of_an_export_is_copied(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """OpenVINO writes them to a file beside the model's file."""
    work_in(cluster, tmp_path, SEPARATE)
    run = cluster.run("""
from nbdist.worker.tensorflow.saving import coordination as saving
def export(model, filepath):
    for path in (filepath, filepath.replace(".xml", ".bin")):
        pathlib.Path(path).write_text(f"{os.path.basename(path)} of {rank}")
saving.by_chief(export)(model, "m.xml")
[path.read_text() for path in sorted(pathlib.Path().iterdir())]
""")
    assert shared_result(run.results) == "['m.bin of 0', 'm.xml of 0']"


def test_cell_on_one_rank_saves_alone(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    work_in(cluster, tmp_path)
    cluster.run("model.save('alone.keras')", ranks="1")
    assert (tmp_path / "alone.keras").is_file()


@pytest.mark.full
def test_four_ranks_save_and_load(tmp_path: Path, reference: Any) -> None:
    """All ranks save to one path, and one rank saves alone."""
    with clusters.cluster(hosts=4, framework="tensorflow") as four:
        four.run(MODEL)
        work_in(four, tmp_path / "own", SEPARATE)
        four.run("model.save('all.keras')")
        run = four.run("""
backup = tf.train.Checkpoint(model=model)
path = backup.save("c/all")
other = keras.models.load_model("all.keras")
same = [alike(model, other)]
third = made()
tf.train.Checkpoint(model=third).restore(path).expect_partial()
same.append(alike(model, third))
fit(other, epochs=3)
outcome = [w.tolist() for w in other.get_weights()]
same
""")
        assert shared_result(run.results) == "[True, True]"
        for objects in four.pull(["outcome"]).values():
            for ours, theirs in zip(objects["outcome"], reference, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        work_in(four, tmp_path / "shared")
        four.run("if rank == 2: model.save('one.keras')")
        run = four.run("alike(model, keras.models.load_model('one.keras'))")
        assert shared_result(run.results) == "True"
        assert not temporary_files(tmp_path)


@pytest.mark.full
def test_libraries_still_need_the_patch(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """If this fails, Keras or TensorFlow has changed: remove the unnecessary parts."""
    work_in(cluster, tmp_path, SEPARATE)
    run = cluster.run("""
from keras.src.saving import saving_lib
from nbdist.worker.tensorflow.saving import tensorflow_patch as t
saving_lib.save_model.__wrapped__(model, "m.keras")
from nbdist.worker.keras import hdf5
other = made()
hdf5._upstream(other)
keeps = "optimizer" in other._compile_config.config
model.export("e", verbose=False)
t.load_lib._WrapperFunction._call_flat = t._upstream_call
try:
    tf.saved_model.load("e").serve(x)
    serves = True
except tf.errors.InvalidArgumentError:
    serves = False
finally:
    t.load_lib._WrapperFunction._call_flat = t._call_loaded
os.path.exists("m.keras"), keeps, serves
""")
    assert shared_result(run.results) == "(True, False, False)"


def test_other_versions_are_not_patched(cluster: nbdist.Cluster) -> None:
    run = cluster.run("""
from nbdist.private_api.tested_versions import TESTED
from nbdist.worker.tensorflow.saving import keras_patch as k, tensorflow_patch as t
from nbdist.worker.tensorflow import strategy as backend
before = k.saving_lib.save_model, tf.train.Checkpoint.save
kept = dict(TESTED)
TESTED.update(dict.fromkeys(TESTED, ("9.9.",)))
k.apply.cache_clear()
t.apply.cache_clear()
backend._apply_optional_patches()
backend._patch_keras()
TESTED.update(kept)
before == (k.saving_lib.save_model, tf.train.Checkpoint.save)
""")
    assert shared_result(run.results) == "True"
