"""SavedModels of Keras models on JAX, written by another process.

Keras on TensorFlow loads the model and writes a graph of TensorFlow operations. A model that it
cannot load, for example with a layer that a cell defines or that calls JAX, becomes one XLA
program instead: JAX exports its forward pass, and TensorFlow stores the program beside its
variables.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

from nbdist.errors import StepError
from nbdist.worker.keras.own_classes import classes_of_notebook
from nbdist.worker.own_modules import finder as own_finder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

_CONVERT_S = 1800
_MOST_REASON = 300
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""Begin of the line of a traceback that contains the message."""

_PLATFORMS = ("cpu", "cuda", "tpu")

_FROM_KERAS = """
import pickle, sys
finder, sys.path[:] = pickle.load(sys.stdin.buffer)
sys.meta_path.insert(0, finder)
import keras
own = pickle.load(sys.stdin.buffer)
model = keras.saving.load_model(sys.argv[1], custom_objects=own, compile=False)
model.export(sys.argv[2], verbose=False)
"""
_FROM_XLA = """
import pickle, sys
import jax
import tensorflow as tf
from jax.experimental import jax2tf
program, count, tree, inputs = pickle.load(sys.stdin.buffer)
program = jax.export.deserialize(program)
module = tf.Module()
with open(sys.argv[1], "rb") as stored:
    module.variables_of_model = [tf.Variable(pickle.load(stored)) for _ in range(count)]
signature = jax.tree.map(lambda i: tf.TensorSpec(*inputs[i][:3]), tree)
call = jax2tf.convert(
    program.call,
    polymorphic_shapes=[None, *jax.tree.map(lambda i: inputs[i][3], tree)],
    with_gradient=False,
    native_serialization_platforms=program.platforms,
)

@tf.function(input_signature=signature, autograph=False)
def serve(*values):
    return call(list(module.variables_of_model), *values)

module.serve = serve
tf.saved_model.save(module, sys.argv[2], signatures={"serving_default": serve})
"""


class _Refused(Exception):  # noqa: N818 - not an error of the user
    """Reason why the other process cannot write the model."""


def write_of_jax(model: Any, draft: Path, *, writes: bool, agree: Callable[[int], int]) -> str:
    """Write the SavedModel of a Keras model on JAX. All ranks call it, and rank 0 writes.

    Args:
        model: a built model.
        draft: an existing folder for the SavedModel.
        writes: True on rank 0.
        agree: returns rank 0's number on all ranks.

    Returns:
        On rank 0, why the SavedModel is an XLA program; empty if it has operations of TensorFlow.

    Raises:
        StepError: neither way is possible.
    """
    scratch = draft.with_name(f"{draft.name}.tmp")
    try:
        reason = ", ".join(sorted(classes_of_notebook(model)))
        if reason:
            reason += ": defined in a cell"
        else:
            model.save(keras_file := scratch.with_suffix(".keras"))
            if writes:
                try:
                    _convert(model, keras_file, draft)
                except _Refused as error:
                    reason = str(error)
                finally:
                    keras_file.unlink()
        if agree(int(bool(reason))):
            _write_program(model, scratch, draft, writes=writes, refused=reason)
    finally:
        if writes:
            scratch.unlink(missing_ok=True)
    return reason


def _convert(model: Any, keras_file: Path, folder: Path) -> None:
    """Write the SavedModel with Keras on TensorFlow.

    The process imports the user's modules with the texts of this rank.
    """
    imports = pickle.dumps((own_finder.install(), sys.path))
    try:
        own = pickle.dumps(_own_objects(model, keras_file))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _Refused(f"Keras on TensorFlow cannot import its objects: {error}") from None
    _in_process(_FROM_KERAS, keras_file, folder, imports + own, KERAS_BACKEND="tensorflow")


