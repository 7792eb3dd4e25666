"""Optimizers of Keras models. Keras builds them at the first `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from collections.abc import Mapping


def optimizers_of(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers of compiled models, by description. Call it in the strategy's scope.

    Builds them if necessary: a resumed run skips the finished fits that would have built them.
    """
    found = {}
    for name, owner in owners.items():
        optimizer = getattr(owner, "optimizer", None) if isinstance(owner, keras.Model) else None
        if optimizer is not None and owner.built:
            if not optimizer.built:
                optimizer.build(owner.trainable_variables)
            found[f"optimizer of {name}"] = optimizer
    return found
