"""Variables of TensorFlow on each rank, compared after a cancelled collective."""

from __future__ import annotations

from nbdist.records.base import Record


class SeenVariable(Record, frozen=True):
    """A variable that all ranks should have alike.

    Attributes:
        kind: its name without counters, and its type.
        shape: of its value.
        digest: of its value on this rank.
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
    """A variable that all ranks take from one.

    Attributes:
        own: its position on this rank; -1 if this rank does not have it.
        kind: as `SeenVariable` has it.
        shape: of the value.
    """

    own: int
    kind: str
    shape: tuple[int, ...]


class Agreement(Record, frozen=True):
    """What one rank does so that all have the same variables.

    Attributes:
        source: the rank whose values all take.
        copied: the variables, in the same order on all ranks.
        alone: positions of variables that some rank does not have.
        unbuilt: positions of optimizers that are not built on all ranks.
    """

    source: int
    copied: tuple[CopiedVariable, ...] = ()
    alone: tuple[int, ...] = ()
    unbuilt: tuple[int, ...] = ()


class Restored(Record, frozen=True):
    """What the user has to know of one rank after that.

    Attributes:
        changed: names of variables that have another value now.
        alone: names of the user's that hold variables which some rank does not have.
        iterators: names of the user's that hold iterators over data sets.
    """

    changed: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    iterators: tuple[str, ...] = ()
