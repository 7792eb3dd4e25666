"""Definitions of options, and what the fields of records add to them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from nbdist.records import Option, options_of
from nbdist.records.base import Record

COUNT = Option(help="A count.", flags=("-n", "--number-of"), least=2, most=4)


class Inner(Record, frozen=True):
    """A record in a field of another one."""

    depth: Annotated[int, Option(help="Depth.")] = 3
    plain: int = 0


class Outer(Record, frozen=True):
    """A record with a field of each kind."""

    required: Annotated[str, Option(help="Text.")]
    some_text: Annotated[str, Option(help="Text.", default="from a file")] = "x"
    number: Annotated[int, Option(help="Number.")] = 0
    maybe: Annotated[int | None, Option(help="Number.")] = None
    seconds: Annotated[float, Option(help="Seconds.")] = 1.5
    switch: Annotated[bool, Option(help="Switch.")] = False
    choice: Annotated[Literal["a", "b"], Option(help="Choice.")] = "a"
    maybe_choice: Annotated[Literal["a", "b"] | None, Option(help="Choice.")] = None
    mixed: Annotated[int | Literal["auto"], Option(help="Number or a word.")] = 0
    renamed: Annotated[int, Option(help="Text.", flags=("-r", "--other"), kind="text")] = 4
    pairs: Annotated[dict[str, str], Option(help="List.", kind="list")] = msgspec.field(
        default_factory=dict
    )
    inner: Inner | None = None
    unknown: int = 0


OPTIONS = options_of(Outer)


def test_fields_with_an_option_are_options_in_their_order() -> None:
    assert list(OPTIONS) == [
        "required",
        "some_text",
        "number",
        "maybe",
        "seconds",
        "switch",
        "choice",
        "maybe_choice",
        "mixed",
        "other",
        "pairs",
        "depth",
    ]
    assert {option.record for name, option in OPTIONS.items() if name != "depth"} == {Outer}
    assert OPTIONS["depth"].record is Inner
    assert (OPTIONS["other"].field, OPTIONS["depth"].field) == ("renamed", "depth")


@pytest.mark.parametrize(
    ("name", "kind", "default", "choices"),
    [
        ("required", "", "", ()),
        ("some_text", "", "from a file", ()),
        ("number", "number", "", ()),
        ("maybe", "number", "", ()),
        ("seconds", "", "1.5", ()),
        ("switch", "switch", "", ()),
        ("choice", "", "a", ("a", "b")),
        ("maybe_choice", "", "", ("a", "b")),
        ("mixed", "", "", ()),
        ("other", "text", "4", ()),
        ("pairs", "list", "", ()),
        ("depth", "number", "3", ()),
    ],
)
def test_the_type_of_a_field_gives_kind_default_and_choices(
    name: str, kind: str, default: str, choices: tuple[str, ...]
) -> None:
    option = OPTIONS[name]
    assert (option.kind, option.default, option.choices) == (kind, default, choices)


def test_flags_are_those_of_the_option_else_the_name_of_the_field() -> None:
    assert OPTIONS["some_text"].flags == ("--some-text",)
    assert OPTIONS["other"].flags == ("-r", "--other")


def test_the_first_long_flag_is_the_name() -> None:
    assert (COUNT.flag, COUNT.name, COUNT.is_positional) == ("--number-of", "number_of", False)
    host = Option(help="A host.", flags=("host",))
    assert (host.flag, host.name, host.is_positional) == ("host", "host", True)


def test_other_texts_leave_the_definition_unchanged() -> None:
    changed = COUNT.but(help="Other.", least=0)
    assert (changed.help, changed.least, changed.most) == ("Other.", 0, 4)
    assert (COUNT.help, COUNT.least) == ("A count.", 2)


def test_numbers_in_the_range_have_no_fault() -> None:
    assert COUNT.faults(2, 3, 4) == []
    assert COUNT.faults() == []


@pytest.mark.parametrize("value", [1, 5, 2.0, "3", None, True])
def test_other_values_are_faults(value: object) -> None:
    fault = f"--number-of {value}: use a whole number from 2 to 4"
    assert COUNT.faults(3, value) == [fault]


def test_a_range_without_bounds_begins_at_zero() -> None:
    option = Option(help="Text.", flags=("--k",))
    assert option.faults(0, 10**9) == []
    assert option.faults(True) == ["--k True: use a whole number from 0"]
    assert option.faults(-1) == ["--k -1: use a whole number from 0"]
