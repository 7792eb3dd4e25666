"""Parsing of magics' lines, from the definitions of their options."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.error import UsageError as ParserError

from nbdist.errors import CellInterrupt, UsageError
from nbdist.magics import options as module
from nbdist.magics.options import (
    MAGICS,
    OUTPUT,
    RANKS,
    as_argument,
    check_name,
    command,
    options_from,
    parse,
)
from nbdist.records import CellOptions, Option

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

OPTIONS = (
    Option(flags=("host",), nargs="*", metavar="HOST", help="Hosts."),
    Option(flags=("-n", "--number"), kind="number", metavar="N", help="At most 100%."),
    Option(flags=("--name",), metavar="TEXT", help="Name."),
    Option(flags=("--env",), kind="list", metavar="K=V", help="Variables."),
    Option(flags=("--level",), choices=("low", "high"), help="Level."),
    Option(flags=("--fast",), kind="switch", help="Fast."),
    Option(flags=("--watch",), kind="number", bare=0, help="Watch."),
)


@pytest.fixture
def magic(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a magic with the options above."""
    monkeypatch.setattr(module, "MAGICS", dict(MAGICS))

    @command(*OPTIONS)
    def dist_example(shell: object, line: str) -> None:
        """Do nothing."""

    example: Callable[..., Any] = dist_example
    return example


def typed(magic: Callable[..., Any], line: str) -> dict[str, Any]:
    return vars(parse(magic, line))


def test_omitted_options_are_none_or_empty(magic: Callable[..., Any]) -> None:
    assert typed(magic, "") == {
        "host": [],
        "number": None,
        "name": None,
        "env": [],
        "level": None,
        "fast": False,
        "watch": None,
    }


def test_the_kind_of_an_option_gives_the_type_of_its_value(magic: Callable[..., Any]) -> None:
    line = "a b -n 3 --name x --env A=1 --env B=2 --level high --fast"
    assert typed(magic, line) == {
        "host": ["a", "b"],
        "number": 3,
        "name": "x",
        "env": ["A=1", "B=2"],
        "level": "high",
        "fast": True,
        "watch": None,
    }


@pytest.mark.parametrize(("line", "value"), [("--watch", 0), ("--watch 100 --fast", 100)])
def test_an_option_may_be_typed_without_its_value(
    magic: Callable[..., Any], line: str, value: int
) -> None:
    assert typed(magic, line)["watch"] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a b"', "a b"),
        ("'a b'", "a b"),
        ("it's\"", "it's\""),
        ('"', '"'),
        ('""', ""),
    ],
)
def test_quotes_around_a_value_are_removed(text: str, value: str) -> None:
    assert module._unquoted(text) == value


def test_quotes_around_words_of_a_list_are_removed(magic: Callable[..., Any]) -> None:
    found = typed(magic, "--env \"A=1 2\" --name 'x y'")
    assert (found["env"], found["name"]) == (["A=1 2"], "x y")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--numbr=123456789", "unrecognized arguments: --numbr=123456789; did you mean --number?"),
        ("--nam x --fst", "did you mean --name, --fast?"),  # no abbreviations
        ("--leve1 x --fest", "; did you mean --level, --fast?"),
        ("--zzz", "; options are --env, --fast, --level, --name, --number"),
        ("-n x", "'x' is not a whole number"),
        ("-n 1.5", "'1.5' is not a whole number"),
        ("--level middle", "invalid choice: 'middle'"),
    ],
)
def test_invalid_lines_name_the_valid_options(
    magic: Callable[..., Any], line: str, message: str
) -> None:
    with pytest.raises(ParserError) as refused:
        parse(magic, line)
    assert message in str(refused.value)


@pytest.mark.parametrize("first", [None, CellInterrupt("stopped after step 3")])
def test_an_interrupt_of_a_magic_is_shown_without_frames(
    monkeypatch: pytest.MonkeyPatch, first: CellInterrupt | None
) -> None:
    monkeypatch.setattr(module, "MAGICS", dict(MAGICS))

    @command()
    def dist_example(shell: object, line: str) -> None:
        """Do nothing, until the second interrupt."""
        error = KeyboardInterrupt()
        error.__context__ = first
        raise error

    with pytest.raises(CellInterrupt) as stopped:
        dist_example(None, "")
    assert str(stopped.value) == ("stopped after step 3" if first else "stopped")


