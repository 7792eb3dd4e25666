"""Backend of Keras: its choice when a cell imports Keras, and errors for conflicts.

Keras reads `KERAS_BACKEND` once, during its import. A later change has no effect. On a backend that
the cell's strategy does not distribute, each worker would train by itself.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from nbdist.errors import KerasBackendError, StrategyError
from nbdist.worker.runtime import context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from nbdist.records import StrategyName

VARIABLE = "KERAS_BACKEND"
_BACKENDS: dict[StrategyName, str] = {"mirrored": "tensorflow", "pjrt": "jax"}
_STRATEGIES = {backend: strategy for strategy, backend in _BACKENDS.items()}


@functools.cache
def decide_at_import() -> None:
    """Install the import hook: the first import of Keras then sets or checks its backend."""
    sys.meta_path.insert(0, _Finder(os.environ.get(VARIABLE)))


class _Finder:
    """Import hook that finds Keras like the other finders, and checks its backend first.

    Args:
        given: backend that the user has chosen for the workers, or that belongs to the only
            framework; None if undecided.
    """

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._is_looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != "keras" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, self._given)
            spec.loader = loader
        return spec


class _Loader(wrapt.ObjectProxy):  # type: ignore[type-arg]
    def __init__(self, loader: Any, given: str | None) -> None:
        super().__init__(loader)
        self._self_given = given

    def exec_module(self, module: ModuleType) -> None:
        _decide(self._self_given)
        self.__wrapped__.exec_module(module)


def _decide(given: str | None) -> None:
    """Set the backend for the cell's strategy; raise KerasBackendError on a conflict."""
    chosen, worker = os.environ.get(VARIABLE), context.if_any()
    if worker is None:
        if chosen is None:
            raise KerasBackendError("no cell has chosen the backend of Keras yet")
        return
    strategy = worker.strategy
    if chosen is None:
        first: StrategyName = next(iter(worker.strategies))
        os.environ[VARIABLE] = _BACKENDS[strategy or first]
    elif strategy is not None and chosen not in (given, _BACKENDS[strategy]):
        by = _STRATEGIES.get(chosen, "no strategy")
        worker.ending.callback(_set_back, given)  # TensorFlow, which may import Keras, still runs
        raise KerasBackendError(
            f"{VARIABLE}={chosen}, but this cell runs under {strategy}: Keras on {chosen} is "
            f"distributed over the workers by {by}. {_remedy(chosen, is_loaded=False)}"
        )


def _set_back(given: str | None) -> None:
    """Reset the variable, so that the next cell can choose again."""
    if given is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = given


def refuse_another(tree: ast.Module) -> None:
    """Raise KerasBackendError if a cell requests another backend than the loaded one."""
    if "keras" not in sys.modules:
        return
    loaded = _loaded()
    other = next((backend for backend in _requested_backends(tree) if backend != loaded), None)
    if other is not None:
        raise KerasBackendError(
            f"the cell sets {VARIABLE}={other}, but Keras is loaded on {loaded}: the change has no "
            f"effect; nothing was run. {_remedy(other, is_loaded=True)}"
        )


def check_fit(model: Any) -> None:
    """Refuse a `fit` in a strategy's scope that would train each worker by itself.

    Raises:
        StrategyError: the backend or the model does not belong to the strategy.
    """
    worker = context.current()
    if worker.strategy is None or worker.world_size == 1:
        return
    import keras

    loaded, needed = _loaded(), _BACKENDS[worker.strategy]
    if loaded != needed:
        other = _STRATEGIES.get(loaded)
        here = f"%%dist_run --strategy {other}" if other in worker.strategies else ""
        first = f"begin the cell with {here}; or, for Keras on {needed}: " if here else ""
        raise StrategyError(
            f"`fit` would train each worker by itself: Keras is on {loaded}, but the cell runs "
            f"under {worker.strategy}: {first}{_remedy(needed, is_loaded=True)}"
        )
    if worker.strategy == "pjrt" and keras.distribution.distribution() is None:
        worker.reporter.note("batch", _UNSET, warning=True)
    elif worker.strategy == "mirrored" and (
        model._distribute_strategy is not worker.strategies["mirrored"]
    ):
        raise StrategyError(
            "`fit` would train each worker by itself: the model was created outside of the "
            "strategy's scope, for example in a cell with --ranks: create it in a cell for all "
            "workers; to train on one worker only, begin the cell with %%dist_run --ranks 0"
        )


_UNSET = (
    "`fit` trains each worker by itself, because Keras has no distribution: remove "
    "keras.distribution.set_distribution(None), and use a version of Keras that nbdist supports"
)


def _loaded() -> str:
    backend: str = sys.modules["keras"].backend.backend()
    return backend


def _remedy(backend: str, *, is_loaded: bool) -> str:
    strategy = _STRATEGIES.get(backend)
    if strategy is None:
        return "Use jax or tensorflow"
    worker = context.current()
    if strategy not in worker.strategies:
        again = f"%dist_start {worker.world_size} hosts --framework {backend}"
        return f"Run %dist_stop, then {again}"
    cell = f"a cell that begins with %%dist_run --strategy {strategy}"
    if is_loaded:
        return f"Run %dist_restart, then set {VARIABLE} and import Keras in {cell}"
    return f"Import Keras in {cell}"


def _requested_backends(tree: ast.Module) -> Iterator[str]:
    """Yield the backends that a cell writes into the environment as constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value=str(name)))],
                value=ast.Constant(value=str(backend)),
            ) if name == VARIABLE:
                yield backend
            case ast.Call(args=[ast.Constant(value=str(name)), ast.Constant(value=str(words))]):
                if name == VARIABLE:
                    yield words
                elif name == "env" and words.startswith(VARIABLE):
                    yield words.removeprefix(VARIABLE).strip(" =")
            case ast.Call(args=[ast.Dict(keys=keys, values=values)]):
                pairs = zip(keys, values, strict=True)
                yield from (_constant(v) for k, v in pairs if _constant(k) == VARIABLE)
            case ast.Call(keywords=keywords):
                yield from (_constant(k.value) for k in keywords if k.arg == VARIABLE)


def _constant(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""
