"""Comparisons of the ranks of a program between its cells, the same as in a notebook."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nbdist.cells.names import Names
from nbdist.cells.rank_comparison import differing_generators, differing_values
from nbdist.errors import AnotherRankError, StartError, StepError
from nbdist.records import Replicated
from nbdist.utils.rank_ranges import ranks
from nbdist.worker import cell_scope
from nbdist.worker.lifting import passes
from nbdist.worker.runtime import rng_alignment

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence
    from pathlib import Path

    from nbdist.worker.runtime.context import Worker
    from nbdist.worker.script.rendezvous import Connection


_MOST_FILES = 5


class RankChecks:
    """Comparisons of this rank with the others.

    Args:
        worker: this rank.
        connection: connection to the other ranks.
    """

    def __init__(self, worker: Worker, connection: Connection) -> None:
        self._worker = worker
        self._connection = connection

    def compare_files(self, program: Path) -> None:
        """Compare the program and the modules beside it between the ranks. Collective.

        Args:
            program: file of the program on this rank.

        Raises:
            StartError: a host has another text. All ranks raise it.
        """
        if self._worker.world_size == 1:
            return
        texts = self._connection.exchange(msgspec.json.encode(_digests(program)))
        every = [msgspec.json.decode(text, type=dict[str, int]) for text in texts]
        odd = [rank for rank, own in enumerate(every) if own != every[0]]
        if odd:
            own, first = every[odd[0]], every[0]
            names = sorted(n for n in own.keys() | first.keys() if own.get(n) != first.get(n))
            raise StartError(
                f"rank {ranks(odd)} has another text of {', '.join(names[:_MOST_FILES])} than rank "
                "0: copy the program's folder to all hosts again"
            )

    def align_generators(self) -> str:
        """Set the random generators to those of rank 0 if ranks differ. Collective.

        Returns:
            A message; empty if the generators of all ranks were equal.
        """
        if self._worker.world_size == 1:
            return ""
        states = rng_alignment.States.now()
        own = states.digests()
        numbers = [own.get(name, 0) for name in rng_alignment.LIBRARIES]
        every = self._connection.gather(np.array(numbers, np.uint32).view(np.int32))
        named = [dict(zip(rng_alignment.LIBRARIES, row, strict=True)) for row in every.tolist()]
        present = [{name: number for name, number in one.items() if number} for one in named]
        message = differing_generators(dict(enumerate(present)))
        if message:
            text = msgspec.json.encode(b"" if self._worker.rank else states.packed())
            rank_0 = self._connection.exchange(text)[0]
            rng_alignment.restore(msgspec.json.decode(rank_0, type=bytes))
        return message

    def end_cell(self, namespace: dict[str, Any], statements: Sequence[ast.stmt]) -> None:
        """Check a cell that is not a step at its end. Collective.

        Args:
            namespace: names of the program.
            statements: statements of the cell, on the lines of the program.

        Raises:
            StepError: values that must be equal differ on this rank. The other ranks raise
                AnotherRankError. Or the loops of a resumed cell did not reach their checkpoint.
        """
        worker = self._worker
        cell_scope.check_options_used(worker)
        passes.check_reached(worker)
        own = cell_scope.replicated_values(worker, namespace)
        if worker.world_size == 1 or worker.strategy is None:
            return
        texts = self._connection.exchange(msgspec.json.encode(own))
        replicated = [msgspec.json.decode(text, type=tuple[Replicated, ...]) for text in texts]

        def lines() -> dict[str, int]:
            names = Names()
            names.scan(statements)
            return names.bound

        found = differing_values(worker.strategy, dict(enumerate(replicated)), lines)
        if found is not None:
            raise (StepError if found.rank == worker.rank else AnotherRankError)(found.text)


def _digests(program: Path) -> dict[str, int]:
    """Return CRC-32 of a program and of the Python modules and packages beside it, by path."""
    folder = program.parent
    packages = (path.parent for path in folder.glob("*/__init__.py"))
    files = [*folder.glob("*.py"), *itertools.chain(*(p.rglob("*.py") for p in packages))]
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in files}
