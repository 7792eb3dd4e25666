"""Models that ranks export load in one process without nbdist, with the same predictions."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import nbdist
from nbdist.records import MODEL, Planning, StepOptions
from nbdist.worker.export import formats
from tests import clusters, references

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.worker.export import model_export

TREE = {
    "encoder": [{"w": np.ones((4, 3), np.float32)}, {"w": np.full((2, 3), 2.0, np.float64)}],
    "scale": np.float32(3),
    "b": np.arange(3),
    "name": "text",
}


def test_tree_is_written_under_its_paths(tmp_path: Path) -> None:
    assert nbdist.export(TREE, tmp_path / "out") == tmp_path / "out"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"encoder.0.w", "encoder.1.w", "b"}
    np.testing.assert_array_equal(found["encoder.1.w"], np.full((2, 3), 2.0))
    assert found["encoder.0.w"].dtype == np.float32


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_folder_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: model_export.Format
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    nbdist.export(TREE, "out", format=kind)
    nbdist.export(TREE, "~/out", format=kind)
    for folder in (tmp_path / "out", tmp_path / "home" / "out"):
        assert {path.name for path in folder.iterdir()} <= {"orbax", "model.safetensors"}


def test_large_model_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SHARD_BYTES", 50)
    nbdist.export(TREE, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 48 + 48 + 24
    assert len({*index["weight_map"].values()}) == 3
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)


def test_keys_of_random_generators_are_left_out(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    nbdist.export({"key": jax.random.key(0), "w": jnp.ones(2, jnp.bfloat16)}, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"w"}
    assert str(found["w"].dtype) == "bfloat16"


OTHERS = "other values (epoch, texts.0, texts.1 and 1 more)"


def of_objects() -> dict[str, Any]:
    """Return modules and trees with random generators, numbers and empty arrays."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    from flax import nnx

    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    linear = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    return {
        "nnx": nnx.Sequential(*layers),
        "equinox": eqx.nn.Sequential([linear, eqx.nn.Dropout(0.5)]),
        "tree": {"w": jnp.ones(2), "key": jax.random.key(1), "epoch": 3, "none": None}
        | {"empty": jnp.zeros((0, 3)), "texts": ["a", "b", "c"]},
    }


