"""From which lines of Python the operations of XLA's programs come, as a trace has kept them.

The profiler writes each program that ran, with its operations' metadata, to the plane
`/host:metadata` of its file (XSpace, in xprof's `xplane.proto`); `jax.profiler.ProfileData` leaves
those bytes out, and so the few fields on the way to them are read here from protobuf's wire format.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax._src.lib import hlo

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLANE, _PLANE_NAME, _EVENTS, _MAP_VALUE = 1, 2, 4, 2
_EVENT_NAME, _EVENT_STATS, _STAT_BYTES, _HLO_MODULE = 2, 5, 6, 1
"""Field numbers in XSpace, XPlane, XEventMetadata, XStat and xla.HloProto."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_PROGRAM = re.compile(r"^(.*)\((\d+)\)$")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_HALF = re.compile(r"-(start|done)$")


@dataclass(frozen=True)
class Frame:
    """A line of Python that was under way when an operation was traced.

    Attributes:
        file: as Python names it.
        function: its name, as in `Model.step`.
        line: counts from 1.
    """

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Operation:
    """An instruction of a program.

    Attributes:
        name: XLA's opcode, as in `dot`; of a fused one that of its root, as in `fusion of tanh`.
        frames: the lines that it comes from, the outermost first; of a fused one those of its root.
    """

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Program:
    """A program that ran.

    Attributes:
        name: XLA's, as in `jit_step`.
        operations: by the name that events give them.
    """

    name: str
    operations: dict[str, Operation]


class Programs:
    """Those that ran in a trace.

    Args:
        by_id: as the events of the trace have it.
    """

    def __init__(self, by_id: dict[int, Program]) -> None:
        self._by_id = by_id
        self._by_name: dict[str, list[Program]] = defaultdict(list)
        for program in by_id.values():
            self._by_name[program.name].append(program)

    def find(self, number: int, name: str, operation: str) -> Operation | None:
        """An operation of a program; None where it is not known which.

        What was read from JAX's cache runs under the id that it had where it was compiled: its name
        tells it then, if there is only one of that name.

        Args:
            number: the program's id.
            name: the program's.
            operation: the name that events give it.
        """
        program = self._by_id.get(number)
        if program is not None and program.name == name:
            return program.operations.get(operation)
        named = self._by_name.get(name, [])
        return named[0].operations.get(operation) if len(named) == 1 else None


def programs_of(trace: bytes) -> Programs:
    """The programs that ran in a trace.

    Args:
        trace: an `xplane.pb` file.
    """
    found: dict[int, Program] = {}
    for number, plane in _fields(memoryview(trace)):
        if number == _PLANE and _text(plane, _PLANE_NAME) == "/host:metadata":
            found.update(_programs_of_plane(plane))
    return Programs(found)


def _programs_of_plane(plane: memoryview) -> Iterator[tuple[int, Program]]:
    for number, entry in _fields(plane):
        if number != _EVENTS:
            continue
        event = _only(entry, _MAP_VALUE)
        named = _PROGRAM.match(_text(event, _EVENT_NAME))
        protos = [_only(stat, _STAT_BYTES) for n, stat in _fields(event) if n == _EVENT_STATS]
        if named is not None and any(protos):
            proto = next(filter(None, protos))
            module = hlo.HloModule.from_serialized_hlo_module_proto(
                bytes(_only(proto, _HLO_MODULE))
            )
            yield int(named[2]), read_program(named[1], module.to_string(_short()))


def _short() -> Any:
    options = hlo.HloPrintOptions()
    options.print_large_constants = False
    options.print_backend_config = False
    return options


def read_program(name: str, text: str) -> Program:
    """A program from the text that XLA prints of it, its tables of stack frames included.

    Args:
        name: of the program.
        text: as of `HloModule.to_string()`.
    """
    tables, lines = _tables(text)
    frames = _Frames(tables)
    own: dict[str, Operation] = {}
    roots: dict[str, Operation] = {}
    fused: dict[str, str] = {}
    computation = ""
    for line in lines:
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif found := _OPERATION.match(line):
            own[found[2]] = operation = Operation(_called(found[3], line), frames.of(line))
            if found[1]:
                roots[computation] = operation
            if found[3] == "fusion" and (calls := _CALLS.search(line)):
                fused[found[2]] = calls[1]
    for fusion, computation in fused.items():
        own[fusion] = _fusion(own[fusion], roots.get(computation))
    return Program(name, own)


def _called(opcode: str, line: str) -> str:
    """A custom call goes by its target's name; the halves of what is asynchronous by one name."""
    target = _TARGET.search(line)
    return target[1] if opcode == "custom-call" and target else _HALF.sub("", opcode)


def _fusion(fusion: Operation, root: Operation | None) -> Operation:
    if root is None:
        return fusion
    return Operation(f"fusion of {root.name}", fusion.frames or root.frames)


def _tables(text: str) -> tuple[dict[str, dict[int, str]], list[str]]:
    """The rows of the tables before the program, by table and number; and the program's lines."""
    tables: dict[str, dict[int, str]] = {}
    lines, table = [], None
    for line in text.splitlines():
        if head := _TABLE.match(line):
            table = tables.setdefault(head[1], {})
        elif table is not None and (row := _ROW.match(line)):
            table[int(row[1])] = row[2] or row[3]
        else:
            table = table if not line else None
            lines.append(line)
    return tables, lines


class _Frames:
    """The stacks of a program."""

    def __init__(self, tables: dict[str, dict[int, str]]) -> None:
        names, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
        places = {n: _numbers(row) for n, row in tables.get("FileLocations", {}).items()}
        self._frames = {n: _numbers(row) for n, row in tables.get("StackFrames", {}).items()}
        self._places = {
            number: Frame(
                names.get(place.get("file_name_id", 0), ""),
                functions.get(place.get("function_name_id", 0), ""),
                place.get("line", 0),
            )
            for number, place in places.items()
        }

    def of(self, line: str) -> tuple[Frame, ...]:
        """Those of an operation's line, the outermost first.

        XLA prints a parent's number plus one, and so 1 where there is none.
        """
        named = _FRAME.search(line)
        number = int(named[1]) if named else 0
        stack: list[Frame] = []
        while frame := self._frames.get(number):
            stack.append(self._places[frame["file_location_id"]])
            number = frame["parent_frame_id"] - 1
        return tuple(reversed(stack))


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


def _only(message: memoryview, wanted: int) -> memoryview:
    """The field of that number that holds bytes; empty where it is left out."""
    return next((value for number, value in _fields(message) if number == wanted), memoryview(b""))


def _text(message: memoryview, wanted: int) -> str:
    return bytes(_only(message, wanted)).decode(errors="replace")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message that hold bytes, with their numbers; others are passed over.

    Raises:
        ValueError: it is no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _BYTES:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at} of a trace: it is none that is known")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
