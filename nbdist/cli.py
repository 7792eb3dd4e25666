"""The command `nbdist`, for use without a notebook."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError, UsageError
from nbdist.jobs import launch
from nbdist.magics.options import as_argument
from nbdist.magics.start_options import EXAMINING, examined
from nbdist.session import headless

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOCTOR = "Check hosts for problems. The exit status is 1 if a run would fail."
_RUN = (
    "Run a program, such as an exported one, in several processes on this machine. Or run a "
    "notebook, whose own cells start the workers."
)
_OF_A_NOTEBOOK = "Run a notebook without a front end."


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        words: the arguments; None for those of the process.

    Returns:
        The exit status: 0, or 1 if a run would fail, or 2 if the request is invalid or the hosts
        cannot be examined. For `run`, that of the program or notebook.
    """
    parser = argparse.ArgumentParser(prog="nbdist", description="Train on many machines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR)
    for option in EXAMINING:
        as_argument(option).add_to_parser(doctor, None)
    doctor.set_defaults(execute=_examine)
    run = commands.add_parser("run", help=_RUN, description=_RUN)
    run.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="Number of processes, or of hosts in %%dist_start of a notebook.",
    )
    run.add_argument("program", type=Path, help="The Python file, or the notebook.")
    run.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="Arguments of the program. For a notebook: -p NAME VALUE sets a parameter, and "
        "-o FILE is the executed notebook.",
    )
    run.set_defaults(execute=_run)
    args = parser.parse_args(words)
    try:
        status: int = args.execute(args)
    except NbdistError as error:
        sys.stderr.write(f"nbdist: {error}\n")
        return 2
    return status


def _examine(args: argparse.Namespace) -> int:
    picture = examined(args)
    sys.stdout.write("\n".join(picture.lines()) + "\n")
    return int(any(trouble.is_fatal for trouble in picture.examination.troubles))


def _run(args: argparse.Namespace) -> int:
    if args.program.suffix == ".ipynb":
        return _run_notebook(args.program, args.arguments, args.hosts)
    words = args.arguments
    if words and words[0] == "--hosts":  # also after the program, as users type it
        count = words[1] if len(words) > 1 else ""
        if not count.isdecimal():
            raise UsageError(f"--hosts {count}: use a number from 1")
        args.hosts, words = int(count), words[2:]
    return launch.run(args.program, words, 1 if args.hosts is None else args.hosts)


def _run_notebook(path: Path, words: Sequence[str], hosts: int | None) -> int:
    parser = argparse.ArgumentParser(prog=f"nbdist run {path}", description=_OF_A_NOTEBOOK)
    parser.add_argument(
        "-p",
        "--parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help='Value of a name that the cell with the tag "parameters" assigns.',
    )
    parser.add_argument("--hosts", type=int, default=hosts, help="Hosts in %%dist_start.")
    parser.add_argument("-o", "--output", type=Path, help="Path of the executed notebook.")
    args = parser.parse_args(words)
    if args.hosts is not None and args.hosts < 1:
        raise UsageError(f"--hosts {args.hosts}: use a number from 1")
    given = dict(args.parameters)
    return headless.run(path, args.output, hosts=args.hosts or 0, parameters=given)


if __name__ == "__main__":
    sys.exit(main())
