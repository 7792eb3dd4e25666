"""Export of a training as a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import UsageError
from nbdist.jobs import folder
from nbdist.jobs.changed_cells import edited_cells, refuse_deleted
from nbdist.jobs.program import program_of
from nbdist.jobs.remarks import edits, files_beside, later_loops, remarks
from nbdist.session import deleted_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.cells.dependencies import Entry, OwnTexts
    from nbdist.execution.module_sync import ModuleSync
    from nbdist.execution.replay_journal import Journal
    from nbdist.jobs.program import Program
    from nbdist.records import ClusterRequest, ProgramLaunch


@dataclass(frozen=True)
class Exported:
    """Exported program.

    Attributes:
        folder: Its folder, as the user named it.
        cell: Execution count of the cell that trains.
        hosts: Number of workers of the notebook.
        remarks: Reasons why its numbers may differ from those of the notebook, cells that ran
            again with another text, and names of modules that were edited or not found.
        launch_files: Names of the files that start it on other hosts.
    """

    folder: str
    cell: int
    hosts: int
    remarks: tuple[str, ...]
    launch_files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        start = f"run nbdist run {self.folder}/{folder.PROGRAM} --hosts {self.hosts}"
        first = f"nbdist: wrote {self.folder}/ with cell [{self.cell}]: {start}"
        verb = "starts" if len(self.launch_files) == 1 else "start"
        files = f"nbdist: {', '.join(self.launch_files)} {verb} it on other hosts"
        others = [files] * bool(self.launch_files)
        return "\n".join([first, *others, *(f"nbdist: {text}" for text in self.remarks)])


def export(
    path: str,
    cluster: ClusterRequest,
    journal: Journal,
    modules: ModuleSync,
    *,
    cell: int = 0,
    run: str = "",
    launch: ProgramLaunch | None = None,
) -> Exported:
    """Write a training to a new folder. See `Cluster.export`.

    Args:
        path: the folder.
        cluster: request of the cluster on which the cells ran.
        journal: the cells that ran.
        modules: the user's own modules on the workers.
        cell: execution count of the cell that trains; 0 for the newest.
        run: id of its run; empty for any.
        launch: launcher for which to write files; None for none.

    Raises:
        UsageError: see `Cluster.export`.
    """
    target, hosts = folder.check_target(path), len(cluster.hosts)
    journal.note_deleted(deleted_cells.ids())
    texts = modules.texts()
    try:
        entries, program = _chosen(journal, cluster, texts, cell, run, careful=True)
    except UsageError:  # without the cells that only may matter; remarks name these
        entries, program = _chosen(journal, cluster, texts, cell, run, careful=False)
    own, before = modules.of_program(program.imports), journal.until(entries)
    found = (
        *remarks(entries, before, texts),
        *([] if cell or run else later_loops(before, journal.entries[len(before) :])),
        *edited_cells(entries, journal.entries),
        *files_beside(entries, own.files),
        *edits(entries, own.files, modules.digests()),
        *(
            f"{path} was edited after the last cell: the program has the text of the workers. For "
            "the new text, run the training again, and export again"
            for path in own.edited
        ),
        *(
            f"the module `{name}` was not found beside the notebook: put it beside {folder.PROGRAM}"
            for name in own.missing
            if name not in program.optional
        ),
    )
    launching = folder.write(target, program, cluster, found, own.files, launch)
    return Exported(path.rstrip("/"), program.label, hosts, found, launching)


def _chosen(
    journal: Journal,
    cluster: ClusterRequest,
    texts: OwnTexts,
    cell: int,
    run: str,
    *,
    careful: bool,
) -> tuple[Sequence[Entry], Program]:
    """Return the entries of a program, and the program. For the arguments see `export`."""
    entries = journal.program(cell, run, len(cluster.hosts), texts, careful=careful)
    refuse_deleted(entries, journal.entries)
    return entries, program_of(entries, cluster, texts)
