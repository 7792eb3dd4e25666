"""Keras's objects on JAX, as `worker/jax/rebuild/walk.py` changes them: in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.distribution.distribution_lib import Distribution

from nbdist.worker.inspection import keras as keras_objects
from nbdist.worker.jax.rebuild.walk import Lost

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Walk

_COMPILED = ("train_function", "test_function", "predict_function")
_SLOTS = "optimizer_variables"


def renew(value: Any, walk: Walk) -> bool:
    """Whether it was an object of Keras."""
    if isinstance(value, keras.Variable):
        _renew_variable(value, walk)
    elif isinstance(value, keras.distribution.DeviceMesh):
        _renew_mesh(value, walk)
    elif isinstance(value, keras.distribution.TensorLayout):
        walk(value.device_mesh)
        vars(value).pop("_backend_layout", None)  # made of the mesh when it is asked for
    elif isinstance(value, (Distribution, keras.random.SeedGenerator)):
        walk.items(vars(value))
    else:
        inside = keras_objects.read(value)
        if isinstance(value, keras.Model):
            _renew_model(value, walk)
        for _, variable in getattr(inside, "parts", ()):
            walk(variable)
        return inside is not None
    return True


def seeds() -> Any:
    """The generator of all that is given no seed of its own; None before its first use."""
    return global_state.get_global_attribute("global_seed_generator")


def _renew_variable(variable: Any, walk: Walk) -> None:
    old = variable._value
    if old is None and variable._initializer is None:
        raise Lost  # Keras has given its value to a step that failed
    new = walk(old)
    if new is not old:
        variable._value = new
    variable._layout = walk(variable._layout)


def _renew_mesh(mesh: Any, walk: Walk) -> None:
    devices = np.empty(mesh.devices.shape, object)
    for index, device in np.ndenumerate(mesh.devices):
        devices[index] = walk(device)
    mesh._devices = devices
    vars(mesh).pop("_backend_mesh", None)  # made of the devices when it is asked for


def _renew_model(model: Any, walk: Walk) -> None:
    """Its variables, its optimizer's and its metrics'; what `fit` compiled is for old devices."""
    _settle(model)
    for part in (*model.metrics_variables, vars(model).get("optimizer")):
        walk(part)
    for function in _COMPILED:
        setattr(model, function, None)


def _settle(model: Any) -> None:
    """Give the variables the values that an `evaluate` broken off has kept from them."""
    kept = vars(model).get("_jax_state")
    if not kept or model._jax_state_synced:
        return
    for name, values in kept.items():
        owner, words = (model.optimizer, "variables") if name == _SLOTS else (model, name)
        for variable, value in zip(getattr(owner, words), values, strict=True):
            variable._value = value
    model._jax_state = None
    model._jax_state_synced = True
