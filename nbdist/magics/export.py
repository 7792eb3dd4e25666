"""Magic that exports a training as a program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class

from nbdist.errors import TransferError, UsageError
from nbdist.jobs import folder
from nbdist.jobs.program import program_of
from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import command, parse
from nbdist.records import Option
from nbdist.session.transfer import read_objects

if TYPE_CHECKING:
    from collections.abc import Mapping


@magics_class
class ExportMagics(SharedClusterMagics):
    """The magic `%dist_export`."""

    @command(
        Option(flags=("folder",), help="New folder of the program, such as train/."),
        Option(
            flags=("--cell",),
            kind="number",
            metavar="N",
            default="the newest training",
            help="Number of the cell that trains, as in [7].",
        ),
        Option(
            flags=("--run",),
            metavar="ID",
            default="the newest training",
            help="Id of the run of the training.",
        ),
    )
    @line_magic
    def dist_export(self, line: str) -> None:
        """Write a training as a program that runs without the notebook.

        The folder contains `train.py`, `requirements.txt` and `README.md`. The program consists of
        the cells that the training needs. See [jobs](jobs.md).
        """
        args = parse(self.dist_export, line)
        cluster = self._front.running_cluster("%dist_export")
        target = folder.check_target(args.folder)
        entries = cluster.program_entries(args.cell or 0, args.run or "")
        program = program_of(entries, cluster.request, _read)
        training = entries[-1].request
        assert training is not None
        folder.write(target, program, cluster.request, training.strategy or "mirrored")
        sys.stdout.write(
            f"nbdist: wrote {target.name}/ with cell [{program.label}]: run "
            f"nbdist run {target.name}/train.py --hosts {cluster.world_size}\n"
        )


def _read(payload: bytes) -> Mapping[str, object]:
    try:
        return read_objects(payload)
    except TransferError as error:
        raise UsageError(
            f"cannot export an object that was copied from the notebook ({error}): create it in a "
            "%%dist_run cell"
        ) from None
