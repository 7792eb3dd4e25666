"""Magic that exports a training as a program."""

from __future__ import annotations

import sys

from IPython.core.magic import line_magic, magics_class

from nbdist.magics import start_options
from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import command, parse
from nbdist.records import Option


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
        *start_options.LAUNCHING,
    )
    @line_magic
    def dist_export(self, line: str) -> None:
        """Write a training as a program that runs without the notebook.

        The folder contains `train.py`, `requirements.txt` and `README.md`, and files of a launcher.
        The program consists of the cells that the training needs. See [programs](jobs.md).
        """
        args = parse(self.dist_export, line)
        cluster = self._front.running_cluster("%dist_export")
        exported = cluster.export(
            args.folder,
            cell=args.cell or 0,
            run=args.run or "",
            launch=start_options.launch(args),
        )
        sys.stdout.write(f"{exported!r}\n")
