"""Reader of Keras's objects on any backend, for `worker/inspection/placement.py`."""

from __future__ import annotations

from typing import Any

import keras

from nbdist.worker.inspection.types import Inside

_WITH_VARIABLES = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)


def read(value: Any) -> Inside | None:
    if isinstance(value, keras.Variable):
        return Inside([((), value.value)])
    if isinstance(value, _WITH_VARIABLES):
        return Inside(
            [(_path(value.name, variable.path), variable) for variable in value.variables]
        )
    return None


def _path(owner: str, path: str) -> tuple[str, ...]:
    """Return the path in parts, without the owner: `/dense`, `/kernel` for `model/dense/kernel`."""
    words = path.split("/")
    return tuple(f"/{word}" for word in (words[1:] if words[0] == owner else words))
