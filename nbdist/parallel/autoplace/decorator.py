"""`@autoplace`: a jitted function that runs where measurements show it is fastest."""

from __future__ import annotations

import functools
import threading
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import jax
from jax.errors import JAXIndexError, JAXTypeError

from nbdist.errors import UsageError
from nbdist.parallel.autoplace import cache as choice_cache
from nbdist.parallel.autoplace.decision import Call, decide
from nbdist.parallel.autoplace.signatures import (
    KINDS,
    Statics,
    UnsupportedLeaf,
    refusal,
    trace_state_clean,
)
from nbdist.private_api.jax import AUTOPLACE, INSIDE_JIT
from nbdist.views.autoplace import AutoplacePicture

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from nbdist.parallel.autoplace.candidates import Candidate
    from nbdist.parallel.autoplace.signatures import Given
    from nbdist.records.autoplace import Decision

_JAX = Path(jax.__file__).parent
_TRIALS = threading.RLock()
"""Lock for trials: two at a time would disturb each other."""


class Autoplaced:
    """A function that `autoplace` has made; call it like the function itself.

    Args:
        jitted: the function from `jax.jit`.
        function: the original function.
    """

    def __init__(self, jitted: Callable[..., Any], function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._jitted = jitted
        self._function = function
        self._name = _name_of(function)
        AUTOPLACE.check()
        INSIDE_JIT.check()
        info = jitted._jit_info  # type: ignore[attr-defined]
        self._statics = Statics(info.static_argnums, info.static_argnames)
        self._is_fixed = bool(
            info.user_specified_in_shardings
            or any(isinstance(s, jax.sharding.Sharding) for s in info.out_shardings_leaves)
            or info.device
            or info.backend
        )
        self._ways: dict[Hashable, Candidate] = {}
        self._decisions: list[Decision] = []

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Call the function where it is fastest; the first call with new inputs measures this.

        Within `jax.jit`, `jax.grad` and similar transformations it is the plain function.

        Raises:
            UsageError: an input is not an array or was donated, or the function cannot be traced.
        """
        if not trace_state_clean():
            return self._jitted(*args, **named)
        given = self._statics.given(args, named)
        try:
            kinds = [KINDS[type(leaf)](leaf) for leaf in given.leaves]
        except UnsupportedLeaf:
            raise refusal(self._function, args, named, self._name) from None
        key = (given.tree, given.statics, jax.sharding.get_mesh(), *kinds)
        candidate = self._ways.get(key)
        if candidate is None:
            candidate = self._decided(key, given, args, named)
        if candidate.stays:
            return self._jitted(*args, **named)
        positions, by_name = given.with_leaves(candidate.moved(given.leaves))
        return self._jitted(*positions, **by_name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind as a method: the instance is the first argument, a tree or a static one."""
        return self if instance is None else types.MethodType(self, instance)

    def report(self) -> AutoplacePicture:
        """Return the measurements and choices for all inputs that this process has used.

        Before the first call: the stored choices of earlier processes for a function of this name.
        """
        with _TRIALS:
            return AutoplacePicture(
                self._name, tuple(self._decisions) or tuple(choice_cache.users().of(self._name))
            )

    def forget(self) -> None:
        """Delete the choices here and in the file, so that the next call measures again."""
        with _TRIALS:
            self._ways.clear()
            self._decisions.clear()
            choice_cache.users().forget(self._name)

    def _decided(
        self, key: Hashable, given: Given, args: Sequence[Any], named: dict[str, Any]
    ) -> Candidate:
        with _TRIALS:
            if key not in self._ways:
                traced = self._traced(args, named)
                call = Call(self._name, self._jitted, traced, given, self._is_fixed)
                decided = decide(call, choice_cache.users())
                self._decisions.append(decided.decision)
                self._ways[key] = decided.candidate
            return self._ways[key]

    def _traced(self, args: Sequence[Any], named: dict[str, Any]) -> Any:
        try:
            return self._jitted.trace(*args, **named)  # type: ignore[attr-defined]
        except (JAXTypeError, JAXIndexError) as error:
            raise UsageError(
                f"{self._name} cannot be traced: {_line_of(error, self._function)}: "
                f"{str(error).partition(chr(10))[0]} The function must be traceable by jax.jit: "
                "use jnp.where or jax.lax.cond instead of if, and do not pass its arrays to "
                "float() or NumPy, or make the argument static: "
                '@nbdist.autoplace(static_argnames="...")'
            ) from error


@overload
def autoplace(function: Callable[..., Any], /) -> Autoplaced: ...
@overload
def autoplace(
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], Autoplaced]: ...
def autoplace(
    function: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Any:
    """Compile a function, and run it where it is fastest.

    The first call with inputs of a kind (shapes, dtypes, places) tries each platform, one device,
    and layouts over all devices. A file keeps the choice for later processes. The function stays
    where `jax.jit` runs it, unless another place is faster beyond the noise. Results stay where
    they are computed. Sums may be added in another order.

    Args:
        function: Function of trees of arrays, plain or from `jax.jit`. With options, use
            `@nbdist.autoplace(static_argnames=...)`.
        static_argnums: As in `jax.jit`.
        static_argnames: As in `jax.jit`.

    Returns:
        `Autoplaced`: call it as the function. `.report()` shows measured times in seconds, and
        `.forget()` measures again.

    Raises:
        UsageError: `function` is no function, or options were given for a compiled one.

    Examples:
        >>> @nbdist.autoplace
        ... def total(x):
        ...     return (x @ x).sum()
        >>> float(total(np.ones((8, 8), np.float32)))
        512.0
        >>> len(total.report().decisions)
        1
    """
    statics = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    chosen = {name: value for name, value in statics.items() if value is not None}
    if function is None:
        return functools.partial(_made, chosen=chosen)
    return _made(function, chosen)


def _made(function: Callable[..., Any], chosen: dict[str, Any]) -> Autoplaced:
    if not callable(function):
        raise UsageError(
            f"@autoplace got {function!r}, a {type(function).__name__}: give it a function of "
            "arrays, nbdist.autoplace(step)"
        )
    if not isinstance(function, jax.stages.Wrapped):
        return Autoplaced(jax.jit(function, **chosen), function)
    if chosen:
        raise UsageError(
            f"@autoplace got {', '.join(chosen)} for {_name_of(function)}, which is "
            "jitted already: pass the options to jax.jit"
        )
    return Autoplaced(function, function.__wrapped__)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the module and name of a function; for an object without a name, its class."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _line_of(error: Exception, function: Callable[..., Any]) -> str:
    """Return the last line of the function's own file in a traceback: file, line, text."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(_JAX)]
    code = getattr(function, "__code__", None)
    own = [frame for frame in theirs if code is not None and frame.filename == code.co_filename]
    frame = (own or theirs)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
