"""Variables of Python that a cell and its training loops can change, and their saved values.

They are the names that the cell and its functions mention, the local names of functions of the
user that run, and attributes of objects of the user's classes. A checkpoint contains those that
have changed since the first loop began.
"""

from __future__ import annotations

import hashlib
from collections import deque
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nbdist.worker.checkpoint.python_values import (
    Decoder,
    UnsavableError,
    encode,
    is_mutable,
    mutable_objects,
    shared_paths,
)
from nbdist.worker.lifting.definitions import functions_of
from nbdist.worker.runtime import rng_alignment
from nbdist.worker.runtime.reachable import code_names
from nbdist.worker.runtime.user_modules import is_of_user, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_FRAMEWORKS = {"tensorflow", "keras", "jax", "flax", "equinox"}
_HIDDEN = ("_nbdist", "nbdist_")
_SMALL = 1 << 16
"""Largest size of such a value that is saved before it has changed (bytes)."""


class Values(msgspec.Struct, frozen=True):
    """Values of variables at one point of a cell.

    Attributes:
        variables: encoded values by path: `losses`, `1:fit/best`, `trainer.history`. The number
            is the position of the function among the user's functions that run.
        unchanged: paths among these whose values are those before the first loop.
        kept: paths of lists, dicts, arrays and generators that are the objects of that time.
        shared: groups of paths to one object.
        generators: states of the global random generators.
    """

    variables: dict[str, Any]
    unchanged: list[str]
    kept: list[str]
    shared: list[list[str]]
    generators: bytes


class _Variable(NamedTuple):
    value: Any
    assign: Callable[[Any], object]


