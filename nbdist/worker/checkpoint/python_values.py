"""Values of Python in a checkpoint: numbers, texts, small arrays, containers and generators.

Training loops change such values outside of their steps: lists of losses, counters, the best loss.
Lists, dicts, arrays and generators are restored in place, because other objects may refer to them.
"""

from __future__ import annotations

import array
import collections
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from nbdist.worker.checkpoint import framework_generators

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_BYTES = 16 << 20
"""Largest size of one value."""

_BYTES_OF_ITEM = 64
"""Size of an object in memory, with its part of the time that encoding takes."""

_PLAIN = {type(None), bool, float, str, bytes}
_INTEGERS = range(-(2**63), 2**64)
_DICTS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_MOST_OBJECTS = 10_000
"""Number of objects in one variable that are searched for names that share them."""

_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}
_TYPES: dict[str, Any] = {name: kind for kind, name in _SEQUENCES.items()}


class UnsavableError(Exception):
    """A value that is too large, or that contains objects of other types."""


def encode(value: Any) -> Any:
    """Convert a value to types that MessagePack can encode.

    Raises:
        UnsavableError: see the class.
    """
    try:
        return _Encoder().encode(value)
    except RecursionError:
        raise UnsavableError("it contains itself, or is nested too deeply") from None


class _Encoder:
    """Encoder of one value. It ends early if the value is too large."""

    def __init__(self) -> None:
        self._left = MOST_BYTES

    def encode(self, value: Any) -> Any:
        kind = type(value)
        self._take(len(value) if kind in (str, bytes) else _BYTES_OF_ITEM)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if value in _INTEGERS else {"integer": str(value)}
        if kind in _DICTS:
            items = [(self.encode(k), self.encode(v)) for k, v in list(value.items())]
            return {"dict": items, "type": kind.__name__}
        if kind is list and {*map(type, value)} == {float}:  # losses of many steps
            self._take(8 * len(value))
            return {"floats": array.array("d", value).tobytes()}
        if kind in _SEQUENCES:
            content = {_SEQUENCES[kind]: [self.encode(item) for item in list(value)]}
            return content | ({"most": value.maxlen} if kind is collections.deque else {})
        if _is_named(value):
            return {"named": [self.encode(item) for item in value], "type": _type_name(value)}
        return self._encode_array_or_generator(value)

    def _encode_array_or_generator(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.random.Generator:
            return {"generator": self.encode(value.bit_generator.state)}
        if kind is np.random.RandomState:
            return {"random_state": self.encode(value.get_state(legacy=False))}
        if kind is random.Random:
            return {"random": self.encode(value.getstate())}
        if framework_generators.is_generator(value):
            return {"framework_generator": self.encode(framework_generators.state_of(value))}
        if (found := _as_array(value)) is not None:
            form, values = found
            self._take(values.nbytes)
            dtype = values.dtype.name if values.dtype.kind == "V" else values.dtype.str  # bfloat16
            packed = {"type": dtype, "shape": values.shape, "data": values.tobytes()}
            return {"array": packed, "form": form}
        if (leaves := leaves_of(value)) is not None:
            return {"tree": [self._leaf(leaf) for leaf in leaves], "type": _type_name(value)}
        raise UnsavableError(kind.__name__)

    def _leaf(self, leaf: Any) -> Any:
        """Encode a leaf of a pytree. Functions and other constants remain those of the template."""
        try:
            return self.encode(leaf)
        except UnsavableError:
            if self._left < 0 or hasattr(leaf, "dtype"):  # an array is no constant
                raise
            return {"constant": True}

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise UnsavableError(f"more than {MOST_BYTES} bytes")


def decode(saved: Any, now: Any = None) -> Any:
    """Return a value that `encode` has converted.

    Args:
        saved: the result of `encode`.
        now: the present value. If it is a container, array or generator of the same type, it
            receives the saved contents and is returned.
    """
    return Decoder({}, mutable_objects({"": now})).decode("", saved, now)


class Decoder:
    """Decoder of the variables of one scope. Names that shared an object share one again.

    Args:
        shared: paths to each saved object with several, by each of them.
        kept: present objects by path that receive the saved contents in place.
        templates: present values. A saved pytree needs one of its type for its structure.

    Attributes:
        unlike: paths to generators that have other arrays than the saved ones and stay as they are.
    """

    def __init__(
        self,
        shared: dict[str, frozenset[str]],
        kept: Mapping[str, Any],
        templates: Iterable[Any] = (),
    ) -> None:
        self._groups = shared
        self._kept = kept
        self._templates = templates
        self._shared: dict[frozenset[str], Any] = {}
        self.unlike: list[str] = []

    def decode(self, path: str, saved: Any, now: Any) -> Any:
        """Return a saved value. `now` is the present value of the path."""
        if not isinstance(saved, dict):
            return saved
        group = self._groups.get(path)
        if group is not None and group in self._shared:
            return self._shared[group]
        usable = next((self._kept[one] for one in group or (path,) if one in self._kept), None)
        (kind, content), *rest = saved.items()
        if kind == "integer":
            return int(content)
        if kind == "array":
            found = _restored_array(content, rest[0][1], usable)
        elif kind in ("generator", "random_state", "random"):
            found = _restored_generator(kind, decode(content), usable)
        elif kind == "framework_generator":
            self._set_generator(path, decode(content), usable)
            found = now if usable is None else usable
        elif kind == "tree":
            found = self._tree(content, rest[0][1], now)
        elif kind == "dict":
            found = self._dict(path, content, rest[0][1], now, usable)
        else:
            found = self._sequence(path, kind, content, now, usable, [v for _, v in rest])
        if group is not None:
            self._shared[group] = found
        return found

    def _set_generator(self, path: str, state: list[Any], now: Any) -> None:
        """Set the state of the present generator. Without one, the name stays as it is."""
        if framework_generators.is_generator(now) and not framework_generators.set_state(
            now, state
        ):
            self.unlike.append(path)

    def _tree(self, leaves: list[Any], name: str, now: Any) -> Any:
        for template in (now, *self._templates):
            if _type_name(template) == name:
                before, structure = sys.modules["jax"].tree.flatten(template)
                if len(before) == len(leaves):
                    new = [
                        old if isinstance(leaf, dict) and "constant" in leaf else decode(leaf)
                        for leaf, old in zip(leaves, before, strict=True)
                    ]
                    return sys.modules["jax"].tree.unflatten(structure, new)
        return now

    def _dict(self, path: str, content: Any, name: str, now: Any, usable: Any) -> Any:
        present = now if type(now) in _DICTS else {}
        new = {}
        for saved_key, saved in content:
            key = decode(saved_key)
            new[key] = self.decode(f"{path}[{key!r}]", saved, present.get(key))
        if type(usable) in _DICTS:
            usable.clear()
            usable.update(new)
            return usable
        if type(now) is collections.defaultdict:
            return collections.defaultdict(now.default_factory, new)
        kind: Any = next((one for one in _DICTS if one.__name__ == name), dict)
        return dict(new) if kind is collections.defaultdict else kind(new)

    def _sequence(
        self, path: str, kind: str, content: Any, now: Any, usable: Any, rest: list[Any]
    ) -> Any:
        if kind == "floats":
            kind, content = "list", array.array("d", content).tolist()
        wanted: Any = _named_type(rest[0], now) if kind == "named" else _TYPES[kind]
        is_ordered = kind in ("list", "tuple", "named")
        present = list(now) if is_ordered and isinstance(now, (list, tuple)) else []
        present = [*present[: len(content)], *[None] * (len(content) - len(present))]
        parts = zip(content, present, strict=True)
        new = [self.decode(f"{path}[{i}]", saved, part) for i, (saved, part) in enumerate(parts)]
        if kind == "named":
            return wanted(*new) if wanted is not None else tuple(new)
        if type(usable) is not wanted or wanted in (tuple, frozenset):
            return wanted(new, *rest)
        usable.clear()
        if wanted is set:
            usable.update(new)
        else:
            usable.extend(new)
        return usable


def is_mutable(value: Any) -> bool:
    """Return True for a list, dict, set, deque or random generator."""
    kinds = (list, dict, set, collections.deque, *_GENERATORS)
    return isinstance(value, kinds) or framework_generators.is_generator(value)


def mutable_objects(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists, dicts, sets, arrays and generators that variables lead to, by path."""
    found: dict[str, Any] = {}
    for root, value in variables.items():
        left = _MOST_OBJECTS
        waiting = [(root, value)]
        while waiting and left > 0:
            path, part = waiting.pop()
            left -= 1
            if is_mutable(part) or isinstance(part, np.ndarray):
                found[path] = part
            if type(part) in _DICTS:
                waiting += ((f"{path}[{key!r}]", item) for key, item in part.items())
            elif type(part) in (list, tuple) and len(part) <= left:
                waiting += ((f"{path}[{i}]", item) for i, item in enumerate(part))
    return found


def shared_paths(objects: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of each object that several paths lead to."""
    paths: dict[int, list[str]] = {}
    for path, value in objects.items():
        paths.setdefault(id(value), []).append(path)
    return [group for group in paths.values() if len(group) > 1]


def leaves_of(value: Any) -> list[Any] | None:
    """Return the leaves of a pytree whose type JAX knows, such as a train state; None for others.

    Objects of Flax NNX do not count, because they change in place.
    """
    jax = sys.modules.get("jax")
    modules = {kind.__module__ for kind in type(value).__mro__}
    if jax is None or any(name.startswith("flax.nnx.") for name in modules):
        return None
    leaves: list[Any] = jax.tree.leaves(value)
    return None if not leaves or leaves[0] is value else leaves


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _named_type(name: str, now: Any) -> Any:
    """Return the class of a named tuple; None if it is neither in its module nor that of `now`."""
    module, _, qualified = name.partition(":")
    if _is_named(now) and type(now).__qualname__ == qualified:
        return type(now)
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _is_named(value: Any) -> bool:
    """Return True for a named tuple, such as a state of Optax."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _as_array(value: Any) -> tuple[str, np.ndarray] | None:
    """Return the form and the elements of an array or a scalar; None for other values."""
    if isinstance(value, np.generic):
        return ("scalar", np.asarray(value)) if not value.dtype.hasobject else None
    if type(value) is np.ndarray:
        is_simple = not value.dtype.hasobject and value.dtype.names is None
        return ("numpy", value) if is_simple else None
    jax, tensorflow = sys.modules.get("jax"), sys.modules.get("tensorflow")
    if jax is not None and isinstance(value, jax.Array):
        return _jax_array(jax, value)
    if tensorflow is not None and isinstance(value, tensorflow.Tensor) and hasattr(value, "numpy"):
        values = np.asarray(value.numpy())
        return ("tensorflow", values) if not values.dtype.hasobject else None
    return None


def _jax_array(jax: Any, value: Any) -> tuple[str, np.ndarray] | None:
    if isinstance(value, jax.core.Tracer) or value.is_deleted():
        return None
    if not (value.is_fully_addressable or value.is_fully_replicated):
        return None
    if value.nbytes > MOST_BYTES:  # copies nothing from the device
        raise UnsavableError(f"more than {MOST_BYTES} bytes")
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        form = f"key {jax.random.key_impl(value)}"
        return form, np.asarray(jax.random.key_data(value))
    return "jax", np.asarray(value)


def _restored_array(packed: Any, form: str, now: Any) -> Any:
    dtype = np.dtype(packed["type"])
    values = np.frombuffer(packed["data"], dtype).reshape(packed["shape"]).copy()
    if form == "scalar":
        return values[()]
    if form == "tensorflow":
        return sys.modules["tensorflow"].constant(values)
    if form == "numpy":
        is_alike = type(now) is np.ndarray and (now.dtype, now.shape) == (dtype, values.shape)
        if not is_alike or not now.flags.writeable:
            return values
        now[...] = values
        return now
    jax = sys.modules["jax"]
    restored = jax.numpy.asarray(values)
    if form.startswith("key "):
        return jax.random.wrap_key_data(restored, impl=form.removeprefix("key "))
    return restored


def _restored_generator(kind: str, state: Any, now: Any) -> Any:
    if kind == "random":
        python = now if type(now) is random.Random else random.Random()  # noqa: S311 - as saved
        python.setstate(state)
        return python
    if kind == "random_state":
        old = now if type(now) is np.random.RandomState else np.random.RandomState()
        old.set_state(state)
        return old
    own, name = now, state["bit_generator"]
    if type(own) is not np.random.Generator or type(own.bit_generator).__name__ != name:
        own = np.random.Generator(getattr(np.random, name)())
    own.bit_generator.state = state
    return own
