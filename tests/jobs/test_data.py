"""Data of the notebook beside a program: the program's code restores each object exactly."""

from __future__ import annotations

import importlib
import math
import random
import string
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from nbdist.errors import UsageError
from nbdist.jobs import data as job_data
from nbdist.jobs import pushed_objects
from nbdist.jobs.data import JobData

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def written(
    folder: Path, objects: Mapping[str, object]
) -> tuple[list[str], dict[str, Any], JobData]:
    """Export objects as a push has them. Return the code, what it restores, and the data."""
    modules: dict[str, Any] = {}
    data = JobData("data", "args.data", lambda name: modules.setdefault(name, name))
    lines = data.assignments(pushed_objects.read(cloudpickle.dumps(dict(objects))))
    data.write(folder)
    scope: dict[str, Any] = {name: importlib.import_module(name) for name in modules}
    scope["args"] = SimpleNamespace(data=folder)
    if data.arrays:
        scope["data"] = np.load(folder / job_data.FILE)
    exec("\n".join(lines), scope)
    return lines, {name: scope[name] for name in objects}, data


def assert_equal(found: Any, value: Any) -> None:
    """Compare types and values, also of parts."""
    assert type(found) is type(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        assert found.dtype == object
        assert found.shape == value.shape
        assert_equal(found.tolist(), value.tolist())
    elif isinstance(value, np.ndarray | np.generic):
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value, strict=True)
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            assert_equal(one, other)
    elif isinstance(value, dict):
        assert_equal(list(found.items()), list(value.items()))
    elif isinstance(value, float) and math.isnan(value):
        assert math.isnan(found)
    else:
        assert found == value


