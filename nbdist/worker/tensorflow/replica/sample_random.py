"""Random numbers in a replica: each row of the global batch has its own, as on one device.

Replicas run the same program with the same seeds, so each would draw the same numbers for different
rows. nbdist therefore replaces a draw whose first dimension is the replica's number of rows by a
slice of the draw for the global batch. A draw of another shape, such as noise for weights, stays
the same on all replicas.

If the number of rows is static, the first dimension of weights may be equal to it. `Draws`
distinguishes them by a trace for another number of rows: the first dimension of weights stays the
same.

Philox, TensorFlow's generator, is counter-based: draw i depends only on the key and `counter + i`
(Salmon et al., 2011, doi:10.1145/2063384.2063405). Stateless draws start at the counter of the
replica's first row and have no extra cost. Draws by rejection (truncated normal) and draws of
stateful operations (`tf.random.normal`) are made for the global batch, and each replica takes its
rows. Written for TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from nbdist.private_api.keras import LIBRARY
from nbdist.private_api.tensorflow import (
    gen_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    tensor_util,
)
from nbdist.worker.runtime import context
from nbdist.worker.runtime.replaced_attributes import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.worker.tensorflow.replica.batch_share import Count, Division, Share

_COUNTED = (
    "stateless_random_uniform_v2",
    "stateless_random_normal_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
)
"""Operations whose draw i uses its own part of the generator's blocks of 16 bytes."""

_SLICED = {
    gen_stateless_random_ops_v2: ("stateless_truncated_normal_v2",),
    gen_random_ops: (
        "random_standard_normal",
        "random_uniform",
        "random_uniform_int",
        "truncated_normal",
    ),
}
_LAYERS = f"{LIBRARY.path('layers')}."
_DRAWING = (
    "tensorflow.",
    f"{LIBRARY.path('backend')}.",
    f"{LIBRARY.path('random')}.",
    __name__,
)
"""Modules between the code that draws and the operation."""

_OTHER_NUMBERS = (
    "the step draws random numbers with an operation that has a state, such as `tf.random.normal`: "
    "they are other ones than on one device. For the same ones, use a `tf.random.Generator`, or "
    "`tf.random.stateless_normal` with a seed of each step"
)
_BY_LOGITS = {gen_random_ops: "multinomial", gen_stateless_random_ops: "stateless_multinomial"}


class Draws:
    """Draws of a step, in the order of its trace.

    Attributes:
        is_ambiguous: True if code outside of Keras layers has drawn with the replica's number of
            rows, and no trace for another number of rows exists.
        is_global: True inside of a draw for the global batch.
    """

    def __init__(self) -> None:
        self.is_ambiguous = False
        self.is_global = False
        self._of_rows: list[bool] | None = None
        self._next = 0

    def begin(self, *, learns: bool) -> None:
        """Begin a trace. Set `learns` if every replica has all rows of a batch of another size."""
        self._next = 0
        if learns:
            self._of_rows = []

    def learn(self, first: int | None, rows: Count) -> None:
        """Record the first dimension of a draw in a trace for another number of rows."""
        if self._of_rows is not None:
            self._of_rows.append(first is None or (isinstance(rows, int) and first == rows))

    def are_rows(self) -> bool:
        """Return True if the next draw is for rows, given that its first dimension matches."""
        number, self._next = self._next, self._next + 1
        if self._of_rows is None:
            self.is_ambiguous |= not _is_in_layer()
            return True
        return number >= len(self._of_rows) or self._of_rows[number]

    def skip(self) -> None:
        """Skip a draw of another shape."""
        self._next += 1


@contextlib.contextmanager
def installed(shares: Division, draws: Draws) -> Iterator[None]:
    """Draw for the rows of the global batch in replicas.

    Args:
        shares: division of the global batch over replicas.
        draws: draws of the step. Draws of a whole batch are recorded.
    """
    if shares.replicas == 1:
        yield
        return
    draws.begin(learns=shares.whole)
    ours: list[tuple[Any, str, Callable[..., Any]]] = [
        *((gen_stateless_random_ops_v2, name, _counted) for name in _COUNTED),
        *((owner, name, _sliced) for owner, names in _SLICED.items() for name in names),
        *((owner, name, _padded) for owner, name in _BY_LOGITS.items()),
    ]
    with contextlib.ExitStack() as changes:
        for owner, name, draw in ours:
            find = _Find(shares, draws, has_state=owner is gen_random_ops)
            by_rows: Any = functools.partial(draw, find, getattr(owner, name))
            changes.enter_context(replaced(owner, name, by_rows))
        yield