@pytest.mark.parametrize("line", ["--help", "4 -h"])
def test_help_replaces_the_magic(
    magic: Callable[..., Any], capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert magic(None, line) is None
    text = capsys.readouterr().out
    assert text.startswith("%dist_example: Do nothing.\n")
    assert "  --level low|high  Level.\n" in text
    assert "  -n, --number N    At most 100%.\n" in text


def test_all_magics_refuse_a_misspelt_option_with_the_nearest_one(shell: InteractiveShell) -> None:
    for name in shell.magics_manager.magics["line"]:
        if name.startswith("dist_") and module.MAGICS[name].options:
            flag = module.MAGICS[name].options[-1].flag
            if flag.startswith("--"):
                with pytest.raises(ParserError, match=f"did you mean {flag}"):
                    shell.run_line_magic(name, f"x {flag}x")


@pytest.mark.parametrize(
    ("kind", "line", "flag"),
    [("cell", "--stratgy pjrt", "--strategy"), ("line", "model --stepz 3", "--steps")],
)
def test_options_without_effect_are_suggested_too(
    shell: InteractiveShell, kind: str, line: str, flag: str
) -> None:
    assert flag not in [option.flag for option in module.MAGICS["dist_plan"].options]
    given = ("dist_plan", line, "x = 1") if kind == "cell" else ("dist_plan", line)
    with pytest.raises(ParserError, match=f"did you mean {flag}"):
        getattr(shell, f"run_{kind}_magic")(*given)


def test_forms_are_those_that_ipython_registered(shell: InteractiveShell) -> None:
    registered = shell.magics_manager.magics
    signs = {"line": "%", "cell": "%%"}
    for name, magic in module.MAGICS.items():
        forms = [f"{sign}{name}" for kind, sign in signs.items() if name in registered[kind]]
        assert [*magic.forms] == forms


@pytest.mark.parametrize(
    ("name", "begin"),
    [("dist_run", "%%dist_run: "), ("dist_plan", "%dist_plan, %%dist_plan: ")],
)
def test_help_begins_with_the_forms_of_the_magic(name: str, begin: str) -> None:
    assert module.help_text(module.MAGICS[name]).startswith(begin)


@pytest.mark.parametrize("cell", ["%%dist_run --help", "%%dist_run -h\n\n", "%%dist_plan --help\n"])
def test_help_of_a_cell_magic_needs_no_body(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], cell: str
) -> None:
    assert shell.run_cell(cell).success
    assert "%%dist_" in capsys.readouterr().out.partition(":")[0]


@pytest.mark.parametrize("cell", ["%%dist_run", "%%dist_run --data x", "%%dist_other --help"])
def test_ipython_refuses_other_cell_magics_without_a_body(
    shell: InteractiveShell, cell: str
) -> None:
    assert not shell.run_cell(cell).success


def test_unloading_removes_the_transformer_of_help(shell: InteractiveShell) -> None:
    shell.run_line_magic("unload_ext", "nbdist")
    try:
        assert module.with_body not in shell.input_transformers_cleanup
        assert not shell.run_cell("%%dist_run --help").success
    finally:
        shell.run_line_magic("load_ext", "nbdist")


def test_an_unknown_short_option_has_no_suggestion(magic: Callable[..., Any]) -> None:
    with pytest.raises(ParserError) as refused:
        parse(magic, "-z")
    assert str(refused.value).endswith("unrecognized arguments: -z")


def test_a_magic_is_described_with_its_options(magic: Callable[..., Any]) -> None:
    described = module.MAGICS["dist_example"]
    assert (described.name, described.description) == ("dist_example", "Do nothing.")
    assert described.options == OPTIONS
    text = magic.__doc__ or ""
    assert text.index("[-n N]") < text.index("[--name TEXT]") < text.index("[--fast]")
    assert "At most 100%." in text


def test_choices_replace_the_placeholder() -> None:
    given = as_argument(Option(flags=("--a",), metavar="A", choices=("x",), help="A.")).kwds
    assert given["choices"] == ("x",)
    assert "metavar" not in given
    assert as_argument(RANKS).kwds["metavar"] == "R,R:R"
    assert as_argument(OUTPUT).args == ("-o", "--output")


def test_whole_numbers_are_read() -> None:
    assert module._number("-3") == -3
    with pytest.raises(ArgumentTypeError):
        module._number("")


def line_of_run(**given: object) -> Namespace:
    return Namespace(output="r", **given)


def test_options_of_a_cell_are_selected_from_the_line() -> None:
    args = line_of_run(seed=3, ranks="0")
    assert options_from(args) == CellOptions(seed=3, ranks="0")
    assert options_from(args, seed=None) == CellOptions(ranks="0")


def test_wrong_options_of_a_cell_are_refused() -> None:
    with pytest.raises(UsageError, match="--keep without --checkpoint"):
        options_from(line_of_run(keep=2))


@pytest.mark.parametrize("name", [None, "run", "_1", "größe"])
def test_python_names_are_accepted(name: str | None) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "1x", "a-b", "a.b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_name(name)
    assert str(refused.value) == f"-o {name}: use a name that Python accepts"
