"""Values of Python in a checkpoint: numbers, texts, small arrays, containers and generators.

Training loops change such values outside of their steps: lists of losses, counters, the best loss.
Lists, dicts, arrays and generators are restored in place, because other objects may refer to them.
"""

from __future__ import annotations

import array
import collections
import random
import sys
from typing import Any

import numpy as np

MOST_BYTES = 16 << 20
"""Largest size of one value."""

_BYTES_OF_ITEM = 64
"""Size of an object in memory, with its part of the time that encoding takes."""

_PLAIN = {type(None), bool, float, str, bytes}
_INTEGERS = range(-(2**63), 2**64)
_DICTS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
}


class UnsavableError(Exception):
    """A value that is too large, or that contains objects of other types."""


def encode(value: Any) -> Any:
    """Convert a value to types that MessagePack can encode.

    Raises:
        UnsavableError: see the class.
    """
    return _Encoder().encode(value)


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
            return {"dict": [(self.encode(k), self.encode(v)) for k, v in list(value.items())]}
        if kind is list and {*map(type, value)} == {float}:  # losses of many steps
            self._take(8 * len(value))
            return {"floats": array.array("d", value).tobytes()}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: [self.encode(item) for item in list(value)]}
        if _is_named(value):
            return {"named": [self.encode(item) for item in value]}
        return self._encode_array_or_generator(value)

    def _encode_array_or_generator(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.random.Generator:
            return {"generator": self.encode(value.bit_generator.state)}
        if kind is np.random.RandomState:
            return {"random_state": self.encode(value.get_state(legacy=False))}
        if kind is random.Random:
            return {"random": self.encode(value.getstate())}
        if (found := _as_array(value)) is not None:
            form, values = found
            self._take(values.nbytes)
            dtype = values.dtype.name if values.dtype.kind == "V" else values.dtype.str  # bfloat16
            packed = {"type": dtype, "shape": values.shape, "data": values.tobytes()}
            return {"array": packed, "form": form}
        raise UnsavableError(kind.__name__)

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
    if not isinstance(saved, dict):
        return saved
    (kind, content), *rest = saved.items()
    if kind == "integer":
        return int(content)
    if kind == "array":
        return _restored_array(content, rest[0][1], now)
    if kind in ("generator", "random_state", "random"):
        return _restored_generator(kind, decode(content), now)
    if kind == "dict":
        return _restored_dict(content, now)
    if kind == "named":
        parts = now if _is_named(now) and len(now) == len(content) else [None] * len(content)
        new = [decode(saved, part) for saved, part in zip(content, parts, strict=True)]
        return type(now)(*new) if parts is now else tuple(new)
    if kind == "floats":
        kind, content = "list", array.array("d", content).tolist()
    return _restored_sequence(kind, content, now)


def _restored_dict(content: Any, now: Any) -> Any:
    before = now if type(now) in _DICTS else {}
    new = {}
    for saved_key, saved in content:
        key = decode(saved_key)
        new[key] = decode(saved, before.get(key))
    before.clear()
    before.update(new)
    return before


def _restored_sequence(kind: str, content: Any, now: Any) -> Any:
    wanted: Any = next(one for one, name in _SEQUENCES.items() if name == kind)
    is_alike = type(now) is wanted
    before = list(now) if is_alike and wanted in (list, tuple) else []
    old = [*before[: len(content)], *[None] * (len(content) - len(before))]
    new = [decode(saved, item) for saved, item in zip(content, old, strict=True)]
    if not is_alike or wanted in (tuple, frozenset):
        return wanted(new)
    now.clear()
    if wanted is set:
        now.update(new)
    else:
        now.extend(new)
    return now


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
