"""Communication between JAX's processes, without other processes."""

from __future__ import annotations

from typing import NoReturn

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from nbdist.worker.jax.runtime import processes


@pytest.mark.parametrize("axis", ["", "rows"])
def test_cancelled_collective_leaves_the_context_mesh(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of JAX's collective is interrupted before it resets its own mesh."""

    def interrupted(_: object) -> NoReturn:
        jax.set_mesh(jax.make_mesh((1,), ("processes",)))
        raise KeyboardInterrupt

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", interrupted)
    own = jax.make_mesh((1,), (axis,)) if axis else None
    with jax.set_mesh(own):
        before = jax.sharding.get_mesh()
        with pytest.raises(KeyboardInterrupt):
            processes.chiefs(np.zeros(1))
        assert jax.sharding.get_mesh() == before