SHORT = {
    "classes": {0: "cat", 1: "dog"},
    "complex": [complex(float("inf"), 1), complex(0, float("-inf")), -1 + 0.5j],
    "integers": [2**2000, -(2**2000), 2**64],
    "flags": [True, None, 1.5, float("inf"), 2j, b"x", ("a",), ()],
    "nested": {"rate": {"warmup": [0.1, float("nan")]}, (1, "a"): {}},
    "names": np.array(["a", None, "ccc\0"], dtype=object),
    "table": np.array([["a", "b"], ["c", "d"]], dtype=object),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_values_are_code(tmp_path: Path, name: str) -> None:
    _, found, data = written(tmp_path, {name: SHORT[name]})
    assert_equal(found[name], SHORT[name])
    assert not data


def words(count: int) -> list[str]:
    source = random.Random(1)
    return ["".join(source.choices(string.ascii_letters + "äß中\n\r\0", k=8)) for _ in range(count)]


LONG = {
    "floats": [0.1, float("nan"), -0.0] * 1000,
    "numbers": list(range(5000)),
    "large": [2**70, 1] * 1000,
    "mixed": [1, 2.5, None, True, "text"] * 1000,
    "ragged": [[1, 2], [3], []] * 1000,
    "vocabulary": {word: i for i, word in enumerate(words(3000))},
    "id_to_word": dict(enumerate(words(3000))),
    "pairs": [(word, i, float(i)) for i, word in enumerate(words(3000))],
    "shape": tuple(range(3000)),
    "corpus": "\r\n".join(words(1000)),
    "surrogates": "\ud800" * 3000,
    "blob": bytes(range(256)) * 100,
    "images": [bytes([i % 256]) * 9 + b"\0" for i in range(2000)],
    "texts": np.array(words(3000), dtype=object).reshape(30, 100),
    "arrays": [np.arange(i % 5, dtype="int32") for i in range(1000)],
    "of_words": {word: np.full(2, i) for i, word in enumerate(words(1000))},
}


@pytest.mark.parametrize("name", LONG)
def test_long_values_are_read_from_files(tmp_path: Path, name: str) -> None:
    lines, found, data = written(tmp_path, {name: LONG[name]})
    assert_equal(found[name], LONG[name])
    assert len("\n".join(lines)) < 300
    assert data
    assert data.size_bytes > 0


ARRAYS = {
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "float8": ml_dtypes.float8_e4m3fn(1.5),
    "dates": np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
    "structured": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")]),
    "texts": np.array(["ä", "bc"]),
    "scalar": np.float32(0.1),
    "zero": np.array(3.0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_keep_their_types(tmp_path: Path, name: str) -> None:
    assert_equal(written(tmp_path, {name: ARRAYS[name]})[1][name], ARRAYS[name])


def test_arrays_of_jax_keep_their_types(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    objects = {
        "x": jnp.arange(6.0).reshape(2, 3),
        "half": {"w": jnp.ones(2, jnp.bfloat16)},
        "weak": jnp.full((2,), 0.1),
        "rate": jnp.asarray(2),
    }
    lines, found, _ = written(tmp_path, objects)
    assert lines[2] == "weak = jax.numpy.full((2,), 0.10000000149011612)"
    found["half"], objects["half"] = found["half"]["w"], objects["half"]["w"]
    for name, value in objects.items():
        assert isinstance(found[name], jax.Array)
        assert (found[name].aval, found[name].weak_type) == (value.aval, value.weak_type)
        assert found[name].tolist() == value.tolist()


def test_weak_array_that_no_code_creates_is_refused(tmp_path: Path) -> None:
    import jax.numpy as jnp

    weak = jnp.concatenate([jnp.full((1,), 0.1), jnp.full((1,), 0.2)])
    assert weak.weak_type
    with pytest.raises(UsageError, match=r"export `x` \(jax.Array\): its type is weak"):
        written(tmp_path, {"x": weak})


FRAME = pd.DataFrame(
    {
        "price": np.array([1.5, np.nan], "float32"),
        "city": ["Bonn", None],
        "kind": pd.Categorical(["a", "b"], categories=["b", "a"], ordered=True),
        "when": pd.to_datetime(["2026-01-01", "2026-01-02"]).tz_localize("Europe/Berlin"),
        "count": pd.array([1, None], dtype="Int64"),
    }
)


@pytest.mark.parametrize(
    "index",
    [
        pd.RangeIndex(2),
        pd.Index(["r", "s"], name="id"),
        pd.MultiIndex.from_tuples([(1, "a"), (2, "b")], names=["i", None]),
    ],
    ids=["range", "texts", "levels"],
)
def test_frames_keep_types_and_index(tmp_path: Path, index: pd.Index) -> None:
    frame = FRAME.set_index(index)
    frame.attrs["unit"] = "EUR"
    numbers = pd.DataFrame(np.eye(2, dtype="float16"))
    series = pd.Series([1, 2], index=index, name="label")
    lines, found, data = written(
        tmp_path, {"frame": frame, "parts": {"numbers": numbers}, "series": series, "own": series}
    )
    assert lines[0] == 'frame = pandas.read_feather(args.data / "data_frame.arrow")'
    pd.testing.assert_frame_equal(found["frame"], frame, check_exact=True)
    assert found["frame"].attrs == {"unit": "EUR"}
    pd.testing.assert_frame_equal(found["parts"]["numbers"], numbers, check_exact=True)
    pd.testing.assert_series_equal(found["series"], series, check_exact=True)
    assert data.size_bytes > 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (FRAME.set_index(pd.date_range("2026", periods=2)), r'"freq" .*\[file\]: None'),
        (pd.DataFrame({"a": [1, "x"]}), r"Conversion failed for column a with type object"),
        (pd.DataFrame({"a": [[1], [2, 3]]}), r'column name="a"\) values are different'),
        (pd.DataFrame(np.eye(2), columns=["a", "a"]), r"Duplicate column names"),
        (pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}), r"Sparse pandas data"),
        (pd.DataFrame({"a": [1j]}), r"complex128"),
        (pd.Series([1], name=1.5), r"its name 1.5 is no text or number"),
    ],
    ids=["frequency", "mixed", "lists", "twice", "sparse", "complex", "name"],
)
def test_frames_that_a_file_changes_are_refused(tmp_path: Path, value: Any, reason: str) -> None:
    kind = type(value).__name__
    with pytest.raises(UsageError, match=rf"cannot export `x` \(pandas.{kind}\): .*{reason}"):
        written(tmp_path, {"x": value})


def test_frame_without_pyarrow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"`x` \(pandas.DataFrame\): .* run %pip install pyarrow"):
        JobData("data", "args.data", str).assignments({"x": FRAME})


def test_arrow_tables_keep_their_schema(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([[1], None]), "b": pa.array(["x", "x"]).dictionary_encode()})
    table = table.replace_schema_metadata({"unit": "m"})
    lines, found, _ = written(tmp_path, {"table": table})
    assert ".ipc.open_file((args.data /" in lines[0]
    assert found["table"].equals(table, check_metadata=True)