def _counted(
    find: _Find, draw: Callable[..., Any], shape: Any, *, counter: Any, **given: Any
) -> Any:
    """Return the replica's rows of a draw, with a counter that starts at its first row."""
    rows = find(shape)
    if rows is None:
        return draw(shape, counter=counter, **given)
    share, times = rows
    dtype = given["minval"].dtype if "minval" in given else tf.as_dtype(given["dtype"])
    per_block = 2 if dtype.size == 8 else 4
    dims = tf.cast(tf.convert_to_tensor(shape), tf.int64)
    start = tf.cast(share.offset * times, tf.int64) * tf.reduce_prod(dims[1:])
    count = tf.reduce_prod(dims)
    skipped = tf.cast(start // per_block, tf.uint64)
    counter = tf.concat([counter[:1] + skipped, counter[1:]], 0)
    flat = draw(tf.reshape(count + per_block, [1]), counter=counter, **given)
    own = tf.reshape(tf.slice(flat, [start % per_block], [count]), dims)
    return tf.ensure_shape(own, _static(shape))


def _sliced(find: _Find, draw: Callable[..., Any], shape: Any, *args: Any, **given: Any) -> Any:
    """Return the replica's rows of a draw for the global batch."""
    rows = find(shape)
    if rows is None:
        return draw(shape, *args, **given)
    share, times = rows
    dims = tf.convert_to_tensor(shape)
    total = tf.cast(tf.reshape(share.total * times, [1]), dims.dtype)
    with find.global_draw():
        every = draw(tf.concat([total, dims[1:]], 0), *args, **given)
    first = share.offset * times
    return tf.ensure_shape(every[first : first + share.rows * times], _static(shape))


def _padded(find: _Find, draw: Callable[..., Any], logits: Any, *args: Any, **given: Any) -> Any:
    """Return the replica's rows of samples. Each row of logits uses its own part of the draws."""
    logits = tf.convert_to_tensor(logits)
    rows = find(tf.shape(logits))
    if rows is None:
        return draw(logits, *args, **given)
    share, times = rows
    first, own = share.offset * times, share.rows * times
    around = tf.stack([[first, share.total * times - first - own], [0, 0]])
    every = draw(tf.pad(logits, around), *args, **given)
    return every[first : first + own]


class _Find:
    """Find the rows of this replica in a draw.

    Args:
        shares: division of the global batch over replicas.
        draws: draws of the step.
        has_state: True for an operation with a state.
    """

    def __init__(self, shares: Division, draws: Draws, *, has_state: bool) -> None:
        self._shares = shares
        self._draws = draws
        self._has_state = has_state

    def __call__(self, shape: Any) -> tuple[Share, Count] | None:
        """Return this replica's share and the multiple of its rows in the first dimension.

        Returns None if the first dimension does not belong to rows. A static first dimension
        belongs to the batch only if the replica's number of rows is static and equal to it. A
        dimension that is not static, as `tf.shape(batch)[0]`, belongs to the batch.
        """
        is_outside = tf.distribute.get_replica_context() is None
        if is_outside or self._draws.is_global or not _static(shape):
            return None
        worker = context.if_any()
        if self._has_state and worker is not None:
            worker.reporter.note_once("strategy", _OTHER_NUMBERS)
        share, (first, *_) = self._shares.here(), _static(shape)
        if self._shares.whole:
            self._draws.learn(first, share.rows)
            return None
        if isinstance(share.rows, int):
            if first == share.rows:
                return (share, 1) if self._draws.are_rows() else None
            self._draws.skip()
        if first is not None:
            return None
        return share, tf.cast(tf.convert_to_tensor(shape)[0], tf.int32) // share.rows

    @contextlib.contextmanager
    def global_draw(self) -> Iterator[None]:
        """Draw for the global batch: draws inside, as of a trial, are not divided again."""
        self._draws.is_global = True
        try:
            yield
        finally:
            self._draws.is_global = False


def _is_in_layer() -> bool:
    """Return True if a Keras layer draws. It draws for the rows of its inputs."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_DRAWING):
            return bool(module.startswith(_LAYERS))
        frame = frame.f_back
    return False


def _static(shape: Any) -> list[int | None]:
    """Return the dimensions of a shape. None for those that are not static."""
    dims: list[int | None] = tensor_util.constant_value_as_shape(
        tf.convert_to_tensor(shape)
    ).as_list()
    return dims
