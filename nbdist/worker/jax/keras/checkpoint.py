"""Checkpoint state of a `fit` with Keras on JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from nbdist.worker.jax.arrays.checkpoint import JaxState, check_fits, placed_like
from nbdist.worker.keras.optimizer_config import flags
from nbdist.worker.keras.optimizers import optimizers_of
from nbdist.worker.runtime.reachable import names_in, of_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import jax
    import numpy as np

_KINDS = (
    keras.layers.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.Variable,
)


def of_fit(model: Any, names: Iterable[str], namespace: dict[str, Any]) -> JaxState:
    """Collect the model, its optimizer and metrics, and the Keras objects of a cell's names."""
    owners = of_kinds(names, namespace, _KINDS)
    if not any(owner is model for owner in owners.values()):
        owners = {"model of the fit": model, **owners}
    owners |= optimizers_of(owners)
    return JaxState(_Variables(owners, model), names_in(owners))


class _Variables:
    """Keras variables, each named by its owner and its index there.

    Keras numbers the names of models, and the names of optimizer variables contain them. Names of
    variables are therefore not stable.

    Args:
        owners: Objects with variables, by name.
        model: Model in training.
    """

    def __init__(self, owners: Mapping[str, Any], model: Any) -> None:
        self._model = model
        self._owners = owners
        self._by_name: dict[str, Any] = {}
        self._known_as: list[tuple[str, Any]] = []
        seen: set[int] = set()
        listed = [(name, owner, _variables_of(owner)) for name, owner in owners.items()]
        metrics = "metrics of the fit", None, model.metrics_variables
        for name, owner, variables in [*listed, metrics]:
            for i, variable in enumerate(variables):
                if id(variable) not in seen:
                    seen.add(id(variable))
                    word = (
                        "" if isinstance(owner, keras.optimizers.Optimizer) else f"/{variable.name}"
                    )
                    self._by_name[f"{name}/{i}{word}"] = variable
                    self._known_as.append((f"{name}: {variable.path}", variable))

    def saved(self) -> dict[str, jax.Array]:
        values = self._values()
        return {name: values[id(variable)] for name, variable in self._by_name.items()}

    def alike(self) -> Iterator[tuple[str, jax.Array]]:
        values = self._values()
        for name, variable in self._known_as:
            yield name, values[id(variable)]

    def facts(self) -> dict[str, object]:
        return flags(self._owners)

    def _values(self) -> dict[int, jax.Array]:
        """Return the arrays by id of the variable; during `fit` Keras keeps them in the model."""
        model = self._model
        trained = vars(model).get("_jax_state")
        values: dict[int, jax.Array] = {}
        if trained and not model._jax_state_synced:
            for kind, variables in (
                ("trainable_variables", model.trainable_variables),
                ("non_trainable_variables", model.non_trainable_variables),
                ("optimizer_variables", model.optimizer.variables),
                ("metrics_variables", model.metrics_variables),
            ):
                values |= {id(v): array for v, array in zip(variables, trained[kind], strict=True)}
        rest = (v for v in self._by_name.values() if id(v) not in values)
        return values | {id(variable): variable.value for variable in rest}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        own = self.saved()
        check_fits(arrays, own)
        for name, variable in self._by_name.items():
            if own[name].size:
                variable.assign(placed_like(arrays[name], own[name]))


def _variables_of(owner: Any) -> list[Any]:
    return [owner] if isinstance(owner, keras.Variable) else list(owner.variables)
