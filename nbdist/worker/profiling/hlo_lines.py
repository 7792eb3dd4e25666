"""Python lines that the operations of XLA programs come from, read from a trace.

The profiler writes each program with the metadata of its operations to the plane `/host:metadata`
of its file (XSpace, in xprof's `xplane.proto`). `jax.profiler.ProfileData` omits these bytes. This
module therefore decodes the necessary fields from protobuf's wire format.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.private_api.jax import hlo

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
    """Python line on the stack when an operation was traced.

    Attributes:
        file: File name from Python.
        function: Qualified name, such as `Model.step`.
        line: Line number, from 1.
    """

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Operation:
    """Instruction of a program.

    Attributes:
        name: XLA's opcode, such as `dot`; for a fusion, `fusion of tanh` after its root.
        frames: Stack of Python lines, the outermost first; for a fusion, the stack of its root.
    """

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Program:
    """Program that ran.

    Attributes:
        name: XLA's name, such as `jit_step`.
        operations: Operations by their name in events.
    """

    name: str
    operations: dict[str, Operation]


class Programs:
    """Programs that ran in a trace.

    Args:
        by_id: Programs by their id in events.
    """

    def __init__(self, by_id: dict[int, Program]) -> None:
        self._by_id = by_id
        self._by_name: dict[str, list[Program]] = defaultdict(list)
        for program in by_id.values():
            self._by_name[program.name].append(program)

    def find(self, number: int, name: str, operation: str) -> Operation | None:
        """Return an operation of a program; None if the program is unknown or ambiguous.

        A program from JAX's cache runs under another id. It is then found by name, if only one
        program has that name.

        Args:
            number: Id of the program.
            name: Name of the program.
            operation: Name of the operation in events.
        """
        program = self._by_id.get(number)
        if program is not None and program.name == name:
            return program.operations.get(operation)
        named = self._by_name.get(name, [])
        return named[0].operations.get(operation) if len(named) == 1 else None


def programs_of(trace: bytes) -> Programs:
    """Return the programs that ran in a trace.

    Args:
        trace: Contents of an `xplane.pb` file.
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
    """Parse a program from XLA's text, including its tables of stack frames.

    Args:
        name: Name of the program.
        text: Output of `HloModule.to_string()`.
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
    """Return a name: the target of a custom call, and one name for both asynchronous halves."""
    target = _TARGET.search(line)
    return target[1] if opcode == "custom-call" and target else _HALF.sub("", opcode)


def _fusion(fusion: Operation, root: Operation | None) -> Operation:
    if root is None:
        return fusion
    return Operation(f"fusion of {root.name}", fusion.frames or root.frames)


def _tables(text: str) -> tuple[dict[str, dict[int, str]], list[str]]:
    """Split the text into the table rows, by table and number, and the program's lines."""
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
    """Stack frames of a program."""

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
        """Return the frames of an operation's line, the outermost first.

        XLA prints the id of the parent frame plus one, and 1 if there is no parent.
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
    """Return the bytes of the first field with a number; empty if it is missing."""
    return next((value for number, value in _fields(message) if number == wanted), memoryview(b""))


def _text(message: memoryview, wanted: int) -> str:
    return bytes(_only(message, wanted)).decode(errors="replace")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the fields of a message that contain bytes, with their numbers; skip others.

    Raises:
        ValueError: The bytes are not a message.
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
            raise ValueError(f"unknown wire type {kind} at byte {at} of the trace")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode a number; returns it and the offset after it."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
