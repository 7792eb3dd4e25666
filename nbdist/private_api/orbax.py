"""Private names of Orbax."""

from __future__ import annotations

from typing import Any

from nbdist.private_api.features import Library

LIBRARY = Library(
    "Orbax",
    "orbax.checkpoint",
    {
        "Checkpointer": "orbax.checkpoint:Checkpointer",
        "jax_array_handlers": "orbax.checkpoint._src.serialization.jax_array_handlers",
    },
)

CHECKPOINTS = LIBRARY.feature(
    "checkpoints of Orbax in a common folder",
    "Checkpointer._active_processes",
    *("jax_array_handlers.ArrayHandler.deserialize", "jax_array_handlers.ArrayHandler.serialize"),
    is_tested_only=True,
)


def __getattr__(name: str) -> Any:
    return LIBRARY.find(name)
