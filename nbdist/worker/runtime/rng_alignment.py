"""States of the global random generators; between cells they are equal on all ranks."""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import msgspec
import numpy as np

from nbdist.private_api import tensorflow as private_tensorflow
from nbdist.worker.runtime.seeding import ClusterSeed

LIBRARIES = ("random", "NumPy", "TensorFlow", "PyTorch")
"""Libraries with global generators."""

_NUMPYS = "MT19937"


class _Words(msgspec.Struct, frozen=True):
    """State of a Mersenne Twister of Python.

    Attributes:
        version: version of the state.
        words: uint32 values, with the position last.
        gauss: value drawn in advance by `random.gauss`; None if there is none.
    """

    version: int
    words: bytes
    gauss: float | None


class _Eager(msgspec.Struct, frozen=True):
    """State of TensorFlow's eager context.

    Attributes:
        seed: global seed.
        is_of_cluster: True if no cell has set the seed.
        words: generator of the seeds of operations.
    """

    seed: int
    is_of_cluster: bool
    words: _Words


class _Numpy(msgspec.Struct, frozen=True):
    key: bytes
    position: int
    has_gauss: int
    gauss: float


class States(msgspec.Struct, frozen=True):
    """States of the generators; None for a generator that is missing or of another kind."""

    python: _Words
    numpy: _Numpy | None
    eager: _Eager | None
    torch: bytes | None = None

    @classmethod
    def now(cls) -> States:
        """Return the current states."""
        return cls(_words(random.getstate()), _of_numpy(), _of_eager(), _of_torch())

    def digests(self) -> dict[str, int]:
        """Return a digest for each generator, by the name of its library."""
        states = (self.python, self.numpy, self.eager, self.torch)
        return {
            name: zlib.crc32(msgspec.msgpack.encode(state))
            for name, state in zip(LIBRARIES, states, strict=True)
            if state is not None
        }

    def packed(self) -> bytes:
        """Encode the states for `restore` on another rank."""
        return msgspec.msgpack.encode(self)


def restore(packed: bytes) -> None:
    """Set the generators to the states of another rank."""
    states = msgspec.msgpack.decode(packed, type=States)
    random.setstate(_state(states.python))
    if states.numpy is not None and _of_numpy() is not None:
        own, key = states.numpy, np.frombuffer(states.numpy.key, np.uint32)
        np.random.set_state((_NUMPYS, key, own.position, own.has_gauss, own.gauss))
    context = _context()
    if states.eager is not None and context is not None:
        seed = states.eager.seed
        context._set_global_seed(ClusterSeed(seed) if states.eager.is_of_cluster else seed)
        context._rng.setstate(_state(states.eager.words))
    torch = sys.modules.get("torch")
    if states.torch is not None and torch is not None:
        torch.set_rng_state(torch.from_numpy(np.frombuffer(states.torch, np.uint8).copy()))


def _words(state: tuple[Any, ...]) -> _Words:
    version, words, gauss = state
    return _Words(version, np.array(words, np.uint32).tobytes(), gauss)


def _state(words: _Words) -> tuple[Any, ...]:
    numbers = np.frombuffer(words.words, np.uint32).tolist()
    return words.version, tuple(numbers), words.gauss


def _of_numpy() -> _Numpy | None:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != _NUMPYS:
        return None
    own = state["state"]
    return _Numpy(own["key"].tobytes(), own["pos"], state["has_gauss"], state["gauss"])


def _of_eager() -> _Eager | None:
    context = _context()
    if context is None or not isinstance(context._seed, int):
        return None
    is_of_cluster = isinstance(context._seed, ClusterSeed)
    return _Eager(int(context._seed), is_of_cluster, _words(context._rng.getstate()))


def _of_torch() -> bytes | None:
    """Return the state of the CPU's generator of PyTorch; None if PyTorch is not imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_rng_state().numpy().tobytes()


def _context() -> Any:
    """Return TensorFlow's eager context; None if TensorFlow is not imported."""
    module = private_tensorflow.LIBRARY.loaded("context")
    return None if module is None else module.context()
