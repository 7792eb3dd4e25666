"""Topologies described in files: JSON or TOML of the records `Topology`, `Chip` and `Level`."""

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
        PlanError: the file is not there or cannot be read, or what it says is wrong: every fault,
            each with its place.
    """
    raw = _read(path)
    faults: list[str] = []
    described = {"source": f"described in {path.name}"}
    chip = _chip(raw.get("chip"), described, faults)
    levels = _levels(raw.get("levels"), faults)
    assumed = _value("assumed", raw.get("assumed", []), tuple[str, ...], faults)
    unexpected = sorted(raw.keys() - {"chip", "levels", "assumed"})
    faults += [f"{key}: there is no such key; there are chip and levels" for key in unexpected]
    if faults or chip is None:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise PlanError(f"{path} describes no topology:\n{lines}\nIt may look so:\n{EXAMPLE}")
    return Topology(chip=chip, levels=levels, assumed=assumed)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give another path") from error
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = path.suffix.lower().removeprefix(".").upper()
        raise PlanError(f"{path} is not {kind}: {error}; mend that place") from error
    if not isinstance(raw, dict):
        raise PlanError(f"{path} holds no table of chip and levels. It may look so:\n{EXAMPLE}")
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
        faults.append("levels: is a list of one level at least, innermost first")
        return ()
    found = [_record(f"levels[{index}]", item, Level, faults) for index, item in enumerate(raw)]
    return tuple(level for level in found if level is not None)


def _record(place: str, raw: object, kind: type[_R], faults: list[str]) -> _R | None:
    """The record; None where something is wrong with its fields, each of which is a fault."""
    if not isinstance(raw, dict):
        faults.append(f"{place}: {_ABSENT if raw is None else 'is no table'}")
        return None
    before = len(faults)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    there = ", ".join(fields)
    faults += [
        f"{place}.{key}: there is no such key; there are {there}"
        for key in raw
        if key not in fields
    ]
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _value(f"{place}.{name}", raw[name], field.type, faults)
        elif field.required:
            faults.append(f"{place}.{name}: {_ABSENT}")
    return kind(**values) if len(faults) == before else None


def _value(place: str, raw: object, kind: Any, faults: list[str]) -> Any:
    """As its type; numbers are finite and more than nothing. A fault where it is not so."""
    if isinstance(raw, dict) and get_origin(kind) is dict:
        of = get_args(kind)[1]
        value = {key: _value(f"{place}.{key}", item, of, faults) for key, item in raw.items()}
    else:
        value = _plain(place, raw, kind, faults)
    if value in ("", {}):
        faults.append(f"{place}: is empty")
    return value


def _plain(place: str, raw: object, kind: Any, faults: list[str]) -> Any:
    try:
        value = msgspec.convert(_whole(raw), kind)
    except msgspec.ValidationError as error:
        said = str(error).partition(" - at")[0]
        faults.append(f"{place}: {said[:1].lower()}{said[1:]}")
        return None
    zero = place.rpartition(".")[2] in _MAY_BE_ZERO
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not (0 < value < math.inf or (zero and value == 0)):
        faults.append(
            f"{place}: is {value}, and has to be {'0 or more' if zero else 'more than 0'}"
        )
    return value


def _whole(raw: object) -> object:
    """Whole numbers may be written as 80e9."""
    return int(raw) if isinstance(raw, float) and raw.is_integer() else raw
