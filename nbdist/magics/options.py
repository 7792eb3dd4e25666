"""Options that several magics have, and what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from IPython.core.magic_arguments import argument

from nbdist.cells.parse import parse_bucket, parse_prefetch
from nbdist.cells.plan_options import parse_budget, parse_fixed, read_plan
from nbdist.errors import UsageError
from nbdist.records import Planning, StepOptions

if TYPE_CHECKING:
    from collections.abc import Callable

_PLANNING = (
    argument("--plan", metavar="FILE", help="Lay the step out as this plan says, under pjrt."),
    argument("--budget", metavar="40GB", help="Memory that a plan may take on each device."),
    argument("--fix", metavar="tensor=2", help="What is given: data, tensor, zero, remat, micro."),
)


def planning_arguments(function: Callable[..., Any]) -> Any:
    """Give a magic the options that say how a step is laid out."""
    for option in _PLANNING:
        function = option(function)
    return function


_STEP_OPTIONS = (
    "batch",
    "epochs",
    "steps",
    "shuffle",
    "bucket",
    "scale_lr",
    "check",
    "jit",
    "on_nan",
    "prefetch",
    "profile",
)
_PLANNING_OPTIONS = ("plan", "budget", "fix")
"""Of `%%dist_run`: those above need `--data`, and these say, without, how a `fit` is laid out."""


def step_options(args: Any) -> StepOptions | None:
    """What `%%dist_run` asks for of a step, or without data of what the cell fits.

    Raises:
        UsageError: an option is wrong, or needs another.
    """
    typed = vars(args)
    given = {
        name: value
        for name in (*_STEP_OPTIONS, *_PLANNING_OPTIONS)
        if (value := typed.get(name)) is not None and value is not False
    }
    if args.data is None:
        planned = given.keys() & _PLANNING_OPTIONS
        if given.keys() - planned:
            words = (f"--{name.replace('_', '-')}" for name in given if name not in planned)
            idle = ", ".join(words)
            fit = "; what `fit` is given is read ahead by .prefetch(tf.data.AUTOTUNE)"
            hint = fit if "prefetch" in given else ""
            raise UsageError(f"{idle} without --data: name the data set of the step{hint}")
        return StepOptions(data="", planning=_planning(args)) if planned else None
    if "bucket" in given:
        given["bucket"] = parse_bucket(given["bucket"])
    if "prefetch" in given:
        given["prefetch"] = parse_prefetch(given["prefetch"])
    own = {name: value for name, value in given.items() if name in _STEP_OPTIONS}
    return StepOptions(data=args.data, planning=_planning(args), **own)


def plan_options(args: Any) -> StepOptions:
    """What `%%dist_plan` asks for: of a step, or without data of what the cell fits.

    Raises:
        UsageError: an option is wrong, or needs another.
    """
    if args.batch and args.data is None:
        raise UsageError("--batch without --data: what `fit` is given says it")
    asked = {"on": unquoted(args.on), "only": True, "verify": bool(args.verify)}
    planning = msgspec.structs.replace(_planning(args), **asked)
    return StepOptions(data=args.data or "", batch=args.batch or 0, planning=planning)


def check_name(name: str | None) -> None:
    """Raises UsageError where what `-o` names is no name."""
    if name is not None and not name.isidentifier():
        raise UsageError(f"-o {name}: type a name that Python can use")


def unquoted(text: str | None) -> str:
    """IPython leaves the quotes around what was typed in some; those within are its own."""
    text = text or ""
    quoted = len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]
    return text[1:-1] if quoted else text


def _planning(args: Any) -> Planning:
    fixed = parse_fixed(args.fix)
    return Planning(
        budget=parse_budget(args.budget),
        fixed=fixed.sizes,
        remat=fixed.remat,
        schedule=fixed.schedule,
        given=read_plan(args.plan),
    )
