"""Definitions of options: the one source of parsers, completion, help, errors and the reference.

An option of a cell or of a cluster is a field of a record, annotated with an `Option`. The field
gives the name, the type, the choices and the default value, the `Option` gives the texts:

    batch: Annotated[int, Option(metavar="N", least=1, help="Samples in a global batch.")] = 0
"""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

Kind = Literal["", "text", "number", "switch", "list"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """The definition of an option, or of a positional argument, of a magic.

    Attributes:
        help: a sentence for `?` and for the command reference.
        details: further sentences for the command reference, in Markdown.
        flags: names, as typed; a word without dashes is a positional argument. Default: `--` and
            the name of the field.
        metavar: placeholder of the value.
        default: text of the default value in the reference. Default: the value of the field.
        least: smallest valid number.
        most: largest valid number.
        nargs: count of values, as in `argparse`.
        bare: value of the option if it is typed without one; None if it needs one.
        kind: type that the parser returns. A `list` can be repeated. Default: the type of the
            field, else text.
        choices: the valid values.
        words: values with a meaning of their own, which Tab completes, among other valid values.
        record: the record that stores the value; None if the magic handles it.
        field: the name of the field in `record`.
    """

    help: str
    details: str = ""
    flags: tuple[str, ...] = ()
    metavar: str = ""
    default: str = ""
    least: int | None = None
    most: int | None = None
    nargs: str = ""
    bare: int | None = None
    kind: Kind = ""
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    record: type[msgspec.Struct] | None = None
    field: str = ""

    @property
    def is_positional(self) -> bool:
        return not self.flags[0].startswith("-")

    @property
    def flag(self) -> str:
        """The first long form, as error texts use it."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    @property
    def name(self) -> str:
        """The name of the option as a keyword in Python."""
        return self.flag.removeprefix("--").replace("-", "_")

    def but(self, **changes: Any) -> Option:
        """Return the definition with other texts, for a magic where the option means less."""
        return replace(self, **changes)

    def faults(self, *values: object) -> list[str]:
        """Return an error text for each value that is outside the range of the option."""
        least = 0 if self.least is None else self.least
        upper = "" if self.most is None else f" to {self.most}"
        return [
            f"{self.flag} {value}: use a whole number from {least}{upper}"
            for value in values
            if type(value) is not int
            or value < least
            or (self.most is not None and value > self.most)
        ]


@cache
def options_of(record: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the options among the fields of a record, and of records in its fields, by name."""
    found: dict[str, Option] = {}
    hints = get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            option = _bound(hint.__metadata__[0], record, field, _parts(hint.__origin__))
            found[option.name] = option
            continue
        for nested in _parts(hint):
            if isinstance(nested, type) and issubclass(nested, msgspec.Struct):
                found |= options_of(nested)
    return found


def _bound(
    option: Option,
    record: type[msgspec.Struct],
    field: msgspec.structs.FieldInfo,
    parts: tuple[Any, ...],
) -> Option:
    """Return the option completed from its field: flags, kind, choices, default."""
    kind = option.kind
    if not kind and bool in parts:
        kind = "switch"
    elif not kind and set(parts) in ({int}, {int, types.NoneType}):
        kind = "number"
    literals = [part for part in parts if get_origin(part) is Literal]
    is_choice = literals and set(parts) <= {*literals, types.NoneType}
    value = "" if field.default in (None, False, "", msgspec.NODEFAULT) else field.default
    return replace(
        option,
        record=record,
        field=field.name,
        kind=kind,
        flags=option.flags or (f"--{field.name.replace('_', '-')}",),
        choices=get_args(literals[0]) if is_choice else (),
        default=option.default or str(value or ""),
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
