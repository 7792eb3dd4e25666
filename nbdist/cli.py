"""The command `nbdist`, for use without a notebook."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError
from nbdist.magics.options import as_argument
from nbdist.magics.start_options import EXAMINING, examined

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOCTOR = "Check hosts for problems. The exit status is 1 if a run would fail."


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        words: the arguments; None for those of the process.

    Returns:
        The exit status: 0, or 1 if a run would fail, or 2 if the hosts cannot be examined.
    """
    parser = argparse.ArgumentParser(prog="nbdist", description="Train on many machines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR)
    for option in EXAMINING:
        as_argument(option).add_to_parser(doctor, None)
    args = parser.parse_args(words)
    try:
        picture = examined(args)
    except NbdistError as error:
        sys.stderr.write(f"nbdist: {error}\n")
        return 2
    sys.stdout.write("\n".join(picture.lines()) + "\n")
    return int(any(trouble.is_fatal for trouble in picture.examination.troubles))


if __name__ == "__main__":
    sys.exit(main())