@pytest.mark.parametrize(
    ("name", "format_", "arrays", "omitted"),
    [
        (
            "nnx",
            "safetensors",
            {f"layers.0.{k}" for k in ("kernel", "bias")}
            | {f"layers.1.{k}" for k in ("scale", "bias", "mean", "var")},
            "containers, random generators (layers.2.rngs.count, layers.2.rngs.key)",
        ),
        (
            "equinox",
            "safetensors",
            {"layers.0.weight", "layers.0.bias"},
            "containers, other values (layers.1.p, layers.1.inference)",
        ),
        (
            "tree",
            "safetensors",
            {"w", "empty"},
            f"containers, random generators (key), {OTHERS}",
        ),
        (
            "tree",
            "orbax",
            {"w"},
            "types of containers, random generators (key), arrays without elements (empty), "
            + OTHERS,
        ),
    ],
)
def test_message_lists_what_the_files_lack(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    format_: Any,
    arrays: set[str],
    omitted: str,
) -> None:
    nbdist.export(of_objects()[name], tmp_path / "out", format=format_)
    output = capsys.readouterr().out
    assert output.endswith(f"Not included: code, static attributes, {omitted}\n")
    if format_ == "orbax":
        from nbdist.worker.jax.arrays.checkpoint import metadata

        assert {*metadata(tmp_path / "out" / "orbax")} == arrays
    else:
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == arrays


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (TREE, {"format": "onnx"}, "unknown format 'onnx': choose from keras, weights, savedmodel"),
        (TREE, {"format": "keras"}, "needs a Keras model, not dict"),
        ({"a": "text"}, {}, "dict contains no arrays to export"),
        ("missing", {}, "missing contains no checkpoint"),
        (
            "saved",
            {"format": "keras"},
            "a checkpoint contains arrays only: use ",
        ),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, options: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nbdist.UsageError, match=message):
        nbdist.export(value, "out", **options)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(nbdist.UsageError, match="exists: choose another folder"):
        nbdist.export(TREE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nothing_is_left_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    refused = "cannot export to .*/out: No space left on device. Nothing was written: choose"
    with pytest.raises(nbdist.UsageError, match=refused):
        nbdist.export(TREE, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(nbdist.UsageError, match=r"pip install \"nbdist\[export\]\""):
        nbdist.export(TREE, tmp_path / "out")


def test_stored_run_has_no_workers() -> None:
    with pytest.raises(nbdist.UsageError, match="a stored run has no workers"):
        nbdist.Run(1).export("model", "out")


@pytest.fixture(scope="module", params=["tensorflow", "jax"])
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def cluster(framework: str) -> Iterator[nbdist.Cluster]:
    devices = {"devices_per_host": 2} if framework == "jax" else {}
    with clusters.cluster(hosts=2, framework=framework, **devices) as running:
        yield running


KERAS = """
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(16, activation="relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
expected = model.predict(x[:8], verbose=0).tolist()
"""
OMITTED = {
    "keras": "",
    "weights": "code, ",
    "savedmodel": "code, optimizer, ",
    "safetensors": "code, optimizer, ",
    "orbax": "code, optimizer, ",
}
LOAD_KERAS = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")[:8]
folder = {folder!r}
model = keras.saving.load_model(folder + "/keras/model.keras")
outcome = dict(keras=model.predict(x, verbose=0).tolist(), steps=int(model.optimizer.iterations))
other = keras.Sequential([
    keras.Input((4,)), keras.layers.Dense(16, activation="relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
other.load_weights(folder + "/weights/model.weights.h5")
outcome["weights"] = other.predict(x, verbose=0).tolist()
other.compile(keras.optimizers.Adam(0.01), "mse")
other.optimizer.build(other.trainable_variables)
other.load_weights(folder + "/weights/model.weights.h5")
outcome["steps_of_weights"] = int(other.optimizer.iterations)
outcome["metrics"] = [float(v) for m in model.metrics for v in map(np.sum, m.variables)]
outcome["seeds"] = [
    np.asarray(v).tolist() for v in model.non_trainable_variables if "seed" in v.path]
import jax, orbax.checkpoint as ocp
tree = ocp.StandardCheckpointer().restore(folder + "/orbax/orbax")
leaves = jax.tree.leaves_with_path(tree)
arrays = dict((".".join(str(k.key) for k in path), leaf) for path, leaf in leaves)
assert arrays.keys() == set(weight.path.replace("/", ".") for weight in model.weights)
for weight in model.weights:
    np.testing.assert_array_equal(arrays[weight.path.replace("/", ".")], np.asarray(weight))
from safetensors.numpy import load_file
arrays = load_file(folder + "/safetensors/model.safetensors")
for weight in model.weights:
    np.testing.assert_array_equal(arrays[weight.path.replace("/", ".")], np.asarray(weight))
"""
LOAD_SAVED_MODEL = """
import numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")[:8]
loaded = tf.saved_model.load({folder!r})
outcome = loaded.serve(x).numpy().tolist()
"""


@pytest.mark.parametrize(
    "framework", ["tensorflow", pytest.param("jax", marks=pytest.mark.full)], indirect=True
)
def test_keras_model_predicts_the_same_in_one_process(
    cluster: nbdist.Cluster, framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = "pjrt" if framework == "jax" else "mirrored"
    if framework == "jax":
        cluster.run("import os; os.environ['KERAS_BACKEND'] = 'jax'")
    cluster.run(KERAS, strategy=strategy)
    cluster.run(
        "import nbdist\n"
        'for kind in ("keras", "weights", "savedmodel", "safetensors", "orbax"):\n'
        f"    nbdist.export(model, {str(tmp_path)!r} + f'/{{kind}}', format=kind)\n"
        f"nbdist.export(keras.models.clone_model(model), {str(tmp_path / 'not_compiled')!r})",
        strategy=strategy,
    )
    output = capsys.readouterr().out
    assert f"exported to {tmp_path}/keras (" in output
    for kind, omitted in OMITTED.items():
        assert f", format {kind}). Not included: {omitted}random generators, metrics\n" in output
    expected = cluster.pull(["expected"])[0]["expected"]
    backend = {"KERAS_BACKEND": "jax"} if framework == "jax" else {}
    modules = ("jax", "keras") if framework == "jax" else ("tensorflow", "keras")
    program = LOAD_KERAS.format(folder=str(tmp_path))
    found = references.plainly({"it": program}, *modules, **backend)["it"]
    assert (found["steps"], found["steps_of_weights"]) == (8, 8)
    assert set(found["metrics"]) == {0.0}
    assert [seed[1] for seed in found["seeds"]] == [0]
    np.testing.assert_allclose(found["keras"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["weights"], expected, rtol=1e-5)
    program = LOAD_SAVED_MODEL.format(folder=str(tmp_path / "savedmodel"))
    served = references.plainly({"it": program}, "tensorflow", "keras")["it"]
    np.testing.assert_allclose(served, expected, rtol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {
        "keras",
        "weights",
        "savedmodel",
        "safetensors",
        "orbax",
        "not_compiled",
    }


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, nbdist, equinox as eqx
from flax import nnx
rows = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
whole = np.arange(64.0, dtype="float32").reshape(16, 4)
params = {"w": jax.device_put(whole, rows), "layers": [{"b": jnp.ones(3)}]}
module = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
layer = eqx.nn.Linear(4, 2, key=jax.random.key(0))
"""


@pytest.mark.parametrize("framework", ["jax"], indirect=True)
def test_sharded_arrays_are_written_whole(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run(SHARDED, strategy="pjrt")
    cell = "\n".join(
        f"nbdist.export({name}, {str(tmp_path / name)!r})" for name in ("params", "module", "layer")
    )
    cluster.run(
        f"{cell}\nnbdist.export(params, {str(tmp_path / 'checkpoint')!r}, format='orbax')",
        strategy="pjrt",
    )
    whole = np.arange(64.0, dtype="float32").reshape(16, 4)
    cluster.last_run.export("params['layers']", str(tmp_path / "layers"))
    assert load_file(tmp_path / "layers" / "model.safetensors").keys() == {"0.b"}
    found = load_file(tmp_path / "params" / "model.safetensors")
    assert found.keys() == {"w", "layers.0.b"}
    np.testing.assert_array_equal(found["w"], whole)
    module = load_file(tmp_path / "module" / "model.safetensors")
    assert module.keys() == {"layers.0.kernel", "layers.0.bias"}
    assert load_file(tmp_path / "layer" / "model.safetensors").keys() == {"weight", "bias"}
    load = (
        "import orbax.checkpoint as ocp\n"
        f"tree = ocp.StandardCheckpointer().restore({str(tmp_path / 'checkpoint' / 'orbax')!r})\n"
        "outcome = [tree['w'].tolist(), tree['layers']['0']['b'].tolist()]"
    )
    assert references.plainly({"it": load}, "jax", "optax")["it"] == [whole.tolist(), [1.0] * 3]


STEP = {
    "tensorflow": """
import tensorflow as tf
x, y = batch
with tf.GradientTape() as tape:
    loss = tf.reduce_mean((x @ w - y) ** 2)
w.assign_sub(0.1 * tape.gradient(loss, w))
count.assign_add(1)
""",
    "jax": """
import jax
x, y = batch
loss, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(w)
w = w - 0.1 * gradient
count = count + 1
""",
}
STATE = {
    "tensorflow": """
import tensorflow as tf
w = tf.Variable(tf.zeros((4, 1)))
count = tf.Variable(0)
""",
    "jax": "import jax.numpy as jnp\nw = jnp.zeros((4, 1))\ncount = jnp.asarray(0)",
}


@pytest.mark.parametrize(
    "framework", [pytest.param("tensorflow", marks=pytest.mark.full), "jax"], indirect=True
)
def test_newest_checkpoint_is_exported_without_workers(
    cluster: nbdist.Cluster, framework: str, tmp_path: Path
) -> None:
    strategy = "pjrt" if framework == "jax" else "mirrored"
    saved, out = tmp_path / "saved", tmp_path / "out"
    data = "import numpy as np\nx = np.ones((32, 4), 'float32')\ntrain = x, x[:, :1]"
    cluster.run(f"{data}\n{STATE[framework]}", strategy=strategy)
    options = {"data": "train", "batch": 8, "epochs": 2, "checkpoint": str(saved)}
    cluster.run(STEP[framework], strategy=strategy, **options)
    cluster.run("import numpy as np\nfound = np.asarray(w).tolist()")
    expected = cluster.pull(["found"])[0]["found"]
    export = "import nbdist\n" + "".join(
        f"nbdist.export({saved.name!r}, {str(out)!r} + {kind!r}, format={kind!r})\n"
        for kind in ("safetensors", "orbax")
    )
    modules = ("jax", "optax") if framework == "jax" else ("tensorflow", "keras")
    load = (
        f"\nimport contextlib, io, os, orbax.checkpoint as ocp\nos.chdir({str(tmp_path)!r})\n"
        "with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        f"{textwrap.indent(export, '    ')}\n"
        f"tree = ocp.StandardCheckpointer().restore({str(out)!r} + 'orbax/orbax')\n"
        "outcome = [tree['w'].tolist(), text.getvalue()]"
    )
    restored, output = references.plainly({"it": load}, *modules)["it"]
    lacks = "Not included: code, Python values, random generators of Python and NumPy\n"
    assert output.count(lacks) == 2
    found = load_file(tmp_path / "outsafetensors" / "model.safetensors")
    assert found["w"].tolist() == restored == expected
    assert found["count"].tolist() == 8


OWN_LAYERS = """
import keras

@keras.saving.register_keras_serializable("own")
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return 2.0 * x * self.scale

@keras.saving.register_keras_serializable("own")
def squared(x):
    return x * x

class Shift(keras.layers.Layer):
    def call(self, x):
        return x + 1.0

class OfJax(keras.layers.Layer):
    def call(self, x):
        import jax
        return jax.numpy.sin(x)

class OfHost(keras.layers.Layer):
    def call(self, x):
        import jax
        import numpy as np
        return jax.pure_callback(np.sin, x, x)

def of_function():
    class OfFunction(keras.layers.Layer):
        def call(self, x):
            return x

    return OfFunction()
"""
REFUSED = r"TensorFlow cannot save this model \(.*; as an XLA program: .*callback.*\): compute with"
OWN_MODEL = """
import keras, nbdist, numpy as np
from own_export_layers import OfHost, OfJax, Scale, Shift, of_function, squared

class OfCell(keras.layers.Layer):
    def call(self, x):
        return x

def model_of(layer):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, squared), Shift(), layer])

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")[:8]
model = model_of(Scale())
expected = model.predict(x, verbose=0).tolist()
"""


@pytest.mark.parametrize("framework", ["jax"], indirect=True)
def test_saved_model_of_keras_on_jax_has_layers_of_own_modules(
    cluster: nbdist.Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    """`--full` adds other layers and a time limit. Each export starts a process for TensorFlow."""
    is_full = pytestconfig.getoption("--full")
    module = tmp_path / "own_export_layers.py"
    module.write_text(OWN_LAYERS.replace("2.0", "3.0"))
    monkeypatch.syspath_prepend(tmp_path)
    cluster.run("import os, own_export_layers; os.environ['KERAS_BACKEND'] = 'jax'")
    module.write_text(OWN_LAYERS)
    cluster.run(OWN_MODEL, strategy="pjrt")
    out = str(tmp_path / "out")
    edit = f"open({str(module)!r}, 'w').write('the workers have an earlier text')"
    export = f"nbdist.export(model, {out!r}, format='savedmodel')"
    cluster.run(f"{edit}\n{export}", strategy="pjrt")
    program = LOAD_SAVED_MODEL.format(folder=out)
    served = references.plainly({"it": program}, "tensorflow", "keras")["it"]
    np.testing.assert_allclose(served, cluster.pull(["expected"])[0]["expected"], rtol=1e-5)
    module.write_text(OWN_LAYERS)
    others = (
        ("OfCell", "OfCell: defined in a cell)"),
        ("of_function", "Keras on TensorFlow cannot import its objects: "),
        ("OfJax", "sin"),
    )
    for layer, reason in others if is_full else ():
        of_layer = f"""
model = model_of({layer}())
expected = model.predict(x, verbose=0).tolist()
nbdist.export(model, {str(tmp_path / layer)!r}, format="savedmodel")
"""
        capsys.readouterr()
        cluster.run(of_layer, strategy="pjrt")
        message = capsys.readouterr().out
        assert "metrics. It is one XLA program for CPU, GPU and TPU (" in message
        assert reason in message
        program = LOAD_SAVED_MODEL.format(folder=str(tmp_path / layer))
        served = references.plainly({"it": program}, "tensorflow", "keras")["it"]
        expected = cluster.pull(["expected"])[0]["expected"]
        np.testing.assert_allclose(served, expected, rtol=1e-5)
    bad = f"nbdist.export(model_of(OfHost()), {str(tmp_path / 'bad')!r}, format='savedmodel')"
    if is_full:
        with pytest.raises(nbdist.CellError, match=REFUSED):
            cluster.run(bad, strategy="pjrt")
    late = f"""
from unittest import mock
from nbdist.worker.export import saved_model
with mock.patch.object(saved_model, "_CONVERT_S", 0.1):
    nbdist.export(model_of(Scale()), {str(tmp_path / "bad")!r}, format="savedmodel")
"""
    if is_full:
        refused = r"not save this model within 0\.1 s: export with"
        with pytest.raises(nbdist.CellError, match=refused):
            cluster.run(late, strategy="pjrt")
    assert not list(tmp_path.glob("*bad*"))


TOKENS = """
import jax, keras, nbdist, numpy as np

class Sine(keras.layers.Layer):
    def call(self, x):
        return jax.numpy.sin(x)

tokens = keras.Input((None,), dtype="int32", name="tokens")
extra = keras.Input((3,), name="extra")
x = keras.layers.Embedding(20, 8)(tokens)
x = keras.layers.MultiHeadAttention(2, 4)(x, x)
x = keras.layers.GlobalAveragePooling1D()(x)
out = Sine()(keras.layers.Dropout(0.2)(keras.layers.Dense(3)(x))) + extra
model = keras.Model({"tokens": tokens, "extra": extra}, {"out": out})
inputs = {"tokens": np.arange(10, dtype="int32").reshape(2, 5), "extra": np.ones((2, 3), "float32")}
expected = model.predict(inputs, verbose=0)["out"].tolist()
"""
LOAD_TOKENS = """
import numpy as np, tensorflow as tf
loaded = tf.saved_model.load({folder!r})
tokens, extra = np.arange(10, dtype="int32").reshape(2, 5), np.ones((2, 3), "float32")
outcome = [loaded.serve(dict(tokens=tokens, extra=extra))["out"].numpy().tolist()]
serve = loaded.signatures["serving_default"]
found = serve(tokens=tf.constant(tokens), extra=tf.constant(extra))
outcome.append(found["out"].numpy().tolist())
"""


@pytest.mark.parametrize("framework", ["jax"], indirect=True)
def test_saved_model_of_a_program_has_the_inputs_of_the_model(
    cluster: nbdist.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.run("import os; os.environ['KERAS_BACKEND'] = 'jax'")
    folder = str(tmp_path / "out")
    export = f"nbdist.export(model, {folder!r}, format='savedmodel')"
    cluster.run(f"{TOKENS}\n{export}", strategy="pjrt")
    message = capsys.readouterr().out
    assert "metrics. It is one XLA program for CPU, GPU and TPU (" in message
    assert "Sine: defined in a cell)" in message
    expected = cluster.pull(["expected"])[0]["expected"]
    program = LOAD_TOKENS.format(folder=folder)
    for served in references.plainly({"it": program}, "tensorflow", "keras")["it"]:
        np.testing.assert_allclose(served, expected, rtol=1e-5)


COUNTED = """
import jax, jax.numpy as jnp, nbdist
from nbdist.worker.jax.arrays import checkpoint
rows = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
params = [jax.device_put(jnp.full((1024, 16), i, "float32"), rows) for i in range(8)]
gathered, most = checkpoint.gathered, 0

def counting(array):
    global most
    whole = gathered(array)
    alive = [a for a in jax.live_arrays() if a.shape == whole.shape and a.is_fully_replicated]
    most = max(most, len(alive))
    return whole

checkpoint.gathered = counting
try:
    nbdist.export(params, {folder!r}, format={kind!r})
finally:
    checkpoint.gathered = gathered
most
"""


@pytest.mark.parametrize("framework", ["jax"], indirect=True)
@pytest.mark.parametrize("kind", [pytest.param("safetensors", marks=pytest.mark.full), "orbax"])
def test_devices_contain_one_whole_array_at_a_time(
    cluster: nbdist.Cluster, tmp_path: Path, kind: str
) -> None:
    cell = COUNTED.replace("{folder!r}", repr(str(tmp_path / "out"))).replace(
        "{kind!r}", repr(kind)
    )
    assert set(cluster.run(cell, strategy="pjrt").results.values()) == {"1"}


@pytest.mark.full  # repeats the test of the replicated model
@pytest.mark.parametrize("framework", ["jax"], indirect=True)
def test_sharded_keras_model_predicts_the_same_in_one_process(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    cluster.run("import os; os.environ['KERAS_BACKEND'] = 'jax'")
    model, fit = KERAS.split("model.fit")
    cluster.run(model, strategy="pjrt")
    layout = StepOptions(data="", planning=Planning(fixed={MODEL: 2, "zero": 3}))
    cluster.run(f"model.fit{fit}", strategy="pjrt", step=layout)
    cell = (
        "import nbdist\n"
        'for kind in ("keras", "weights", "savedmodel", "safetensors", "orbax"):\n'
        f"    nbdist.export(model, {str(tmp_path)!r} + f'/{{kind}}', format=kind)\n"
        "class Same(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return x\n"
        "own = keras.Sequential([model, Same()])\n"
        f"nbdist.export(own, {str(tmp_path / 'program')!r}, format='savedmodel')\n"
        'any("model" in str(v.value.sharding.spec) for v in model.variables)'
    )
    assert set(cluster.run(cell, strategy="pjrt").results.values()) == {"True"}
    expected = cluster.pull(["expected"])[0]["expected"]
    program = LOAD_KERAS.format(folder=str(tmp_path))
    found = references.plainly({"it": program}, "jax", "keras", KERAS_BACKEND="jax")["it"]
    np.testing.assert_allclose(found["keras"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["weights"], expected, rtol=1e-4, atol=1e-6)
    for kind in ("savedmodel", "program"):
        program = LOAD_SAVED_MODEL.format(folder=str(tmp_path / kind))
        served = references.plainly({"it": program}, "tensorflow", "keras")["it"]
        np.testing.assert_allclose(served, expected, rtol=1e-4, atol=1e-6)


MODULES = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from flax import nnx
layer = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
module = nnx.Sequential(
    nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(1)), nnx.relu,
    nnx.Linear(8, 2, rngs=nnx.Rngs(2)))
module(jnp.ones((3, 4)) * jnp.arange(4.0))
x = jnp.arange(8.0).reshape(2, 4) / 8
module.eval()
"""
LOAD_MODULES = """
layer = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, layer)
nnx.update(module, jax.tree.map(jnp.zeros_like, nnx.state(module)))
from safetensors.numpy import load_file
import orbax.checkpoint as ocp

def named(path):
    return ".".join(jax.tree_util.keystr([k], simple=True) for k in path)

outcome = {}
for kind in ("safetensors", "orbax"):
    found = {}
    for name in ("layer", "module"):
        folder = f"{FOLDER}/{name}-{kind}"
        if kind == "safetensors":
            found[name] = load_file(f"{folder}/model.safetensors")
        else:
            tree = ocp.StandardCheckpointer().restore(f"{folder}/orbax")
            found[name] = {named(p): leaf for p, leaf in jax.tree.leaves_with_path(tree)}
    arrays, rest = eqx.partition(layer, eqx.is_array)
    arrays = jax.tree.map_with_path(lambda p, a: jnp.asarray(found["layer"][named(p)]), arrays)
    state = nnx.state(module)
    flat = [(path, v.replace(found["module"][".".join(map(str, path))]))
            for path, v in nnx.to_flat_state(state)]
    nnx.update(module, nnx.from_flat_state(flat))
    outcome[kind] = [jax.vmap(eqx.combine(arrays, rest))(x).tolist(), module(x).tolist()]
"""


@pytest.mark.parametrize("framework", ["jax"], indirect=True)
def test_modules_predict_the_same_in_one_process(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    place = (
        "import nbdist\n"
        "rows = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))\n"
        "split = lambda a: jax.device_put(a, rows) if a.shape[0] % 4 == 0 else a\n"
        "expected = [jax.vmap(layer)(x).tolist(), module(x).tolist()]\n"
        "layer = jax.tree.map(lambda a: split(a) if eqx.is_array(a) else a, layer)\n"
        "nnx.update(module, jax.tree.map(split, nnx.state(module)))\n"
        "for name in ('layer', 'module'):\n"
        "    for kind in ('safetensors', 'orbax'):\n"
        f"        folder = f'{tmp_path}/{{name}}-{{kind}}'\n"
        "        nbdist.export(globals()[name], folder, format=kind)\n"
        "layer.layers[0].weight.is_fully_addressable"
    )
    assert set(cluster.run(MODULES + place, strategy="pjrt").results.values()) == {"False"}
    expected = cluster.pull(["expected"])[0]["expected"]
    program = f"FOLDER = {str(tmp_path)!r}\n{MODULES}{LOAD_MODULES}"
    found = references.plainly({"it": program}, "jax", "optax")["it"]
    for kind in ("safetensors", "orbax"):
        for one, other in zip(found[kind], expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
