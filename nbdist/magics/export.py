"""Magics that export a training as a program, and submit it."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class

from nbdist.errors import UsageError
from nbdist.magics import start_options
from nbdist.magics.base import SharedClusterMagics
from nbdist.magics.options import OUTPUT, check_name, command, parse
from nbdist.records import Option

if TYPE_CHECKING:
    from nbdist.session.submission import SubmittedJob

_TRAINING = (
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


@magics_class
class ExportMagics(SharedClusterMagics):
    """The magics `%dist_export` and `%dist_submit`."""

    @command(*_TRAINING, *start_options.LAUNCHING)
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

    @command(
        *_TRAINING,
        *start_options.SUBMITTING,
        Option(flags=("--detach",), kind="switch", help="Do not wait for the end of the job."),
        OUTPUT.but(help="Store the job under this name in the notebook."),
    )
    @line_magic
    def dist_submit(self, line: str) -> SubmittedJob | None:
        """Export a training, start it as a job, and show its runs until it ends.

        An interrupt ends the view, not the job. Words after `--` are options of the program, as in
        `%dist_submit train/ -- --epochs 10`. `nbdist.job("train/")` returns the job.
        """
        own, *after = re.split(r"\s--(?:\s|$)", line, maxsplit=1)
        try:
            arguments = shlex.split("".join(after))
        except ValueError as error:
            raise UsageError(f"the options after -- cannot be read: {error}") from None
        args = parse(self.dist_submit, own)
        check_name(args.output)
        cluster = self._front.running_cluster("%dist_submit")
        job = cluster.submit(
            args.folder,
            cell=args.cell or 0,
            run=args.run or "",
            launch=start_options.launch(args) or "local",
            arguments=arguments,
        )
        if args.output:
            self.shell.user_ns[args.output] = job
        if args.detach:
            sys.stdout.write(f"nbdist: submitted {job}\n")
        else:
            job.follow()
        return None if args.output else job
