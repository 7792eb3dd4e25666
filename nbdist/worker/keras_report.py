"""`model.fit` in a cell shows its epochs in the notebook by itself.

Keras has no public hook for a callback on every `fit`, so `CallbackList` is made to add one. With
`verbose="auto"` (Keras's default) it stands in for the progress bar, which a display shared by
several ranks cannot show; an explicit `verbose` keeps Keras's own output as well.
"""

from __future__ import annotations

from typing import Any

import keras

from nbdist.worker import state

_list_init_upstream = keras.callbacks.CallbackList.__init__


def apply() -> None:
    """Add an `EpochReport` to every list of callbacks made from here on."""
    keras.callbacks.CallbackList.__init__ = _init_with_report


def _init_with_report(
    self: Any,
    callbacks: Any = None,
    add_history: bool = False,
    add_progbar: bool = False,
    model: Any = None,
    **params: Any,
) -> None:
    _list_init_upstream(
        self,
        [*keras.tree.flatten(callbacks or []), EpochReport()],
        add_history=add_history,
        add_progbar=add_progbar and params.get("verbose") != "auto",
        model=model,
        **params,
    )


class EpochReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports each epoch's metrics, with this rank's own loss beside the reduced one."""

    def __init__(self) -> None:
        super().__init__()
        self._fitting = False
        self._own: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self._fitting = True

    def on_train_end(self, logs: Any = None) -> None:
        self._fitting = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._own = {}

    def on_test_begin(self, logs: Any = None) -> None:
        if self._fitting:  # validation is about to reset the metrics
            self._own = _own_loss(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        own = self._own or _own_loss(self.model)
        state.current().report_values(epoch + 1, -1, own=own, shared=_scalars(logs))

    def on_test_end(self, logs: Any = None) -> None:
        if not self._fitting and logs:
            state.current().report_values(-1, -1, own={}, shared=_scalars(logs))


def _scalars(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


def _own_loss(model: Any) -> dict[str, float]:
    """The mean loss over the samples that this rank saw: its part of a reduced mean.

    Keras keeps a mean as `total` and `count`; under a distribution strategy of TensorFlow each
    replica has its own pair, which are added up when the metric is read. Under JAX the pair is
    that of all ranks, and none knows its part.
    """
    if _is_of_all_ranks():
        return {}
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            total, count = _own_part(metric.total), _own_part(metric.count)
            return {"loss": total / count} if count else {}
    return {}


def _is_of_all_ranks() -> bool:
    if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
        return False
    return state.current().world_size > 1


def _own_part(variable: Any) -> float:
    strategies = state.current().strategies
    if "mirrored" in strategies and keras.backend.backend() == "tensorflow":
        parts = strategies["mirrored"].experimental_local_results(variable.value)
        return float(sum(float(part) for part in parts))
    return float(variable)
