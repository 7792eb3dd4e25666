"""Programs in XLA's text and in the bytes of a trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from nbdist.worker.profiling.hlo_lines import programs_of, read_program

TABLES = """HloModule jit_step

FileNames
1 "a.py"
2 "b.py"

FunctionNames
1 "<module>"
2 "Model.step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field of protobuf that contains bytes."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def other_fields() -> bytes:
    """Return fields of the kinds that a reader skips."""
    return (
        varint(9 << 3 | 0)
        + varint(300)
        + varint(9 << 3 | 1)
        + bytes(8)
        + varint(77 << 3 | 5)
        + bytes(4)
    )


def trace_of(plane: str, name: str, proto: bytes | None) -> bytes:
    """Return a trace with one program in a plane."""
    stats = b"" if proto is None else bytes_field(5, other_fields() + bytes_field(6, proto))
    event = bytes_field(2, bytes_field(2, name.encode()) + stats)
    return other_fields() + bytes_field(1, bytes_field(2, plane.encode()) + bytes_field(4, event))


@pytest.fixture(scope="module")
def proto() -> bytes:
    """Return XLA's description of a small program that is not compiled."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return bytes_field(1, module)


def test_stacks_begin_with_the_outermost_frame() -> None:
    text = (
        f"{TABLES}ENTRY %main (a: f32[2]) -> f32[2] {{\n"
        "  %a = f32[2]{0} parameter(0)\n"
        '  %b = f32[2]{0} tanh(%a), metadata={op_name="x" stack_frame_id=1}\n'
        '  ROOT %c = f32[2]{0} sine(%b), metadata={op_name="x" stack_frame_id=2}\n}\n'
    )
    operations = read_program("jit_step", text).operations
    assert operations["a"].frames == ()
    assert [(f.file, f.function, f.line) for f in operations["b"].frames] == [
        ("a.py", "<module>", 7)
    ]
    assert [(f.file, f.line) for f in operations["c"].frames] == [("a.py", 7), ("b.py", 9)]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("%x = f32[2]{0} all-gather-start(%a), channel_id=1", "all-gather"),
        ("%x = f32[2]{0} all-gather-done(%a)", "all-gather"),
        ("%x = f32[2]{0} custom-call(%a)", "custom-call"),
        ('%x = (f32[2]{0}, u8[]) custom-call(%a), custom_call_target="gemm"', "gemm"),
        ('%x = f32[2]{0} tanh(%a), custom_call_target="gemm"', "tanh"),
        ("%x = f32[2]{0} fusion(%a), kind=kLoop, calls=%missing", "fusion"),
        ("x = f32[2]{0} tanh(a)", "tanh"),
    ],
)
def test_names_of_operations(line: str, name: str) -> None:
    operations = read_program("jit_f", f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  {line}\n}}\n")
    assert operations.operations["x"].name == name


def test_fusion_keeps_its_own_stack() -> None:
    text = (
        f"{TABLES}%fused (p: f32[2]) -> f32[2] {{\n"
        "  ROOT %t = f32[2]{0} tanh(%p), metadata={stack_frame_id=1}\n}\n\n"
        "ENTRY %main (a: f32[2]) -> f32[2] {\n"
        "  ROOT %f = f32[2]{0} fusion(%a), calls=%fused, metadata={stack_frame_id=2}\n}\n"
    )
    operation = read_program("jit_f", text).operations["f"]
    assert operation.name == "fusion of tanh"
    assert [frame.line for frame in operation.frames] == [7, 9]


def test_program_is_read_from_the_bytes_of_a_trace(proto: bytes) -> None:
    programs = programs_of(trace_of("/host:metadata", "jit_f(300)", proto))
    names = [programs.find(300, "jit_f", name) for name in ("add.1", "add.2", "add.3", "add.4")]
    assert "add" in {operation.name for operation in names if operation is not None}


@pytest.mark.parametrize(
    ("plane", "name"), [("/device:GPU:0", "jit_f(3)"), ("/host:metadata", "jit_f")]
)
def test_other_events_are_no_programs(proto: bytes, plane: str, name: str) -> None:
    assert programs_of(trace_of(plane, name, proto))._by_id == {}


def test_program_without_a_description_is_skipped(proto: bytes) -> None:
    assert programs_of(trace_of("/host:metadata", "jit_f(3)", None))._by_id == {}
    assert programs_of(b"")._by_id == {}
    traces = [trace_of("/host:metadata", f"jit_f({number})", proto) for number in (3, 4)]
    assert [*programs_of(b"".join(traces))._by_id] == [3, 4]