def _write_program(model: Any, scratch: Path, folder: Path, *, writes: bool, refused: str) -> None:
    """Write the SavedModel with the forward pass as one XLA program."""
    from nbdist.worker.jax.arrays.checkpoint import on_host

    variables = [*model.trainable_variables, *model.non_trainable_variables]
    values = [on_host(variable.value) for variable in variables]
    if not writes:
        return
    try:
        exported = pickle.dumps(_exported(model, values))
        with scratch.open("wb") as file:
            for value in values:
                pickle.dump(value, file)
        _in_process(_FROM_XLA, scratch, folder, exported, JAX_PLATFORMS="cpu")
    except _Refused as error:
        raise StepError(
            f"TensorFlow cannot save this model ({refused}; as an XLA program: {error}): compute "
            'with keras.ops in its layers, or export with format="keras"'
        ) from None


def _exported(model: Any, values: list[np.ndarray]) -> tuple[bytes, int, Any, list[Any]]:
    """Return the forward pass as an XLA program, the number of its variables, and its inputs.

    The inputs are a structure whose leaves are indices, and a list of what they stand for: a shape,
    a dtype, a name, and a shape whose unknown dimensions have names.
    """
    import jax
    import keras

    from nbdist.private_api.keras import get_input_signature
    from nbdist.worker.jax.runtime.processes import NO_MESH

    trainable = len(model.trainable_variables)
    names = (f"d{number}" for number in itertools.count())
    scope = jax.export.SymbolicScope()

    def serve(variables: list[Any], *inputs: Any) -> Any:
        split = variables[:trainable], variables[trainable:]
        return model.stateless_call(*split, *inputs, training=False)[0]

    def symbolic(shape: tuple[int | None, ...]) -> str:
        dims = ["batch" if i == 0 else next(names) for i in range(len(shape))]
        return ", ".join(
            name if size is None else str(size) for name, size in zip(dims, shape, strict=True)
        )

    try:
        specs = get_input_signature(model)
        flat = keras.tree.flatten(specs)
        inputs = [(s.shape, str(s.dtype), s.name, f"({symbolic(s.shape)})") for s in flat]
        shapes = [
            jax.ShapeDtypeStruct(jax.export.symbolic_shape(named, scope=scope), dtype)
            for *_, dtype, _, named in inputs
        ]
        arguments = keras.tree.pack_sequence_as(specs, shapes)
        with jax.set_mesh(NO_MESH):  # a program for one device
            program = jax.export.export(jax.jit(serve), platforms=_PLATFORMS)(
                [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values], *arguments
            )
    except Exception as error:  # noqa: BLE001 - of the user's layers, or an unknown size
        lines = str(error).strip().splitlines() or ["no message"]
        raise _Refused(f"{type(error).__name__}: {lines[0][:_MOST_REASON]}") from None
    tree = keras.tree.pack_sequence_as(specs, list(range(len(flat))))
    return program.serialize(), len(values), tree, inputs


def _in_process(code: str, source: Path, folder: Path, sent: bytes, **variables: str) -> None:
    """Run a program that reads `source` and `sent` and writes the SavedModel into `folder`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), str(folder)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
            input=sent,
            capture_output=True,
            timeout=_CONVERT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepError(
            f'TensorFlow did not save this model within {_CONVERT_S} s: export with format="keras"'
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        named = [line for line in lines if _ERROR.match(line)] or lines[-1:] or ["no message"]
        raise _Refused(named[-1].partition(" Full object config")[0][:_MOST_REASON])


def _own_objects(model: Any, keras_file: Path) -> dict[str, Any]:
    """Return the classes of a model's layers, and registered objects that its file names."""
    import keras

    with zipfile.ZipFile(keras_file) as archive:
        config = archive.read("config.json").decode()
    registered = keras.saving.get_custom_objects()
    kinds = {type(layer) for layer in model._flatten_layers()}
    own = {kind.__name__: kind for kind in kinds if kind.__module__.partition(".")[0] != "keras"}
    return own | {name: value for name, value in registered.items() if f'"{name}"' in config}
