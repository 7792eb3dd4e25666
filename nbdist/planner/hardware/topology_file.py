"""Topologies from files: JSON or TOML of the records `Topology`, `Chip` and `Level`."""

from __future__ import annotations

import json
import math
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import msgspec

from nbdist.errors import PlanError
from nbdist.planner.hardware.lookup import EXAMPLE, find, unknown
from nbdist.records import Chip, Level, Topology
from nbdist.records.base import Record

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".json", ".toml")
_MAY_BE_ZERO = {"latency_s"}
_ABSENT = "is missing"
_R = TypeVar("_R", bound=Record)


def from_file(path: Path) -> Topology:
    """Read a topology; `chip` is a table of its figures, or a known name.

    Raises:
        PlanError: the file cannot be read, or has faults; all are listed with their positions.
    """
    raw = _read(path)
    faults: list[str] = []
    described = {"source": f"described in {path.name}"}
    chip = _chip(raw.get("chip"), described, faults)
    levels = _levels(raw.get("levels"), faults)
    assumed = _value("assumed", raw.get("assumed", []), tuple[str, ...], faults)
    unexpected = sorted(raw.keys() - {"chip", "levels", "assumed"})
    faults += [f"{key}: unknown key; use chip and levels" for key in unexpected]
    if faults or chip is None:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise PlanError(f"{path} does not describe a topology:\n{lines}\nExample:\n{EXAMPLE}")
    return Topology(chip=chip, levels=levels, assumed=assumed)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give another path") from error
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = path.suffix.lower().removeprefix(".").upper()
        raise PlanError(f"{path} is not {kind}: {error}; correct that position") from error
    if not isinstance(raw, dict):
        raise PlanError(f"{path} has no table of chip and levels. Example:\n{EXAMPLE}")
    return raw


def _chip(raw: object, described: dict[str, str], faults: list[str]) -> Chip | None:
    if isinstance(raw, str):
        chip = find(raw)
        if chip is None:
            faults.append(f"chip: {unknown(raw).partition('. To')[0]}")
        return chip
    given = described | raw if isinstance(raw, dict) else raw
    return _record("chip", given, Chip, faults)


def _levels(raw: object, faults: list[str]) -> tuple[Level, ...]:
    if not isinstance(raw, list) or not raw:
        faults.append("levels: must be a list of at least one level, innermost first")
        return ()
    found = [_record(f"levels[{index}]", item, Level, faults) for index, item in enumerate(raw)]
    return tuple(level for level in found if level is not None)


def _record(place: str, raw: object, kind: type[_R], faults: list[str]) -> _R | None:
    """Return the record; None if fields have faults, which are added to the list."""
    if not isinstance(raw, dict):
        faults.append(f"{place}: {_ABSENT if raw is None else 'is not a table'}")
        return None
    before = len(faults)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    there = ", ".join(fields)
    faults += [f"{place}.{key}: unknown key; use {there}" for key in raw if key not in fields]
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _value(f"{place}.{name}", raw[name], field.type, faults)
        elif field.required:
            faults.append(f"{place}.{name}: {_ABSENT}")
    return kind(**values) if len(faults) == before else None


def _value(place: str, raw: object, kind: Any, faults: list[str]) -> Any:
    """Return the value as its type; add a fault unless numbers are finite and positive."""
    if isinstance(raw, dict) and get_origin(kind) is dict:
        of = get_args(kind)[1]
        value = {key: _value(f"{place}.{key}", item, of, faults) for key, item in raw.items()}
    else:
        value = _plain(place, raw, kind, faults)
    if value in ("", {}):
        faults.append(f"{place}: is empty")
    return value


def _plain(place: str, raw: object, kind: Any, faults: list[str]) -> Any:
    if isinstance(raw, float) and raw.is_integer():  # files may contain 80e9
        raw = int(raw)
    try:
        value = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at")[0]
        faults.append(f"{place}: {reason[:1].lower()}{reason[1:]}")
        return None
    zero = place.rpartition(".")[2] in _MAY_BE_ZERO
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not (0 < value < math.inf or (zero and value == 0)):
        faults.append(f"{place}: is {value}, and must be {'0 or more' if zero else 'more than 0'}")
    return value
