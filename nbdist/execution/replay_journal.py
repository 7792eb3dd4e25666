"""What was done to the workers of a cluster, kept in its folder for as long as they live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from nbdist.cells.dependencies import CellNames, Entry, names_of, needed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from nbdist.execution.result import Run
    from nbdist.records import CellRequest, RunningCell, StepRequest
    from nbdist.utils.files import LateFiles


class Journal:
    """Cells and pushed objects, one file each.

    Args:
        folder: where they are, or will be.
        files: write it.
    """

    def __init__(self, folder: Path, files: LateFiles) -> None:
        self._folder = folder
        self._files = files
        folder.mkdir(mode=0o700, exist_ok=True)
        paths = sorted(folder.glob("*.msgpack"))
        self._entries = [msgspec.msgpack.decode(p.read_bytes(), type=Entry) for p in paths]

    def clear(self) -> None:
        """The workers are fresh: nothing was done to them."""
        self._entries.clear()
        self._files.settle()
        for path in self._folder.glob("*.msgpack"):
            path.unlink()

    def resized(self, before: int, after: int) -> None:
        """What was done to all workers is to be done to all that there are now."""
        for number, entry in enumerate(self._entries, 1):
            if len(entry.ranks) >= before:  # there may have been more before that
                self._write(number, msgspec.structs.replace(entry, ranks=tuple(range(after))))

    def add_cell(self, cell: RunningCell | None, run: Run, failed: bool) -> None:
        """A cell ran, to its end or until it failed or was interrupted; plans change nothing."""
        if cell is None or cell.request.is_plan:
            return
        request, step = cell.request, cell.request.step
        if step is None:
            names = names_of(request.source)
        else:
            changes = run.begun.changes if run.begun is not None else ()
            names = msgspec.structs.replace(_names_of_step(step), trains=changes)
        kind: Literal["cell", "step"] = "cell" if step is None else "step"
        self._add(Entry(kind, names, cell.ranks, request, once=cell.options.once, failed=failed))

    def add_push(self, names: Iterable[str], payload: bytes, ranks: Sequence[int]) -> None:
        """Objects were pushed, as they are in `payload`."""
        bound = tuple(sorted(names))
        pushed = CellNames(binds=bound, sure=bound)
        self._add(Entry("push", pushed, tuple(ranks), payload=payload))

    def needed(self, request: CellRequest, saved: Iterable[str], world_size: int) -> list[Entry]:
        """What has to be done again for a run.

        Args:
            request: the run.
            saved: names whose values its checkpoint has.
            world_size: the number of ranks.

        Raises:
            ReplayError: something cannot be done again.
        """
        step = request.step
        names = names_of(request.source) if step is None else _names_of_step(step)
        return needed(self._entries, names, saved, world_size)

    def last_saved(self) -> CellRequest | None:
        """The run that was saved last, if one was."""
        requests = (entry.request for entry in reversed(self._entries))
        return next((one for one in requests if one is not None and one.saving is not None), None)

    def imports(self) -> tuple[str, ...]:
        """The modules that cells have imported."""
        return tuple(dict.fromkeys(m for entry in self._entries for m in entry.names.imports))

    def places(self, names: Iterable[str]) -> str:
        """The cells that have bound these names last, as in `[3] [5]`; empty if none has."""
        found = {}
        for name in names:
            bound = [entry.place for entry in self._entries if name in entry.names.binds]
            found.update(dict.fromkeys(bound[-1:]))
        return " ".join(found)

    def gone(self, entries: Sequence[Entry]) -> str:
        """What is not there any more once these alone were done again, in words."""
        left = [entry for entry in self._entries if entry not in entries and entry.names.binds]
        there = {name for entry in entries for name in entry.names.binds}
        names = sorted({name for entry in left for name in entry.names.binds} - there)
        if not names:
            return ""
        places = " ".join(dict.fromkeys(entry.place for entry in left))
        return f"without {', '.join(f'`{name}`' for name in names)}, of {places}"

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._write(len(self._entries), entry)

    def _write(self, number: int, entry: Entry) -> None:
        self._entries[number - 1] = entry
        path = self._folder / f"{number:06}.msgpack"
        self._files.replace(path, msgspec.msgpack.encode(entry), 0o600)


def _names_of_step(step: StepRequest) -> CellNames:
    program = step.program
    reads = sorted({*program.reads, *program.carried, step.options.data})
    return CellNames(reads=tuple(reads), binds=program.carried)
