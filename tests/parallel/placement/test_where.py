"""The result of `where` is a sequence of rows that compares with places."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nbdist
from nbdist.errors import UsageError


def test_where_compares_with_any_object() -> None:
    x = nbdist.place(np.ones((8, 8)), "cpu:1")
    assert nbdist.where(x) == nbdist.where(nbdist.place(np.zeros((8, 8)), "cpu:1"))
    assert nbdist.where(x) != nbdist.where(nbdist.place(np.zeros((8, 8)), "cpu:2"))
    assert nbdist.where(x) != 3.5
    for other in (None, object(), 7, [1], (1, 2), {"a": "cpu:1"}, np.ones(3), jnp.ones(3), x):
        assert (nbdist.where(x) == other) is False
        assert (other == nbdist.where(x)) is False
    with pytest.raises(UsageError, match="did you mean 'cpu:1'"):
        _ = nbdist.where(x) == "cpv:1"


def test_rows_are_found_by_position_and_by_path() -> None:
    mesh = nbdist.meshes({"data": 4, "model": 2})
    tree = {"w": np.ones((8, 6), np.float32), "host": np.ones(3)}
    found = nbdist.where(tree | {"w": nbdist.place(tree["w"], ("data", "model"), mesh=mesh)})
    assert [row.path for row in found] == ["['host']", "['w']"]
    assert len(found) == 2
    row = found["['w']"]
    assert row == found[1] == found[-1] == found[1:][0]
    assert (row.shape, row.shard_shape, row.spec) == ((8, 6), (2, 3), "P('data', 'model')")
    assert row.devices == tuple(f"cpu:{number}" for number in range(8))
    assert dict(found[0])["kind"] == "host"
    assert dict(found)["['w']"] is row
    with pytest.raises(KeyError, match=r"^'w' is not a key of these 2 rows: "):
        _ = found["w"]
    with pytest.raises(KeyError, match="is no field: fields are path, shape"):
        _ = row["size"]


def test_rows_become_a_data_frame() -> None:
    devices = jax.devices()[:2]
    tree = [
        nbdist.place(np.ones((2, n), np.float32), d) for n, d in zip((3, 5), devices, strict=True)
    ]
    frame = nbdist.where(tree).to_dataframe()
    assert frame["nbytes"].tolist() == [24, 40]
    assert frame.explode("devices").groupby("devices")["nbytes"].sum().to_dict() == {
        "cpu:0": 24,
        "cpu:1": 40,
    }


def test_axes_of_a_mesh_are_rows() -> None:
    found = nbdist.where(nbdist.meshes({"data": 4, "model": 2}))
    assert [(row.axis, row.size) for row in found] == [("data", 4), ("model", 2)]
    assert found["model"].links.startswith("inside each process")
    assert found == nbdist.where(nbdist.meshes({"data": 4, "model": 2}))
    assert found != nbdist.where(nbdist.meshes({"data": 2, "model": 4}))
    assert found.to_dataframe()["size"].tolist() == [4, 2]
    assert list(dict(found)) == list(found.axes)


def test_devices_are_rows() -> None:
    seen = nbdist.devices()
    assert [device.name for device in seen] == [f"cpu:{number}" for number in range(8)]
    assert seen["cpu:3"] is seen[3]
    assert list(dict(seen)) == [device.name for device in seen]
    assert seen.to_dataframe()["name"].tolist() == list(dict(seen))
    assert dict(seen[0])["platform"] == "cpu"


@pytest.mark.processes
def test_only_to_dataframe_imports_pandas() -> None:
    cell = """
import sys, nbdist
seen = nbdist.devices()
runs = nbdist.runs()
repr(seen), seen.html(), list(seen), dict(seen), repr(runs)
assert "pandas" not in sys.modules
sys.modules["pandas"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pandas" else found(name, *rest)
for table in (seen, runs):
    try:
        table.to_dataframe()
    except nbdist.UsageError as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", cell], capture_output=True, text=True, check=True, timeout=120
    )
    assert ended.stdout == "to_dataframe needs pandas: run %pip install pandas\n" * 2
