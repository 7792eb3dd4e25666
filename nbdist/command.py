"""The command `nbdist`: what needs no notebook."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError
from nbdist.starting import examined

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOCTOR = "look for what would go wrong on hosts, and end with 1 where a run would fail"


def main(words: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status: 2 where hosts could not be looked at."""
    parser = argparse.ArgumentParser(prog="nbdist", description="Train on many machines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help=_DOCTOR, description=_DOCTOR)
    doctor.add_argument("hosts", nargs="*", help="as for %%dist_start: 4, or gpu1 gpu2:8")
    doctor.add_argument("-n", "--number", type=int, help="of workers on this machine")
    doctor.add_argument("--hosts", dest="inventory", metavar="FILE", help="hosts of a file")
    doctor.add_argument("--profile", metavar="NAME", help="hosts of a file of yours")
    doctor.add_argument("--python", metavar="PATH", help="Python on other hosts")
    doctor.add_argument("--data", default="", metavar="PATTERN", help="files they have alike")
    doctor.add_argument("--checkpoint", default="", metavar="DIR", help="a folder they share")
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
