"""Modules beside the notebook: workers use their current text without a restart."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.errors import CellError, UsageError
from nbdist.records import Saving, StepOptions
from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Write = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(2, framework="jax") as cluster:
        yield cluster


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file beside the notebook. Workers have another folder."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(place: str, text: str) -> Path:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def value(cluster: nbdist.Cluster, cell: str) -> str:
    """Return the value of a cell, which is equal on all ranks."""
    (found,) = set(cluster.run(cell, strategy="pjrt").results.values())
    return found


def shown(caught: pytest.ExceptionInfo[CellError]) -> str:
    """Return the traceback of a cell without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(caught.value.traceback))


def test_edited_functions_and_classes_are_used_by_the_next_cell(
    cluster: nbdist.Cluster, write: Write
) -> None:
    before = """
        SCALE = 2
        def double(x):
            return SCALE * x
        class Net:
            def __init__(self):
                self.weight = 10
            def size(self):
                return self.weight
            """
    write("om_plain.py", before)
    cell = (
        "import om_plain\nfrom om_plain import double, Net, SCALE\nnet = Net()\n(double(1), SCALE)"
    )
    assert value(cluster, cell) == "(2, 2)"
    edited = before.replace("= 2", "= 3").replace("return self.weight", "return 100 * self.weight")
    write("om_plain.py", edited + "def extra(self):\n                return 'new'\n")
    cell = "(double(1), om_plain.double(1), SCALE, net.size(), net.extra(), isinstance(net, Net))"
    assert value(cluster, cell) == "(3, 3, 3, 1000, 'new', True)"
    assert value(cluster, "Net is om_plain.Net") == "True"


@pytest.mark.full  # tests/worker/own_modules/test_reload.py covers it
def test_edited_method_may_use_super(cluster: nbdist.Cluster, write: Write) -> None:
    text = """
        class Base:
            def size(self):
                return 1
        class Net(Base):
            def size(self):
                return 5
        def make():
            def inner():
                return 1
            return inner
        adder = make()
    """
    write("om_super.py", text)
    cell = "import om_super\nnet = om_super.Net()\nclass Mine(om_super.Net): pass\nmine = Mine()\n"
    assert value(cluster, cell + "net.size()") == "5"
    edited = text.replace("return 5", "return super().size() + 6")
    edited = edited.replace(
        "def inner():\n                return 1",
        "y = 2\n            def inner():\n                return y",
    )
    write("om_super.py", edited)
    assert value(cluster, "(net.size(), mine.size(), om_super.adder())") == "(7, 7, 2)"


def test_edited_compiled_function_is_used(cluster: nbdist.Cluster, write: Write) -> None:
    text = """
        import jax
        def scaled(x):
            return 2.0 * x
        @jax.jit
        def f(x):
            return scaled(x)
    """
    write("om_jitted.py", text)
    cell = "import jax\nfrom om_jitted import f, scaled\nown = jax.jit(lambda x: scaled(x))\n"
    assert value(cluster, cell + "(float(f(1.0)), float(own(1.0)))") == "(2.0, 2.0)"
    write("om_jitted.py", text.replace("2.0", "5.0"))
    assert value(cluster, "(float(f(1.0)), float(own(1.0)))") == "(5.0, 5.0)"


def test_packages_have_submodules_relative_imports_and_data(
    cluster: nbdist.Cluster, write: Write
) -> None:
    write("om_pack/__init__.py", "from .parts.core import total\nfrom . import parts\n")
    write("om_pack/parts/__init__.py", "")
    write(
        "om_pack/parts/core.py",
        "from ..consts import BASE\nimport om_beside\n"
        "def total():\n    return BASE + om_beside.ONE\n",
    )
    write("om_pack/consts.py", "BASE = 10\n")
    write("om_beside.py", "ONE = 1\n")
    write("om_pack/table.txt", "first")
    cell = (
        "import om_pack, pathlib\n"
        "table = pathlib.Path(om_pack.__file__).parent / 'table.txt'\n"
        "(om_pack.total(), table.read_text())"
    )
    assert value(cluster, cell) == "(11, 'first')"
    write("om_pack/consts.py", "BASE = 20\n")
    write("om_beside.py", "ONE = 2\n")
    write("om_pack/table.txt", "second")
    assert value(cluster, "(om_pack.total(), table.read_text())") == "(22, 'second')"
    write("om_pack/late.py", "LATE = 5\n")
    assert value(cluster, "from om_pack.late import LATE\nLATE") == "5"


