"""Renewal of Keras objects on JAX, in place, for `worker/jax/rebuild/walk.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nbdist.private_api.keras import Distribution, global_state
from nbdist.worker.inspection import keras as keras_objects
from nbdist.worker.jax.rebuild.walk import LostValue

if TYPE_CHECKING:
    from nbdist.worker.jax.rebuild.walk import Walk

_COMPILED = ("train_function", "test_function", "predict_function")
_SLOTS = "optimizer_variables"


def renew(value: Any, walk: Walk) -> bool:
    """Renew an object of Keras; returns whether it was one."""
    if isinstance(value, keras.Variable):
        _renew_variable(value, walk)
    elif isinstance(value, keras.distribution.DeviceMesh):
        _renew_mesh(value, walk)
    elif isinstance(value, keras.distribution.TensorLayout):
        walk(value.device_mesh)
        vars(value).pop("_backend_layout", None)  # rebuilt from the mesh on access
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
    """Return Keras's global seed generator; None before its first use."""
    return global_state.get_global_attribute("global_seed_generator")


def _renew_variable(variable: Any, walk: Walk) -> None:
    old = variable._value
    if old is None and variable._initializer is None:
        raise LostValue  # Keras passed its value to a step that failed
    new = walk(old)
    if new is not old:
        variable._value = new
    variable._layout = walk(variable._layout)


def _renew_mesh(mesh: Any, walk: Walk) -> None:
    devices = np.empty(mesh.devices.shape, object)
    for index, device in np.ndenumerate(mesh.devices):
        devices[index] = walk(device)
    mesh._devices = devices
    vars(mesh).pop("_backend_mesh", None)  # rebuilt from the devices on access


def _renew_model(model: Any, walk: Walk) -> None:
    """Renew the variables of the model, optimizer and metrics; drop functions compiled by `fit`."""
    _settle(model)
    for part in (*model.metrics_variables, vars(model).get("optimizer")):
        walk(part)
    for function in _COMPILED:
        setattr(model, function, None)


def _settle(model: Any) -> None:
    """Return the values to the variables that an aborted `evaluate` kept in its state."""
    kept = vars(model).get("_jax_state")
    if not kept or model._jax_state_synced:
        return
    for name, values in kept.items():
        owner, words = (model.optimizer, "variables") if name == _SLOTS else (model, name)
        for variable, value in zip(getattr(owner, words), values, strict=True):
            variable._value = value
    model._jax_state = None
    model._jax_state_synced = True
