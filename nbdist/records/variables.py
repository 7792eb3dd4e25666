"""Variables of TensorFlow on each rank, compared after a cancelled collective."""

from __future__ import annotations

from nbdist.records.base import Record


class SeenVariable(Record, frozen=True):
    """A variable that should be equal on all ranks.

    Attributes:
        kind: name without counters, and type.
        shape: shape of the value.
        digest: digest of the value on this rank.
    """

    kind: str
    shape: tuple[int, ...]
    digest: int


class SeenOptimizer(Record, frozen=True):
    """An optimizer of Keras.

    Attributes:
        variable: the position of its `iterations` among the variables.
        built: the number of its variables; 0 if it is not built.
    """

    variable: int
    built: int


class Survey(Record, frozen=True):
    """The variables of one rank.

    Attributes:
        next_key: an instance key that no collective of this rank has used.
        is_between_steps: the last cell did not end in a collective.
        variables: in the order in which they were created.
        optimizers: those whose `iterations` is among the variables.
    """

    next_key: int
    is_between_steps: bool
    variables: tuple[SeenVariable, ...] = ()
    optimizers: tuple[SeenOptimizer, ...] = ()


class CopiedVariable(Record, frozen=True):
    """A variable that all ranks copy from one rank.

    Attributes:
        own: position on this rank; -1 if it does not exist there.
        kind: see `SeenVariable`.
        shape: shape of the value.
    """

    own: int
    kind: str
    shape: tuple[int, ...]


class Agreement(Record, frozen=True):
    """Actions of one rank that make variables equal on all ranks.

    Attributes:
        source: rank whose values all ranks copy.
        copied: copied variables, in the same order on all ranks.
        alone: positions of variables that are missing on some rank.
        unbuilt: positions of optimizers that are not built on all ranks.
    """

    source: int
    copied: tuple[CopiedVariable, ...] = ()
    alone: tuple[int, ...] = ()
    unbuilt: tuple[int, ...] = ()


class Restored(Record, frozen=True):
    """Effects on one rank that the user must know.

    Attributes:
        changed: names of variables with a new value.
        alone: user names of variables that are missing on some rank.
        iterators: user names of iterators over data sets.
    """

    changed: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    iterators: tuple[str, ...] = ()