def test_failed_reload_fails_the_cell_and_keeps_the_module(
    cluster: nbdist.Cluster, write: Write, bounded: None
) -> None:
    path = write("om_broken.py", "def f():\n    return 1\n")
    assert value(cluster, "import om_broken\nom_broken.f()") == "1"
    write("om_broken.py", "def f():\n    return (\n")
    with pytest.raises(CellError) as caught:
        cluster.run("om_broken.f()")
    assert caught.value.ename == "SyntaxError"
    assert f'File "{path}", line 2' in shown(caught)
    run = cluster.run("om_broken.f()")
    assert set(run.results.values()) == {"1"}
    write("om_broken.py", "def f():\n    return 2\nraise ValueError('at import')\n")
    with pytest.raises(CellError) as caught:
        cluster.run("om_broken.f()")
    assert caught.value.ename == "ValueError"
    assert f"{path}:3" in shown(caught)
    assert value(cluster, "om_broken.f()") == "1"
    write("om_broken.py", "def f():\n    return 3\n")
    assert value(cluster, "om_broken.f()") == "3"


def test_tracebacks_and_sources_are_those_of_the_file(
    cluster: nbdist.Cluster, write: Write
) -> None:
    path = write("om_source.py", "def f():\n    raise KeyError('x')\nclass A:\n    a = 1\n")
    cell = "import om_source, inspect\nfrom om_source import f\n"
    source = "(inspect.getsource(f), inspect.getsource(om_source.A))"
    assert value(cluster, cell + source) == str(
        ("def f():\n    raise KeyError('x')\n", "class A:\n    a = 1\n")
    )
    with pytest.raises(CellError, match="KeyError") as caught:
        cluster.run("f()")
    assert f"{path}:2" in shown(caught)
    assert "raise KeyError('x')" in shown(caught)


