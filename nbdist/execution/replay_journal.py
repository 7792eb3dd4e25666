"""Journal of cells and pushed objects of a cluster, stored in its folder while the workers live."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

import msgspec

from nbdist.cells.dependencies import (
    CellNames,
    Entry,
    Needed,
    names_of,
    needed,
    needed_with_training,
)
from nbdist.errors import ReplayError, UsageError
from nbdist.records import Planning, short_id
from nbdist.utils.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from nbdist.cells.dependencies import OwnTexts
    from nbdist.execution.result import Run
    from nbdist.records import CellRequest, RunningCell, StepRequest
    from nbdist.utils.files import LateFiles

LARGE_BYTES = 16 << 20
"""Largest pickle that is sent to each rank by itself, and stored in the journal's entry."""


class Journal:
    """Journal of cells and pushed objects, with one file for each.

    Args:
        folder: the folder of the files. It is created if it does not exist.
        files: writes the files.
    """

    def __init__(self, folder: Path, files: LateFiles) -> None:
        self._folder = folder
        self._files = files
        folder.mkdir(mode=0o700, exist_ok=True)
        paths = sorted(folder.glob("*.msgpack"))
        self._entries = [msgspec.msgpack.decode(p.read_bytes(), type=Entry) for p in paths]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, in their order."""
        return tuple(self._entries)

    def note_deleted(self, cells: Collection[str]) -> None:
        """Mark the entries of cells that were deleted from the notebook, by their ids."""
        for number, entry in enumerate(self._entries, 1):
            if entry.cell in cells and not entry.deleted:
                self._write(number, msgspec.structs.replace(entry, deleted=True))

    def clear(self) -> None:
        """Delete all entries, after fresh workers have started."""
        self._entries.clear()
        self._files.settle()
        for path in self._folder.iterdir():
            path.unlink()

    def resized(self, before: int, after: int) -> None:
        """Apply entries of all workers to the new number of workers, which have run none.

        Args:
            before: the number of workers before.
            after: the number of workers now.
        """
        for number, entry in enumerate(self._entries, 1):
            was_of_all = len(entry.ranks) >= before  # earlier, the cluster may have been larger
            ranks = tuple(range(after)) if was_of_all else entry.ranks
            self._write(number, msgspec.structs.replace(entry, ranks=ranks, gone=True))

    def repeated(self, entries: Sequence[Entry]) -> None:
        """Mark the entries that fresh workers have repeated, and the others as gone."""
        present = {id(entry) for entry in entries}
        for number, entry in enumerate(self._entries, 1):
            gone = id(entry) not in present
            if entry.gone != gone:
                self._write(number, msgspec.structs.replace(entry, gone=gone))

    def add_cell(
        self,
        cell: RunningCell | None,
        run: Run,
        failed: bool,
        *,
        generators: bytes = b"",
        fits: Mapping[int, bytes] | None = None,
        modules: dict[str, str] | None = None,
    ) -> None:
        """Add a cell that ended, failed or was interrupted. A plan is ignored.

        Args:
            cell: the cell; None if none began.
            run: its result.
            failed: True if it did not end.
            generators: last known states of the random generators, packed.
            fits: records of the fits of each rank, packed.
            modules: digest of each of the user's own modules that the workers had.
        """
        if cell is None or cell.request.is_plan:
            return
        for number, entry in enumerate(self._entries, 1):
            if entry.deleted and entry.cell == cell.notebook_cell:  # restored, and run again
                self._write(number, msgspec.structs.replace(entry, deleted=False))
        request, step = cell.request, cell.request.step
        changes = run.begun.changes if run.begun is not None else ()
        if step is None:
            names = names_of(request.source)
            changed = tuple(dict.fromkeys((*names.changes, *changes)))
            names = msgspec.structs.replace(names, changes=changed)
        else:
            names = msgspec.structs.replace(_names_of_step(step), trains=changes)
        known = self.generators()
        has_layout = step is not None and step.options.planning != Planning()
        kind: Literal["cell", "step"] = "cell" if step is None else "step"
        self._add(
            Entry(
                kind,
                names,
                cell.ranks,
                msgspec.structs.replace(request, fits=dict(fits or {})),
                once=cell.options.once,
                failed=failed,
                run=cell.run,
                trained=run.begun is not None or bool(run.state and run.state.kind),
                loops=step is None and run.begun is not None,
                drew=bool(known) and generators != known,
                generators=generators if generators != known else b"",
                modules=modules or {},
                cell=cell.notebook_cell,
                plan=run.plan if has_layout else None,
            )
        )

    def new_spool(self) -> Spool:
        """Return a receiver of pickled objects. Its file is stored with the journal."""
        return Spool(self._folder / f"{secrets.token_hex(8)}.pickle", LARGE_BYTES)

    def add_push(self, names: Iterable[str], payload: bytes | Path, ranks: Sequence[int]) -> None:
        """Add pushed objects. `payload` contains them pickled, or is the file of the pickle."""
        bound = tuple(sorted(names))
        pushed = Entry("push", CellNames(binds=bound, sure=bound), tuple(ranks))
        stored = {"payload": payload} if isinstance(payload, bytes) else {"file": str(payload)}
        self._add(msgspec.structs.replace(pushed, **stored))

    def needed(
        self,
        request: CellRequest,
        saved: Iterable[str],
        world_size: int,
        own: OwnTexts | None = None,
    ) -> Needed:
        """Return the entries to repeat for a run.

        Args:
            request: the run.
            saved: the names whose values its checkpoint contains.
            world_size: the number of ranks.
            own: texts of the user's own modules.

        Raises:
            ReplayError: an entry cannot be repeated.
        """
        return needed(self._entries, _names_of_run(request), saved, world_size, own)

    def program(
        self,
        cell: int,
        run: str,
        world_size: int,
        own: OwnTexts | None = None,
        *,
        careful: bool = False,
    ) -> tuple[Entry, ...]:
        """Return the entries that a program of a training needs, and last the training itself.

        Args:
            cell: label of the cell that trains; 0 for the newest.
            run: id of its run, or the short form; empty for any.
            world_size: the number of ranks.
            own: texts of the user's own modules.
            careful: True to include also entries that may have changed values that it uses.

        Raises:
            UsageError: no such cell has trained, or its inputs cannot be created again.
        """
        chosen = self._training(cell, run)
        entry = self._entries[chosen]
        assert entry.request is not None
        step = entry.request.step
        names = entry.names if step is None else _names_of_step(step)
        try:
            before = self._entries[:chosen]
            found = needed_with_training(
                before, names, world_size, own, careful=careful, source=entry.request.source
            )
            return (*found, entry)
        except ReplayError as error:
            label = entry.request.label
            raise UsageError(
                f"cannot export cell [{label}]: {error}. Run the cells that create these values "
                "again, then the training, then %dist_export"
            ) from None

    def until(self, chosen: Sequence[Entry]) -> tuple[Entry, ...]:
        """Return all entries until the last one of a program."""
        last = next(i for i, entry in enumerate(self._entries) if entry is chosen[-1])
        return tuple(self._entries[: last + 1])

    def _training(self, cell: int, run: str) -> int:
        """Return the index of the newest entry that trained, of a cell or a run."""
        trained = [
            (i, entry, entry.request)
            for i, entry in enumerate(self._entries)
            if entry.request is not None and (entry.trained or entry.names.trains)
        ]
        if not trained:
            raise UsageError(
                "no training that can be exported has run on these workers: run a step cell "
                "(%%dist_run --data), `fit` or a training loop with steps on all replicas, then "
                "%dist_export"
            )
        for i, entry, request in reversed(trained):
            if cell in (0, request.label) and run in ("", entry.run, short_id(entry.run)):
                return i
        named = f"run {run}" if run else f"cell [{cell}]"
        known = ", ".join(f"[{r.label}] ({short_id(e.run) or 'not stored'})" for _, e, r in trained)
        raise UsageError(f"{named} has not trained on these workers: cells (and runs) are {known}")

    def generators(self, before: Entry | None = None) -> bytes:
        """Return the states of the random generators before an entry; empty if unknown.

        Without an entry, those after all entries.
        """
        found = b""
        for entry in self._entries:
            if entry is before:
                break
            found = entry.generators or found
        return found

    def last_saved(self) -> CellRequest | None:
        """Return the newest run with a checkpoint; None without one."""
        requests = (entry.request for entry in reversed(self._entries))
        return next((one for one in requests if one is not None and one.saving is not None), None)

    def imports(self) -> tuple[str, ...]:
        """Return the modules that cells have imported."""
        return tuple(dict.fromkeys(m for entry in self._entries for m in entry.names.imports))

    def places(self, names: Iterable[str]) -> str:
        """Return the cells that bound these names last, such as `[3] [5]`; empty without one."""
        found = {}
        for name in names:
            bound = [entry.place for entry in self._entries if name in entry.names.binds]
            found.update(dict.fromkeys(bound[-1:]))
        return " ".join(found)

    def describe_lost_names(self, entries: Sequence[Entry]) -> str:
        """Describe the names that are lost if only these entries are repeated; empty if none."""
        left = [entry for entry in self._entries if entry not in entries and entry.names.binds]
        recreated = {name for entry in entries for name in entry.names.binds}
        names = sorted({name for entry in left for name in entry.names.binds} - recreated)
        if not names:
            return ""
        places = " ".join(dict.fromkeys(entry.place for entry in left))
        return f"without {', '.join(f'`{name}`' for name in names)}, defined in {places}"

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._write(len(self._entries), entry)

    def _write(self, number: int, entry: Entry) -> None:
        self._entries[number - 1] = entry
        path = self._folder / f"{number:06}.msgpack"
        self._files.replace(path, msgspec.msgpack.encode(entry), 0o600)


def _names_of_run(request: CellRequest) -> CellNames:
    return names_of(request.source) if request.step is None else _names_of_step(request.step)


def _names_of_step(step: StepRequest) -> CellNames:
    program = step.program
    reads = sorted({*program.reads, *program.carried, step.options.data})
    return CellNames(reads=tuple(reads), binds=program.carried)
