"""Commands and their options: one definition for parser, completion, help and the reference."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from argparse import SUPPRESS, ArgumentTypeError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as ParserError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from nbdist.cells.options import OPTIONS, cell_options
from nbdist.errors import CellInterrupt, UsageError
from nbdist.records import Option

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from nbdist.records import CellOptions

OUTPUT = Option(
    flags=("-o", "--output"), metavar="NAME", help="Store the run under this name in the notebook."
)
RANKS = OPTIONS["ranks"]
PLANNING = tuple(OPTIONS[name] for name in ("plan", "budget", "fix"))
RUNNING = tuple(option for option in OPTIONS.values() if option.name not in ("on", "verify"))
"""Options of `%%dist_run`."""


@dataclass(frozen=True)
class Magic:
    """Description of a magic for its help and for the command reference.

    Attributes:
        name: name without percent signs.
        description: text of its docstring.
        options: options that it documents.
        ignored: options that it accepts without effect.
        forms: its forms for a line and for a cell, such as `%%dist_run`.
    """

    name: str
    description: str
    options: tuple[Option, ...]
    ignored: tuple[Option, ...] = ()
    forms: tuple[str, ...] = ()


MAGICS: dict[str, Magic] = {}
"""All magics with their options, by name, in the order of their definition."""


def command(
    *options: Option, ignored: tuple[Option, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Add options to a magic: to its parser, its `?` help, Tab and the command reference.

    Args:
        *options: the options.
        ignored: options that the parser also accepts, without effect.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = function.__name__
        description = inspect.getdoc(function) or ""
        MAGICS[name] = Magic(name, description, options, ignored, _forms(function))
        function = _interruptible(function)
        for option in reversed(options):
            function = as_argument(option)(function)
        for option in ignored:
            function = as_argument(option.but(help=SUPPRESS))(function)
        magic = magic_arguments()(function)
        magic.parser.allow_abbrev = False
        return magic

    return decorate


def _forms(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the forms of a magic; one for a line and a cell gives its cell a default."""
    name, cell = function.__name__, inspect.signature(function).parameters.get("cell")
    if cell is None:
        return (f"%{name}",)
    return (f"%%{name}",) if cell.default is cell.empty else (f"%{name}", f"%%{name}")


def _interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a magic that shows its help, and one line after an interrupt, not nbdist's frames."""

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        if any(_asks_for_help(str(line)) for line in given[1:2]):
            sys.stdout.write(help_text(MAGICS[function.__name__]))
            return None
        try:
            return function(*given)
        except CellInterrupt:
            raise
        except KeyboardInterrupt as error:  # perhaps a second one, during the end of the cell
            first = error.__context__
            raise first if isinstance(first, CellInterrupt) else CellInterrupt("stopped") from None

    return run


def _asks_for_help(line: str) -> bool:
    return not {"-h", "--help"}.isdisjoint(line.split())


def with_body(lines: list[str]) -> list[str]:
    """Add a body to a cell that only asks for the help of a cell magic.

    IPython refuses a cell magic without a body. This is one of its transformers of input.

    Args:
        lines: lines of a cell.
    """
    head, *body = lines or [""]
    name = head.split()[0].removeprefix("%%") if head.startswith("%%dist_") else ""
    if name in MAGICS and _asks_for_help(head) and not "".join(body).strip():
        return [f"{head.rstrip()}\n", "# help\n"]
    return lines


def help_text(magic: Magic) -> str:
    """Return the description of a magic and of its options, for `--help`."""
    lines = [f"{', '.join(magic.forms)}: {magic.description}", ""]
    heads = [" ".join(filter(None, (", ".join(o.flags), _value(o)))) for o in magic.options]
    width = max(map(len, heads), default=0)
    for head, option in zip(heads, magic.options, strict=True):
        default = f" Default: {option.default}." if option.default else ""
        lines.append(f"  {head:{width}}  {option.help}{default}")
    return "\n".join(lines).rstrip() + "\n"


def _value(option: Option) -> str:
    """Return the placeholder of the value of an option, as in a usage line."""
    if option.is_positional or option.kind == "switch":
        return ""
    return "|".join(option.choices) or option.metavar


def as_argument(option: Option) -> argument:
    """Return the option in the form that IPython adds to parsers."""
    return argument(*option.flags, **_keywords(option))


def _keywords(option: Option) -> dict[str, Any]:
    text = option.help if option.help == SUPPRESS else option.help.replace("%", "%%")
    keywords: dict[str, Any] = {"help": text}
    if option.kind == "switch":
        return {"action": "store_true", **keywords}
    if option.kind == "number":
        keywords["type"] = _number
    if option.kind == "list":
        keywords |= {"action": "append", "default": []}
    if option.nargs:
        keywords["nargs"] = option.nargs
    if option.bare is not None:
        keywords |= {"nargs": "?", "const": option.bare}
    if option.choices:
        keywords["choices"] = option.choices
    elif option.metavar:
        keywords["metavar"] = option.metavar
    return keywords


def _number(text: str) -> int:
    """Read a whole number, for `argparse`."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def parse(magic: Callable[..., Any], line: str) -> Namespace:
    """Parse the line of a magic, and remove quotes around values.

    Raises:
        IPython.core.error.UsageError: an option or its value is not valid.
    """
    try:
        args: Namespace = parse_argstring(magic, line)
    except ParserError as error:
        suggestion = _suggestion(str(error), MAGICS[magic.__name__])
        raise ParserError(f"{error}{suggestion}") from None
    for name, value in vars(args).items():
        if isinstance(value, str):
            setattr(args, name, _unquoted(value))
        elif isinstance(value, list):
            setattr(args, name, [_unquoted(word) for word in value])
    return args


def _suggestion(error: str, magic: Magic) -> str:
    """Return a text with the closest valid options for unknown ones, or all; empty if none."""
    flags, ignored = _long_flags(magic.options), _long_flags(magic.ignored)
    _, is_unknown, words = error.partition("unrecognized arguments: ")
    unknown = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    if not is_unknown or not unknown:
        return ""
    close = dict.fromkeys(
        flag for word in unknown for flag in difflib.get_close_matches(word, flags + ignored, n=1)
    )
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; options are {', '.join(sorted(flags))}" if flags else "; it has no options"


def _long_flags(options: tuple[Option, ...]) -> list[str]:
    return [flag for option in options for flag in option.flags if flag.startswith("--")]


def _unquoted(text: str) -> str:
    """Remove the quotes around a value. IPython leaves some of them."""
    quoted = len(text) > 1 and text[0] in "\"'" and text[-1] == text[0]
    return text[1:-1] if quoted else text


def options_from(args: Namespace, **changes: Any) -> CellOptions:
    """Return the options of a cell from the line of its magic.

    Raises:
        UsageError: options are wrong. The message contains all faults.
    """
    typed = {name: value for name, value in vars(args).items() if name in OPTIONS}
    return cell_options({**typed, **changes})


def check_name(name: str | None) -> None:
    """Raise UsageError if the value of `-o` is not a Python name."""
    for fault in name_faults(name):
        raise UsageError(fault)


def name_faults(name: str | None) -> list[str]:
    """Return an error text if the value of `-o` is not a Python name."""
    is_valid = name is None or name.isidentifier()
    return [] if is_valid else [f"-o {name}: use a name that Python accepts"]