def test_arrow_table_may_contain_nan(tmp_path: Path) -> None:
    table = pa.table({"a": [1.0, float("nan"), None], "b": pa.array([[float("nan")], [], None])})
    found = written(tmp_path, {"table": table})[1]["table"]
    assert found.schema == table.schema
    assert repr(found.to_pylist()) == repr(table.to_pylist())


def test_arrow_table_that_no_file_contains_is_refused(tmp_path: Path) -> None:
    parts = [pa.table({"a": pa.array([text]).dictionary_encode()}) for text in "xy"]
    with pytest.raises(UsageError, match=r"cannot export `x` \(pyarrow.Table\): .*Dictionary repl"):
        written(tmp_path, {"x": pa.concat_tables(parts)})


def test_dataset_that_its_package_cannot_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of the package's function raises the error of a damaged table."""
    import datasets

    def damaged(_self: Any, _path: str) -> None:
        raise pa.ArrowInvalid("Column 1 named x expected length 2")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", damaged)
    with pytest.raises(UsageError, match=r"cannot export `x` \(datasets.Dataset\): Column 1 named"):
        written(tmp_path, {"x": datasets.Dataset.from_dict({"x": [1, 2]})})


def test_polars_frames_keep_their_types(tmp_path: Path) -> None:
    import polars as pl

    frame = pl.DataFrame(
        {"a": [[1], None], "b": ["x", "y"]}, schema_overrides={"b": pl.Categorical}
    )
    lines, found, data = written(tmp_path, {"frame": frame})
    assert lines == ['frame = polars.read_ipc(args.data / "data_frame.arrow")']
    assert found["frame"].schema == frame.schema
    assert found["frame"].equals(frame)
    assert data.size_bytes > 0


def test_datasets_of_hugging_face_keep_rows_and_format(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0]] * 10, "label": range(10)})
    shuffled = rows.with_format("numpy").shuffle(seed=3).select(range(4))
    lines, found, data = written(
        tmp_path, {"train": shuffled, "both": datasets.DatasetDict(a=rows)}
    )
    assert lines[0] == 'train = datasets.load_from_disk(args.data / "data_train.dataset")'
    assert found["train"][:]["label"].tolist() == shuffled[:]["label"].tolist()
    assert (found["train"].features, found["train"].format) == (shuffled.features, shuffled.format)
    assert found["both"]["a"].to_dict() == rows.to_dict()
    assert data.size_bytes > 0
    own = rows.with_transform(lambda batch: batch)
    with pytest.raises(UsageError, match=r"`x` \(datasets.Dataset\): .*transform is a function"):
        written(tmp_path, {"x": own})


class Config:
    """A class of the notebook: it is pickled with its code."""

    rate = 1


Config.__module__ = "__main__"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (np.array([{}]), "ndarray"),
        (Counter("ab"), "collections.Counter"),
        ([{"a": print}] * 1000, "list"),
        ({"a": {"b": {1}}}, "set"),
        (lambda: 1, "function or class of the notebook"),
        (Config(), "function or class of the notebook"),
        (subprocess.Popen, "type"),
    ],
)
def test_objects_of_other_types_are_refused(tmp_path: Path, value: object, kind: str) -> None:
    name = "x['a']['b']" if kind == "set" else "x"
    with pytest.raises(UsageError) as caught:
        written(tmp_path, {"x": value, "y": 1, "z": Counter()})
    first, second = str(caught.value).split("\n")
    assert first.startswith(f"cannot export `{name}` ({kind}), which was copied from the notebook")
    assert second.startswith("cannot export `z` (collections.Counter)")


def test_integer_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot export `x` \(int\)"):
        written(tmp_path, {"x": 10**5000})


def test_all_data_count_for_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_data, "LIMIT_BYTES", 3000)
    objects = {"x": np.ones(2), "text": "a" * 2500}
    written(tmp_path, objects)
    frame = pd.DataFrame({"a": np.zeros(400)})
    with pytest.raises(UsageError, match=r"`frame` \(pandas.DataFrame\): .*limit is 2.9 KiB"):
        written(tmp_path, {**objects, "frame": frame})


def test_files_have_different_names(tmp_path: Path) -> None:
    data = JobData("data", "args.data", str)
    for value in ("a" * 3000, "b" * 3000):
        assert data.assignments({"x": value})
    data.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"data_x.txt", "data_x_2.txt"}
