"""Generator of labextension/src/records.ts, the TypeScript copy of the records.

Run `python tools/generate_records.py` after a change of `nbdist/records/`. A test fails while the
copy differs.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec.inspect as types

from nbdist import records

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET = Path(__file__).parents[1] / "labextension" / "src" / "records.ts"

ROOTS = (
    records.RunState,
    records.RunOutput,
    records.ClusterState,
    records.StateMessage,
    records.TableMessage,
    records.TextMessage,
    records.CaughtUp,
    records.StopRun,
)
CONSTANTS = (
    "PLACE",
    "MEASURES",
    "RUN_MIME",
    "RUN_ID",
    "NO_SUCH_RUN",
    "RUN_IS_GONE",
)
UNIONS = {"ServerMessage": records.AnyServerMessage}
WIDTH = 100
"""Line length of Prettier in labextension/package.json."""
HEADER = "// Made by tools/generate_records.py from nbdist/records: change those, not this.\n"

SCALARS = {
    types.StrType: "string",
    types.IntType: "number",
    types.FloatType: "number",
    types.BoolType: "boolean",
    types.NoneType: "null",
    types.AnyType: "unknown",
}
LITERALS = {
    frozenset(get_args(value)): name
    for name, value in vars(records).items()
    if get_origin(value) is Literal
}


def source() -> str:
    """Return the text of records.ts."""
    return "\n".join([HEADER, *constants(), *literals(), *interfaces(), *unions()])


def constants() -> Iterator[str]:
    """Yield the declaration of each of `CONSTANTS`."""
    for name in CONSTANTS:
        value = getattr(records, name)
        yield (
            array(name, value)
            if isinstance(value, tuple)
            else f"export const {name} = {value!r};\n"
        )


def literals() -> Iterator[str]:
    """Yield the named literal types that the records use, in order of their names."""
    used = {LITERALS[words] for struct in structs() for words in words_of(struct)}
    for name in sorted(used):
        yield union(name, [repr(word) for word in get_args(getattr(records, name))])


def interfaces() -> Iterator[str]:
    """Yield an interface for each record, with its docstring."""
    for struct in structs():
        lines = [comment(struct.cls), f"export interface {interface(struct.cls)} {{"]
        if struct.tag is not None:
            lines.append(f"  readonly {struct.tag_field}: '{struct.tag}';")
        lines += [f"  readonly {f.encode_name}: {typescript(f.type)};" for f in struct.fields]
        yield "\n".join([*lines, "}\n"])


def unions() -> Iterator[str]:
    """Yield the union types of messages."""
    for name, messages in UNIONS.items():
        yield union(name, [interface(member) for member in get_args(messages)])


def array(name: str, values: tuple[Any, ...]) -> str:
    """Return the declaration of a constant array, broken into lines as Prettier does."""
    text = f"export const {name} = {list(values)} as const;\n"
    if len(text) <= WIDTH + 1:
        return text
    rows = ",\n".join(f"  {value!r}" for value in values)
    return f"export const {name} = [\n{rows}\n] as const;\n"


def union(name: str, members: list[str]) -> str:
    """Return the declaration of a union type, broken into lines as Prettier does."""
    text = " | ".join(members)
    if len(f"export type {name} = {text};") <= WIDTH:
        return f"export type {name} = {text};\n"
    if len(f"  {text};") <= WIDTH:
        return f"export type {name} =\n  {text};\n"
    return "\n".join([f"export type {name} =", *(f"  | {member}" for member in members)]) + ";\n"


def structs() -> list[types.StructType]:
    """Return the root records and all nested ones. A nested record precedes its parent."""
    found: dict[type, types.StructType] = {}

    def visit(kind: types.Type) -> None:
        if isinstance(kind, types.StructType) and kind.cls not in found:
            for field in kind.fields:
                visit(field.type)
            found[kind.cls] = kind
        for part in parts(kind):
            visit(part)

    for root in types.multi_type_info(ROOTS):
        visit(root)
    return list(found.values())


def parts(kind: types.Type) -> tuple[types.Type, ...]:
    """Return the types of the items of a container."""
    match kind:
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return (item,)
        case types.DictType(value_type=value):
            return (value,)
        case types.UnionType(types=members):
            return tuple(members)
    return ()


def words_of(struct: types.StructType) -> Iterator[frozenset[Any]]:
    """Yield the sets of words in the fields of a record."""
    for field in struct.fields:
        for kind in (field.type, *parts(field.type)):
            if isinstance(kind, types.LiteralType):
                yield frozenset(kind.values)


def typescript(kind: types.Type) -> str:
    """Return the TypeScript form of a type.

    Raises:
        TypeError: a type has no TypeScript form.
    """
    match kind:
        case types.StructType(cls=cls):
            return interface(cls)
        case types.LiteralType(values=values):
            return LITERALS[frozenset(values)]
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"readonly {typescript(item)}[]"
        case types.DictType(value_type=value):
            return f"Readonly<Record<string, {typescript(value)}>>"
        case types.UnionType(types=members):
            return " | ".join(typescript(member) for member in members)
    if type(kind) not in SCALARS:
        raise TypeError(f"records.ts: no TypeScript for {kind}")
    return SCALARS[type(kind)]


def interface(record: type) -> str:
    """Return the name of the interface of a record, with the prefix that JupyterLab requires."""
    return f"I{record.__name__}"


def comment(record: type) -> str:
    """Return the docstring as a JSDoc comment."""
    lines = (inspect.getdoc(record) or "").splitlines()
    return "\n".join(["/**", *(f" * {line}".rstrip() for line in lines), " */"])


if __name__ == "__main__":
    TARGET.write_text(source())
