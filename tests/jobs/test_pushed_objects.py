"""Tensors of TensorFlow that the notebook copied to the workers, in an exported program."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from nbdist.errors import UsageError
from nbdist.jobs import pushed_objects
from nbdist.jobs.data import JobData
from tests import references

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

CREATE = """
import tensorflow as tf
tensors = {
    "x": tf.reshape(tf.range(6.0), (2, 3)),
    "texts": tf.constant([["a", "b\\0"], ["c", ""]]),
    "text": tf.constant("ä\\0"),
    "half": tf.constant([1.5, 2.5], tf.bfloat16),
    "scalar": tf.constant(2, tf.bfloat16),
    "large": tf.zeros((2000,), tf.int64),
}
variable = tf.Variable([1.0])
"""
PUSH = """
import base64, cloudpickle
outcome = {
    "tensors": base64.b64encode(cloudpickle.dumps(tensors)).decode(),
    "variable": base64.b64encode(cloudpickle.dumps({"v": variable})).decode(),
}
"""
COMPARE = """
import numpy, tensorflow, ml_dtypes, pathlib, types
args = types.SimpleNamespace(data=pathlib.Path({folder!r}))
data = numpy.load(args.data / "data.npz")
{code}
outcome = []
for name, value in tensors.items():
    found = globals()[name]
    assert (found.dtype, found.shape) == (value.dtype, value.shape), name
    assert bool(tf.reduce_all(found == value)), name
    outcome.append(name)
"""


def test_tensors_keep_types_and_values(tmp_path: Path) -> None:
    pushed = references.plainly({"it": CREATE + PUSH}, "tensorflow", "keras")["it"]
    data = JobData("data", "args.data", str)
    objects = pushed_objects.read(base64.b64decode(pushed["tensors"]))
    code = "\n".join(data.assignments(objects))
    data.write(tmp_path)
    program = CREATE + COMPARE.format(folder=str(tmp_path), code=code)
    outcome = references.plainly({"it": program}, "tensorflow", "keras")["it"]
    assert outcome == list(objects)
    objects = pushed_objects.read(base64.b64decode(pushed["variable"]))
    with pytest.raises(UsageError, match=r"cannot export `v` \(\S+\), which was copied"):
        data.assignments(objects)
