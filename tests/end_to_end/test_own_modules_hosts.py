"""Modules beside the notebook on hosts over ssh that do not share its disk."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.errors import CellError, TransferError, UsageError
from nbdist.records import Saving, StepOptions
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests import netns

    Write = Callable[[str, str], Path]

pytestmark = [needs_hosts, pytest.mark.usefixtures("own_folders")]

FILES = {
    "oh_pack/__init__.py": "from .core import total\n",
    "oh_pack/core.py": """
        import pathlib
        from . import consts
        import oh_beside
        def total():
            table = pathlib.Path(__file__).parent / "data" / "table.txt"
            return consts.BASE + oh_beside.ONE, table.read_text()
        def fails():
            raise KeyError("x")
    """,
    "oh_pack/consts.py": "BASE = 10\n",
    "oh_pack/data/table.txt": "first",
    "oh_beside.py": "ONE = 1\n",
}


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(2) as network:
        yield network


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file beside the notebook."""
    folder = tmp_path / "notebook"
    monkeypatch.syspath_prepend(str(folder))

    def write(place: str, text: str) -> Path:
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    for place, text in FILES.items():
        write(place, text)
    return write


@pytest.fixture
def apart(network: Hosts, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Hosts with disks of their own, on which the notebook's folder is empty."""
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    for host in network.each:
        host.power_off()
        host.power_on()
        host.own_disk(tmp_path / "notebook")
    return network


def values(cluster: nbdist.Cluster, cell: str) -> set[str]:
    return set(cluster.run(cell).results.values())


def folders(cluster: nbdist.Cluster) -> list[Path]:
    """Return the folder with the modules on each host. This machine sees the hosts' /tmp."""
    locations = cluster._worker_group.engines.fleet.locations
    return [Path(locations[key].folder, "modules") for key in sorted(locations)]


def stored_files(folder: Path) -> int:
    return sum(not path.is_dir() for path in folder.iterdir())


def test_hosts_without_the_files_use_them_and_their_edits(
    apart: Hosts, write: Write, tmp_path: Path
) -> None:
    cell = "import oh_pack, os\n"
    with nbdist.Cluster(hosts=[*apart.names, "localhost"], framework="none") as cluster:
        there = f"(os.path.exists({str(tmp_path / 'notebook/oh_beside.py')!r}), oh_pack.total())"
        run = cluster.run(cell + there)
        assert run.results[0] == run.results[1] == "(False, (11, 'first'))"
        assert run.results[2] == "(True, (11, 'first'))"
        assert [stored_files(folder) for folder in folders(cluster)] == [5, 5]
        write("oh_pack/consts.py", "BASE = 20\n")
        write("oh_pack/data/table.txt", "second")
        assert values(cluster, "oh_pack.total()") == {"(21, 'second')"}
        assert [stored_files(folder) for folder in folders(cluster)] == [5, 5]
        with pytest.raises(CellError) as caught:
            cluster.run("oh_pack.core.fails()")
        shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(caught.value.traceback))
        assert str(tmp_path / "notebook/oh_pack/core.py") in shown
        assert 'raise KeyError("x")' in shown
        cluster.restart()
        assert values(cluster, cell + "oh_pack.total()") == {"(21, 'second')"}
        cluster.resize([*apart.names])
        assert values(cluster, cell + "oh_pack.total()") == {"(21, 'second')"}
        there = folders(cluster)
    assert not any(map(os.path.exists, there))


