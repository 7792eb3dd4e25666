"""Python's and NumPy's global generators, kept in checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

State = tuple[object, dict[str, Any]]
"""Python's, then NumPy's."""


def state() -> State:
    """As they are now."""
    own: Any = np.random.get_state(legacy=False)
    return random.getstate(), own


def packed(states: State) -> dict[str, Any]:
    """The same, as what MessagePack can hold."""
    python, own = states
    words = {**own["state"], "key": own["state"]["key"].tolist()}
    return {"python": python, "numpy": {**own, "state": words}}


def restore(saved: dict[str, Any]) -> None:
    """Go on from what `packed` was given."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    own = dict(saved["numpy"])
    key = np.asarray(own["state"]["key"], np.uint32)
    own["state"] = {**own["state"], "key": key}
    np.random.set_state(own)