def test_deleted_module_stays_loaded_until_a_restart(
    cluster: nbdist.Cluster, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("om_deleted.py", "ONE = 1\n")
    assert value(cluster, "import om_deleted\nom_deleted.ONE") == "1"
    path.unlink()
    assert value(cluster, "import om_deleted\nom_deleted.ONE") == "1"
    message = "the files of your module `om_deleted` are gone: workers keep it loaded until"
    assert message in capsys.readouterr().err
    assert value(cluster, "om_deleted.ONE") == "1"
    assert message not in capsys.readouterr().err
    cluster.restart()
    with pytest.raises(CellError, match="No module named 'om_deleted'"):
        cluster.run("import om_deleted", strategy="pjrt")
    write("om_deleted.py", "ONE = 2\n")
    assert value(cluster, "import om_deleted\nom_deleted.ONE") == "2"


def test_pushed_object_brings_its_module(cluster: nbdist.Cluster, write: Write) -> None:
    text = """
        from om_config import RATE
        class Config:
            def __init__(self):
                self.size = 3
            def total(self):
                return self.size * RATE
    """
    write("om_config.py", "RATE = 2\n")
    write("om_pushed.py", text)
    om_pushed = importlib.import_module("om_pushed")
    cluster.push(
        {"config": om_pushed.Config(), "totals": lambda n: [om_pushed.Config().total()] * n}
    )
    assert value(cluster, "(config.total(), totals(2))") == "(6, [6, 6])"
    write("om_config.py", "RATE = 5\n")
    write("om_pushed.py", f"{textwrap.dedent(text)}class Other: pass\n")
    importlib.reload(om_pushed)
    cluster.push({"other": om_pushed.Other()})
    assert value(cluster, "(type(other).__name__, config.total())") == "('Other', 15)"


def test_running_cell_keeps_its_text(cluster: nbdist.Cluster, write: Write) -> None:
    path = write("om_running.py", "def f():\n    return 1\n")
    new = "def f():\n    return 22\n"
    edit = f"import pathlib\nif rank == 0:\n    pathlib.Path({str(path)!r}).write_text({new!r})\n"
    assert (
        value(cluster, edit + "import time; time.sleep(0.3)\nimport om_running\nom_running.f()")
        == "1"
    )
    assert value(cluster, "om_running.f()") == "22"


def test_files_of_different_disks_are_refused(
    cluster: nbdist.Cluster, tmp_path: Path, bounded: None
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "om_disk.py").write_text(f"value = {rank}")
    path = f"import sys\nsys.path.insert(0, f'{tmp_path}/{{rank}}')\n"
    with pytest.raises(CellError, match="`om_disk` of rank 1 differs from that of rank 0"):
        cluster.run(path + "import om_disk\nom_disk.value")
    cluster.restart()
    (tmp_path / "1" / "om_disk.py").write_text("value = 0  # of another size than the bytecode's")
    (tmp_path / "0" / "om_disk.py").write_text("value = 0  # of another size than the bytecode's")
    assert value(cluster, path + "import om_disk\nom_disk.value") == "0"


def test_module_that_no_disk_has_is_not_found(cluster: nbdist.Cluster) -> None:
    with pytest.raises(CellError, match="No module named 'om_nowhere'"):
        cluster.run("import om_nowhere")


def test_recovered_run_continues_with_the_text_that_it_began_with(
    cluster: nbdist.Cluster, write: Write, tmp_path: Path
) -> None:
    text = """
        import os, pathlib, signal
        SCALE = 1.0
        def scaled(batch, rank, mark, source):
            if rank == 1 and not os.path.exists(mark):
                pathlib.Path(source).write_text("def scaled(*_): return 0 / 0")
                pathlib.Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return SCALE * batch
    """
    path = write("om_recover.py", text)
    mark = tmp_path / "mark"
    cluster.run(
        "import numpy as np, jax.numpy as jnp\nimport om_recover\nw = jnp.zeros(3)\n"
        "def batches():\n    for i in range(30):\n        yield om_recover.scaled("
        f"np.ones((4, 3), 'float32'), rank if i == 14 else 0, {str(mark)!r}, {str(path)!r})\n"
    )
    run = cluster.run(
        "w = w + batch.mean(0)\nloss = w.sum()",
        step=StepOptions(data="batches"),
        saving=Saving(folder=str(tmp_path / "saved"), every_steps=5),
    )
    assert len(run.recoveries) == 1
    assert mark.exists()
    assert list(run.loss) == [3.0 * (step + 1) for step in range(30)]
    with pytest.raises(CellError, match="ZeroDivisionError"):
        cluster.run("om_recover.scaled()")


def test_module_with_the_name_of_another_is_refused(cluster: nbdist.Cluster, write: Write) -> None:
    path = write("colorsys.py", "")
    with pytest.raises(UsageError, match=f"{path} has the name of Python's standard library"):
        cluster.run("import colorsys")


JAX_LOOP = """
    import jax, jax.numpy as jnp
    def loss_fn(w, x):
        return jnp.mean((x @ w - 1.0) ** 2) * 1.0
    @jax.jit
    def train_step(w, x):
        loss, grad = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * grad, loss
    def train(w, data):
        losses = []
        for x in data:
            w, loss = train_step(w, x)
            losses.append(float(loss))
        return w, losses
"""
JAX_SETUP = """
import numpy as np, jax.numpy as jnp, om_loop
from om_loop import train_step, train
data = [np.random.default_rng(i).normal(size=(8, 3)).astype("float32") for i in range(4)]
"""
JAX_CELLS = (
    """
w, losses = jnp.zeros(3), []
for x in data:
    w, loss = train_step(w, x)
    losses.append(float(loss))
losses""",
    "w, losses = train(jnp.zeros(3), data)\nlosses",
)


def test_training_loops_of_jax_use_the_edited_function(
    cluster: nbdist.Cluster, write: Write
) -> None:
    write("om_loop.py", JAX_LOOP)
    cluster.run(JAX_SETUP)
    before = [ast.literal_eval(value(cluster, cell)) for cell in JAX_CELLS]
    write("om_loop.py", JAX_LOOP.replace("* 1.0", "* 3.0"))
    after = [ast.literal_eval(value(cluster, cell)) for cell in JAX_CELLS]
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert after[0][0] == pytest.approx(3 * before[0][0], rel=1e-6)
    assert after[0][1] != pytest.approx(3 * before[0][1], rel=1e-3)  # the gradient is new too


TENSORFLOW_LOOP = """
    import keras, tensorflow as tf
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        def call(self, x):
            return 1.0 * self.dense(x)
    def train_step(model, optimizer, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss
    compiled = tf.function(train_step)
"""
TENSORFLOW_SETUP = """
import keras, numpy as np, om_keras
from om_keras import Net, train_step, compiled
data = [np.ones((8, 3), "float32") for i in range(2)]
model = Net()
model(data[0])
optimizer = keras.optimizers.SGD(0.0)
"""
TENSORFLOW_CELL = """
losses = []
for x in data:
    losses.append(float({}(model, optimizer, x)))
[*losses, float(model(data[0])[0, 0]), isinstance(model, Net)]
"""


FIT = "model.fit(data[0], np.ones((8, 1)), batch_size=8, verbose=0).history['loss']"


def test_training_loops_of_tensorflow_use_the_edited_model(write: Write) -> None:
    write("om_keras.py", TENSORFLOW_LOOP)
    edited = TENSORFLOW_LOOP.replace("1.0 * self", "2.0 * self").replace(
        "tf.reduce", "10 * tf.reduce"
    )
    with clusters.cluster(2, framework="tensorflow") as cluster:

        def losses(step: str) -> list[float]:
            (found,) = set(cluster.run(TENSORFLOW_CELL.format(step)).results.values())
            return list(ast.literal_eval(found))

        cluster.run(TENSORFLOW_SETUP, strategy="mirrored")
        assert losses("train_step") == losses("compiled") == [4.0, 4.0, 3.0, True]
        fit = "model.compile(optimizer, lambda y, p: (y - p) ** 2)\n" + FIT
        assert cluster.run(fit).results[0] == "[4.0]"
        write("om_keras.py", edited)
        assert cluster.run(FIT).results[0] == "[25.0]"
        assert losses("train_step") == losses("compiled") == [250.0, 250.0, 6.0, True]


@pytest.mark.full  # the same under mirrored
def test_functions_of_tensorflow_outside_of_loops_use_edited_functions(write: Write) -> None:
    text = """
        import tensorflow as tf
        def scaled(x):
            return 2.0 * x
        class Layer(tf.Module):
            count = None
            @tf.function
            def __call__(self, x):
                if self.count is None:
                    self.count = tf.Variable(0.0)
                return scaled(x) + self.count.assign_add(1.0)
    """
    write("om_traced.py", text)
    cell = """
import tensorflow as tf
from om_traced import Layer, scaled
layer, own = Layer(), tf.function(lambda x: scaled(x))
"""
    call = "[float(layer(tf.constant(10.0))), float(own(tf.constant(10.0)))]"
    with clusters.cluster(2, framework="tensorflow") as cluster:
        assert set(cluster.run(cell + call).results.values()) == {"[21.0, 20.0]"}
        write("om_traced.py", text.replace("2.0 * x", "5.0 * x"))
        assert set(cluster.run(call).results.values()) == {"[52.0, 50.0]"}


OWNER = """
import os, nbdist
nbdist.Cluster(2, framework="none").run("import om_attached")
os._exit(0)
"""


@pytest.mark.full  # tests/execution/test_module_sync.py covers it
@pytest.mark.usefixtures("own_folders")
def test_attached_cluster_has_the_modules(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("om_attached.py", "value = 1")
    python_path = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run(
        [sys.executable, "-c", OWNER], env={**os.environ, "PYTHONPATH": python_path}, check=True
    )
    write("om_attached.py", "value = 22")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
        attached = nbdist.attach()  # from a notebook that does not find the module
        attached.restart()
        run = attached.run("import om_attached\nom_attached.value")
        assert set(run.results.values()) == {"1"}
    assert set(attached.run("om_attached.value").results.values()) == {"22"}
    attached.stop()
