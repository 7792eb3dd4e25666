"""Classes and functions of the notebook that Keras objects use."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def classes_of_notebook(value: Any) -> dict[str, Any]:
    """Return the classes and functions of the notebook that a Keras object uses, by name."""
    import keras

    found: list[Any] = [type(value)]
    if isinstance(value, keras.Layer):
        found += [type(layer) for layer in value._flatten_layers()]
    if isinstance(value, keras.Model) and value.compiled:
        found += [type(value.optimizer), *(type(metric) for metric in value.metrics)]
        config = value._compile_config.config
        for item in keras.tree.flatten([config.get("loss"), config.get("metrics")]):
            found += [item, type(item)]
    named = [item for item in found if isinstance(item, (type, FunctionType))]
    return {item.__name__: item for item in named if item.__module__ == "__main__"}
