"""Readers of the options of a plan: `--budget`, `--fix` and `--plan`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nbdist.errors import UsageError
from nbdist.records import DATA, MODEL, REPLICATE, STAGE, Plan, Remat, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.records import Planning

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES = re.compile(r"(\d+(?:\.\d*)?)\s*(?=[kmgtb])([kmgt]?)(i?)b?", re.IGNORECASE)
_AXES = {
    **dict.fromkeys(("data", "dp"), DATA),
    **dict.fromkeys(("tensor", "tp", "model"), MODEL),
    **dict.fromkeys(("stage", "pp"), STAGE),
    REPLICATE: REPLICATE,
    "zero": "zero",
    "micro": "micro",
    "rounds": "rounds",
    **dict.fromkeys(("sequence", "sp"), "sequence"),
}
_COUNTED = {"micro": "parts", "rounds": "rounds", "stage": "stages", "pp": "stages"}
_CHOICES = {
    "zero": (("0", "1", "3"), "use 0, 1 (XLA turns it into ZeRO-2: docs/planner.md) or 3"),
    "sequence": (("0", "1"), "use 0 or 1"),
}
_REMATS: dict[str, Remat] = {"none": "", "selective": "selective", "full": "full"}
_SCHEDULES: dict[str, Schedule] = {"gpipe": "gpipe", "1f1b": "1f1b"}
_WORDS: dict[str, Mapping[str, str]] = {"remat": _REMATS, "schedule": _SCHEDULES}


class Fixed(NamedTuple):
    """Fixed part of a layout.

    Attributes:
        sizes: sizes of axes, and the values of `zero`, `micro`, `rounds` and `sequence`.
        remat: rematerialization; None if it is not fixed.
        schedule: schedule of the microbatches in stages; None if it is not fixed.
    """

    sizes: dict[str, int]
    remat: Remat | None = None
    schedule: Schedule | None = None


def parse_budget(text: str | None) -> int:
    """Read an amount of memory such as `40GB` or `16GiB`, in bytes. None is 0.

    Raises:
        UsageError: the text is not an amount of memory with a unit.
    """
    if text is None:
        return 0
    found = _BYTES.fullmatch(text.strip())
    scale = 0.0
    if found is not None:
        unit = found[2].lower()
        scale = 1024.0 ** ("kmgt".index(unit) + 1) if unit and found[3] else _UNITS[unit]
    nbytes = int(float(found[1]) * scale) if found is not None else 0
    if nbytes <= 0:
        raise UsageError(
            f"--budget {text}: use an amount of memory with its unit, as in 40GB or 16GiB"
        )
    return nbytes


def parse_fixed(text: str | None) -> Fixed:
    """Read a text such as `tensor=4,zero=3` or `stage=4,schedule=1f1b,remat=full`.

    Raises:
        UsageError: a word is invalid. The message contains all faults.
    """
    fixed: dict[str, int] = {}
    words: dict[str, str] = {}
    faults = []
    for word in (text or "").split(",") if text is not None else ():
        name, _, value = (part.strip() for part in word.partition("="))
        if name in _WORDS:
            if value not in _WORDS[name] or name in words:
                faults.append(f"{name}={value}: use one of {', '.join(_WORDS[name])}, once")
            words[name] = value
        elif name not in _AXES:
            faults.append(f"unknown name {name or word!r}: use {', '.join((*_AXES, *_WORDS))}")
        elif _AXES[name] in _CHOICES and value not in _CHOICES[_AXES[name]][0]:
            faults.append(f"{name}={value}: {_CHOICES[_AXES[name]][1]}")
        elif _AXES[name] not in _CHOICES and (not value.isdecimal() or not int(value)):
            what = _COUNTED.get(name, "devices")
            faults.append(f"{name}={value} is not a number of {what}")
        elif fixed.setdefault(_AXES[name], int(value)) != int(value):
            faults.append(f"{name} is given twice")
    if faults:
        raise UsageError(f"--fix {text}: {'; '.join(faults)}; an example is --fix tensor=4,zero=3")
    remat, schedule = words.get("remat", ""), words.get("schedule", "")
    return Fixed(fixed, _REMATS.get(remat), _SCHEDULES.get(schedule))


def fixed_text(planning: Planning) -> str:
    """Return the fixed part of a layout as `parse_fixed` reads it; empty without one."""
    names = {MODEL: "tensor"}
    words = [f"{names.get(name, name)}={size}" for name, size in planning.fixed.items()]
    words += [f"remat={planning.remat or 'none'}"] * (planning.remat is not None)
    words += [f"schedule={planning.schedule}"] * (planning.schedule is not None)
    return ",".join(words)


def read_plan(path: str | None) -> Plan | None:
    """Read the plan from a file that a run has stored. None without a path.

    Raises:
        UsageError: the file cannot be read, or is not a plan.
    """
    if path is None:
        return None
    try:
        return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=Plan)
    except OSError as error:
        raise UsageError(f"--plan {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"--plan {path} is not a plan: {error}") from None