class LoopVariables:
    """Variables of one run of a cell.

    Args:
        namespace: the global names.
        warn: shows a warning.
    """

    def __init__(self, namespace: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._namespace = namespace
        self._warn = warn
        self._mentioned: list[str] = []
        self._first: dict[str, bytes] | None = None
        self._objects: dict[str, Any] = {}
        self._lengths: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._changed: set[str] = set()

    def begin(self, frame: FrameType) -> None:
        """Remember the values before the first loop. Later calls have no effect."""
        if self._first is None:
            self._mentioned = sorted(_mentioned(_functions(frame), self._namespace))
            variables = self._variables(frame, {})
            found = self._encoded(variables, frame, frozenset())
            self._first = {p: _digest(msgspec.msgpack.encode(v)) for p, v in found.items()}
            self._lengths = _lengths(variables, found)
            self._objects = mutable_objects(_roots(variables))

    def values(self, frame: FrameType, left_out: frozenset[str] = frozenset()) -> Values:
        """Return the values that have changed, and small lists, dicts and generators.

        Args:
            frame: the function or cell that contains the loop.
            left_out: its names that belong to the step, or that the loop binds in each pass.
        """
        assert self._first is not None
        variables = self._variables(frame, {})
        found = self._encoded(variables, frame, left_out)
        saved = {}
        for path, value in found.items():
            packed = msgspec.msgpack.encode(value)
            if self._first.get(path) != _digest(packed):
                self._changed.add(path)
            # A failed run may change a small list, dict, set or generator later.
            is_small = len(packed) <= _SMALL and is_mutable(variables[path].value)
            if path in self._changed or is_small:
                saved[path] = value
        self._warn_of_lost(variables, found)
        objects = mutable_objects(_roots(variables))
        return Values(
            variables=saved,
            unchanged=[path for path in saved if path not in self._changed],
            kept=[path for path, value in objects.items() if self._objects.get(path) is value],
            shared=shared_paths(objects),
            generators=rng_alignment.States.now().packed(),
        )

    def _warn_of_lost(self, variables: dict[str, _Variable], found: dict[str, Any]) -> None:
        """Warn of lists, dicts and sets that have grown and cannot be saved."""
        for path, length in _lengths(variables, found).items():
            if length != self._lengths.setdefault(path, length):
                self._warn(
                    f"checkpoints lack `{path.rpartition('/')[2]}`: they contain lists and dicts "
                    "of numbers, texts and small arrays only, up to 16 MiB"
                )

    def restore(self, values: Values, frame: FrameType, *, again: bool) -> dict[str, Any]:
        """Restore values, and return those of local names that the frame itself must assign.

        Args:
            values: the values.
            frame: the function or cell that contains the loop.
            again: True if the saved run was in this process: it may have changed values since.
        """
        rng_alignment.restore(values.generators)
        self._changed |= values.variables.keys() - {*values.unchanged}
        local: dict[str, Any] = {}
        variables = self._variables(frame, local)
        groups = [frozenset(paths) for paths in values.shared]
        roots, first = _roots(variables), self._objects
        now = mutable_objects(roots)
        kept = {path: now[path] for path in values.kept if first.get(path) is now.get(path, now)}
        shared = {path: group for group in groups for path in group}
        decoder = Decoder(shared, kept, roots.values())
        own = _scope(frame)
        edited = set() if again else {*filter(self._is_first(variables, frame), values.unchanged)}
        for path, saved in values.variables.items():
            if path in edited:
                continue
            variable = variables.get(path)
            if variable is None:
                self._create(path, decoder.decode(path, saved, None), variables, own, local)
            elif (new := decoder.decode(path, saved, variable.value)) is not variable.value:
                variable.assign(new)
        for path in decoder.unlike:
            self._warn(
                f"`{path.rpartition('/')[2]}` keeps its present state: the generator in the "
                "checkpoint has other streams"
            )
        return local

    def _is_first(self, variables: dict[str, _Variable], frame: FrameType) -> Callable[[str], bool]:
        """Return a function that returns True for a path whose value is that before the first loop.

        If the saved run had not changed it either, the user may have edited it in between.
        """
        assert self._first is not None
        found, first = self._encoded(variables, frame, frozenset()), self._first
        return lambda path: (
            path in found and first.get(path) == _digest(msgspec.msgpack.encode(found[path]))
        )

    def _create(
        self,
        path: str,
        value: Any,
        variables: dict[str, _Variable],
        own: str,
        local: dict[str, Any],
    ) -> None:
        """Assign a name or an attribute that does not exist yet."""
        scope, _, name = path.rpartition("/")
        owner, _, attribute = path.rpartition(".")
        if name.isidentifier():
            if scope == own:
                (local if scope else self._namespace)[name] = value
            elif not scope:
                self._namespace[name] = value
        elif owner in variables:
            vars(variables[owner].value)[attribute] = value

    def _encoded(
        self, variables: dict[str, _Variable], frame: FrameType, left_out: frozenset[str]
    ) -> dict[str, Any]:
        scope = _scope(frame)
        hidden = {f"{scope}/{name}" if scope else name for name in left_out}
        found = {}
        for path, (value, _) in variables.items():
            if path in hidden or _is_object(value) or self._refused.get(path) == id(value):
                continue
            try:
                found[path] = encode(value)
            except UnsavableError:
                self._refused[path] = id(value)  # the next time, this would take as long
        return found

    def _variables(self, frame: FrameType, local: dict[str, Any]) -> dict[str, _Variable]:
        """Return all variables by path. Assignments to the frame's own names go to `local`."""
        space = self._namespace
        roots = {
            name: _Variable(space[name], _assign_item(space, name))
            for name in self._mentioned
            if name in space
        }
        for number, function in enumerate(_functions(frame)):
            if function.f_locals is function.f_globals:
                continue
            target = local if function is frame else {}
            for name, value in function.f_locals.items():
                if not name.startswith(_HIDDEN):
                    path = f"{_label(number, function)}/{name}"
                    roots[path] = _Variable(value, _assign_item(target, name))
        return dict(_with_attributes(roots))


def _roots(variables: dict[str, _Variable]) -> dict[str, Any]:
    return {path: variable.value for path, variable in variables.items()}


def _lengths(variables: dict[str, _Variable], saved: dict[str, Any]) -> dict[str, int]:
    """Return the lengths of the lists, dicts and sets that are not saved."""
    return {
        path: len(value)
        for path, (value, _) in variables.items()
        if path not in saved and isinstance(value, (list, dict, set, deque))
    }


def can_save(value: Any) -> bool:
    """Return True if checkpoints contain a variable with this value."""
    try:
        encode(value)
    except UnsavableError:
        return _is_object(value)
    return True


def _functions(frame: FrameType) -> list[FrameType]:
    """Return the frames of the user's code from the cell to a frame, outermost first."""
    found: list[FrameType] = []
    now: FrameType | None = frame
    while now is not None:
        if is_users(now.f_globals.get("__name__")):
            found.insert(0, now)
            if now.f_locals is now.f_globals:  # the cell
                break
        now = now.f_back
    return found


def _scope(frame: FrameType) -> str:
    """Return the start of the paths of a frame's names; empty for the cell."""
    if frame.f_locals is frame.f_globals:
        return ""
    return _label(len(_functions(frame)) - 1, frame)


def _label(number: int, frame: FrameType) -> str:
    return f"{number}:{frame.f_code.co_name}"


def _assign_item(target: dict[str, Any], name: str) -> Callable[[Any], object]:
    return lambda value: target.__setitem__(name, value)


def _assign_attribute(owner: Any, name: str) -> Callable[[Any], object]:
    return lambda value: vars(owner).__setitem__(name, value)


def _with_attributes(roots: dict[str, _Variable]) -> Iterator[tuple[str, _Variable]]:
    """Yield variables, and the attributes of the user's objects among them."""
    waiting = deque(roots.items())
    seen: set[int] = set()
    while waiting:
        path, variable = waiting.popleft()
        value = variable.value
        yield path, variable
        if _is_object(value) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(
                (f"{path}.{name}", _Variable(part, _assign_attribute(value, name)))
                for name, part in vars(value).items()
            )


def _is_object(value: Any) -> bool:
    """Return True for an object of a class of the user that is no class of a framework."""
    if type(value) is SimpleNamespace:
        return True
    if isinstance(value, (type, FunctionType)) or not hasattr(value, "__dict__"):
        return False
    kinds = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return is_of_user(value) and not kinds & _FRAMEWORKS


def _mentioned(frames: list[FrameType], namespace: dict[str, Any]) -> set[str]:
    """Return the names in code that runs, and in the functions of the user that it can call."""
    found: set[str] = set()
    waiting = [name for frame in frames for name in code_names(frame.f_code)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        value = namespace.get(name)
        kind = value if callable(value) else type(value)
        if is_of_user(kind):
            for function in functions_of(kind):
                waiting += code_names(function.__code__)
    return found


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