def test_hosts_that_share_the_disk_use_the_files_of_the_notebook(
    network: Hosts, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
    path = write("oh_beside.py", "ONE = 1\n")
    with nbdist.Cluster(hosts=network.names, framework="none") as cluster:
        assert values(cluster, "import oh_beside\noh_beside.__file__") == {repr(str(path))}
        assert not any(map(os.path.exists, folders(cluster)))
        write("oh_beside.py", "ONE = 5\n")
        assert values(cluster, "oh_beside.ONE") == {"5"}


def test_no_space_on_a_host_is_reported_with_its_name(apart: Hosts, write: Write) -> None:
    write("oh_pack/data/large.bin", "x" * 1_000_000)
    with nbdist.Cluster(hosts=apart.names, framework="none") as cluster:
        full = folders(cluster)[1]
        full.mkdir()
        mount_small_disk(apart.each[1], full)
        with pytest.raises(TransferError) as caught:
            cluster.run("import oh_pack")
        (line,) = [line for line in str(caught.value).splitlines() if str(full) in line]
        assert line == f"  {apart.names[1]}: {full}: No space left on device"
        (Path(write("oh_pack/data/large.bin", ""))).unlink()
        assert values(cluster, "import oh_pack\noh_pack.total()") == {"(11, 'first')"}


def mount_small_disk(host: netns.Host, folder: Path) -> None:
    """Mount a disk with 256 KiB on a host."""
    first = next(p for p in host.processes() if "sshd" in p.name())
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    subprocess.run(["nsenter", "-t", str(first.pid), "-m", *mount], check=True)


def test_large_packages_and_excluded_files(apart: Hosts, write: Write) -> None:
    large = write("oh_pack/data/large.bin", "")
    with large.open("wb") as file:
        file.truncate(65 << 20)
    hosts, message = apart.names, f"move the largest, {large} \\(65 MiB\\), out of"
    with (
        nbdist.Cluster(hosts=hosts, framework="none") as cluster,
        pytest.raises(UsageError, match=message),
    ):
        cluster.run("import oh_pack")
    sync = nbdist.Sync(exclude=("*.bin",))
    with nbdist.Cluster(hosts=hosts, framework="none", sync=sync) as cluster:
        assert values(cluster, "import oh_pack\noh_pack.total()") == {"(11, 'first')"}


def test_further_folders_are_sent_whole(apart: Hosts, write: Write) -> None:
    plugin = write("plugins/oh_plugin.py", "NAME = 'plugin'\n")
    sync = nbdist.Sync(folders=(str(plugin.parent),))
    cell = "import importlib\nimportlib.import_module('oh_plug' + 'in').NAME"
    with nbdist.Cluster(hosts=apart.names, framework="none", sync=sync) as cluster:
        assert values(cluster, cell) == {"'plugin'"}


@pytest.mark.full  # tests/execution/test_module_sync.py covers it
def test_nothing_is_sent_without_sync(apart: Hosts, write: Write) -> None:
    with nbdist.Cluster(hosts=apart.names, framework="none", sync=False) as cluster:
        with pytest.raises(CellError, match="No module named 'oh_pack'"):
            cluster.run("import oh_pack")
        assert not any(map(os.path.exists, folders(cluster)))


@pytest.mark.full  # test_own_modules.py covers a recovery
def test_lost_rank_is_replaced_with_the_modules(apart: Hosts, write: Write, tmp_path: Path) -> None:
    text = """
        import os, pathlib, signal
        def scaled(batch, rank, mark):
            if rank == 1 and not os.path.exists(mark):
                pathlib.Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return batch
    """
    write("oh_recover.py", text)
    with nbdist.Cluster(hosts=apart.names, framework="jax") as cluster:
        cluster.run(
            "import numpy as np, jax.numpy as jnp\nimport oh_recover\nw = jnp.zeros(3)\n"
            "def batches():\n    for i in range(30):\n        yield oh_recover.scaled("
            f"np.ones((4, 3), 'float32'), rank if i == 14 else 0, {str(tmp_path / 'mark')!r})\n"
        )
        run = cluster.run(
            "w = w + batch.mean(0)\nloss = w.sum()",
            step=StepOptions(data="batches"),
            saving=Saving(folder=str(tmp_path / "saved"), every_steps=5),
        )
    assert len(run.recoveries) == 1
    assert list(run.loss) == [3.0 * (step + 1) for step in range(30)]


@pytest.mark.full  # a quarter of a minute
def test_training_loop_of_tensorflow_uses_an_edited_model(apart: Hosts, write: Write) -> None:
    text = """
        import keras, tensorflow as tf
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
            def call(self, x):
                return 1.0 * self.dense(x)
        @tf.function
        def train_step(model, optimizer, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - 1.0) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            return loss
    """
    loop = (
        "losses = []\nfor x in data:\n    losses.append(float(train_step(model, optimizer, x)))\n"
    )
    write("oh_keras.py", text)
    with nbdist.Cluster(hosts=apart.names, framework="tensorflow") as cluster:
        cluster.run(
            "import keras, numpy as np\nfrom oh_keras import Net, train_step\n"
            "data = [np.ones((8, 3), 'float32') for i in range(2)]\nmodel = Net()\n"
            "model(data[0])\noptimizer = keras.optimizers.SGD(0.0)\n"
        )
        assert values(cluster, f"{loop}losses") == {"[4.0, 4.0]"}
        write("oh_keras.py", text.replace("1.0 * self", "2.0 * self"))
        assert values(cluster, f"{loop}losses") == {"[25.0, 25.0]"}
