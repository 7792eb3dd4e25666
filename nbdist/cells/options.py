"""Options of a cell: conversion of text or Python keywords to checked `CellOptions`."""

from __future__ import annotations

import math
from collections import defaultdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbdist.cells.plan_options import parse_budget, parse_fixed, read_plan
from nbdist.errors import UsageError
from nbdist.records import CellOptions, Planning, Saving, StepOptions, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.records import Option, StrategyName

OPTIONS: Mapping[str, Option] = options_of(CellOptions)
"""The options of cells by name, in the order of the command reference."""

_Fields = dict[str, Any]


def cell_options(given: Mapping[str, Any]) -> CellOptions:
    """Build the options of a cell.

    Args:
        given: values by the name of the option, or of a field of `CellOptions`. Text is read as
            typed on the line of a magic. None and False count as left out.

    Raises:
        UsageError: no option has a given name, values cannot be read, or options lack the one that
            they need. The message contains all faults.
    """
    fields, faults = _read(given)
    step, saving = fields[StepOptions], fields[Saving]
    others = {field: value for field, value in step.items() if field != "check"}  # loops have it
    faults += _needless(StepOptions, others, "data", "the data set of the step")
    faults += _needless(Saving, saving, "folder", "the folder")
    if faults:
        raise UsageError("\n".join(faults))
    planning = Planning(**fields[Planning])
    own = fields[CellOptions]
    if step or planning != Planning():
        own = {"step": StepOptions(**{"data": "", "planning": planning, **step}), **own}
    if saving:
        if not saving.keys() & {"every_steps", "every_s"}:
            saving |= parse_save_every(OPTIONS["save_every"].default)
        own = {"saving": Saving(**saving), **own}
    return CellOptions(**own)


def _read(given: Mapping[str, Any]) -> tuple[defaultdict[Any, _Fields], list[str]]:
    """Return the fields of each record, and an error text for each wrong name or value."""
    fields: defaultdict[Any, _Fields] = defaultdict(dict)
    faults = []
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None and name not in CellOptions.__struct_fields__:
            faults.append(_unknown(name))
        elif value is None or value is False:
            continue
        elif option is None:
            fields[CellOptions][name] = value
        else:
            try:
                fields[option.record] |= _value(option, value)
            except UsageError as error:
                faults.append(str(error))
                fields[option.record][option.field] = None
    return fields, faults


def _unknown(name: str) -> str:
    """Return an error text for a name that no option has."""
    close = get_close_matches(name, OPTIONS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"options are {', '.join(sorted(OPTIONS))}"
    return f"{name}: no option has this name; {hint}"


def _value(option: Option, value: Any) -> _Fields:
    """Return the fields that an option sets."""
    if value is True and option.bare is not None:
        return {option.field: option.bare}
    if isinstance(value, str) and option.name in _SEVERAL:
        return _SEVERAL[option.name](value)
    is_read = isinstance(value, str) and option.name in _READERS
    return {option.field: _READERS[option.name](value) if is_read else value}


def _needless(record: Any, fields: _Fields, needed: str, what: str) -> list[str]:
    """Return an error text if options of a record lack the one that they all need."""
    if not fields or needed in fields:
        return []
    own = {option.field: option.flag for option in OPTIONS.values() if option.record is record}
    flags = [flag for field, flag in own.items() if field in fields]
    hint = "; use .prefetch(tf.data.AUTOTUNE) on the data of `fit`" * ("prefetch" in fields)
    return [f"{', '.join(flags)} without {own[needed]}: name {what}{hint}"]


def check_options(options: CellOptions, strategy: StrategyName | None) -> None:
    """Check options against their ranges, each other, and the strategy of the cell.

    Raises:
        UsageError: options are wrong. The message contains all faults.
    """
    step, saving = options.step, options.saving
    faults = _out_of_range(options)
    if step is not None and not step.data:
        if step.planning != Planning() and strategy != "pjrt":
            flags = ", ".join(OPTIONS[name].flag for name in ("plan", "budget", "fix"))
            faults.append(f"{flags}: nbdist shards a `fit` only under --strategy pjrt")
    elif step is not None:
        faults += _out_of_range(step)
        if not step.data.isidentifier():
            faults.append(f"--data {step.data}: use the name of a data set on the workers")
        if options.precision is not None and strategy == "pjrt":
            faults.append(
                f"--precision {options.precision}: a step under pjrt computes in the types of its "
                f"arrays; cast them, as in x.astype(jnp.{options.precision})"
            )
        if step.scale_lr and saving is not None and saving.shrink:
            faults.append(
                "--shrink with --scale-lr: --scale-lr scales the rates by the number of replicas, "
                "and the batch stays the same with fewer of them; remove one of the options"
            )
    if saving is not None:
        faults += _out_of_range(saving)
    if faults:
        raise UsageError("\n".join(faults))


def _out_of_range(record: CellOptions | StepOptions | Saving) -> list[str]:
    """Return an error text for each number of a record that is outside of its option's range."""
    faults = []
    for option in OPTIONS.values():
        if option.record is type(record) and option.least is not None:
            value = getattr(record, option.field)
            values = value if isinstance(value, tuple) else (value,)
            faults += option.faults(*(v for v in values if v not in (None, "auto")))
    return faults


def parse_bucket(text: str) -> tuple[int, ...]:
    """Read lengths such as `32,64,128`.

    Raises:
        UsageError: a word is not a number.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--bucket {text}: use lengths, as in --bucket 32,64,128") from None


def parse_prefetch(text: str) -> int | Literal["auto"]:
    """Read `auto`, or a number of batches.

    Raises:
        UsageError: the text is neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise UsageError(f"--prefetch {text}: use auto, or a number of batches, as in --prefetch 4")
    return int(text)


def parse_hang_after(text: str) -> float:
    """Read a number of seconds.

    Raises:
        UsageError: the text is not a positive, finite number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"--hang-after {text}: use a number of seconds, as in --hang-after 60")
    return seconds


def parse_checkpoint(text: str) -> str:
    """Return the absolute path of the folder of checkpoints.

    Raises:
        UsageError: the path is a file.
    """
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise UsageError(f"--checkpoint {text} is a file: use a folder")
    return str(path.absolute())


def parse_save_every(text: str) -> _Fields:
    """Read an interval: steps, or seconds as in `30s`.

    Raises:
        UsageError: the text is neither.
    """
    number = text.removesuffix("s")
    if not number.isdecimal() or not int(number):
        raise UsageError(f"--save-every {text}: use steps, as in 100, or seconds, as in 30s")
    return {"every_s": float(number)} if text.endswith("s") else {"every_steps": int(number)}


def _parse_fix(text: str) -> _Fields:
    fixed = parse_fixed(text)
    return {"fixed": fixed.sizes, "remat": fixed.remat, "schedule": fixed.schedule}


_READERS: Mapping[str, Callable[[str], object]] = {
    "bucket": parse_bucket,
    "prefetch": parse_prefetch,
    "hang_after": parse_hang_after,
    "checkpoint": parse_checkpoint,
    "budget": parse_budget,
    "plan": read_plan,
}
"""Readers of options whose value is not just a word or a whole number."""

_SEVERAL: Mapping[str, Callable[[str], _Fields]] = {
    "save_every": parse_save_every,
    "fix": _parse_fix,
}
"""Readers of options that set several fields."""
