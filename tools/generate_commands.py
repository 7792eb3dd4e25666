"""Generator of docs/commands.md, the reference of all magics, and of option tables in other pages.

Run `python -m tools.generate_commands` after a change of an option or of the docstring of a magic.
A test fails while a page is outdated. A page of docs/ marks the place of a table by two comments:

    <!-- options of dist_plan -->
    <!-- end of options -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.magics.devices import DeviceMagics
from nbdist.magics.dist import DistMagics
from nbdist.magics.export import ExportMagics
from nbdist.magics.options import MAGICS, Magic
from nbdist.magics.plan import PlanMagics
from nbdist.magics.trace import TraceMagics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.records import Option

DOCS = Path(__file__).parents[1] / "docs"
TARGET = DOCS / "commands.md"
CLASSES = (DistMagics, PlanMagics, DeviceMagics, TraceMagics, ExportMagics)
HEADER = """<!-- Made by tools/generate_commands.py from definitions of options: change those. -->

# Command reference

`%load_ext nbdist` loads the commands. `%NAME` is a line of a cell, and `%%NAME` the first line of a
cell. Tab completes options and their choices. `%NAME?` and `%%NAME?` show them.

In Python, `Cluster.run` accepts the options of `%%dist_run` by name, with `_` in place of `-`:
`cluster.run(cell, data="train", batch=64, save_every="30s", checkpoint="run1")`.
`nbdist.runs()` lists stored [runs](runs.md).
"""

_BEGIN = "<!-- options of "
_TABLE = re.compile(rf"({_BEGIN}(\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the new text of the reference, and of each page with a table of options."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    marked = {path: text for path, text in texts.items() if _BEGIN in text}
    return {TARGET: page(), **{path: with_tables(text, path) for path, text in marked.items()}}


def with_tables(text: str, path: Path) -> str:
    """Return the text of a page with new tables between its marks.

    Raises:
        ValueError: a mark for the end of a table is missing.
    """

    def renewed(found: re.Match[str]) -> str:
        rows = "\n".join(within(path, row) for row in table(MAGICS[found[2]]))
        return f"{found[1]}\n{rows}\n{found[3]}"

    new, count = _TABLE.subn(renewed, text)
    if count != text.count(_BEGIN):
        raise ValueError(f"{path.name}: a table of options has no <!-- end of options -->")
    return new


def within(path: Path, text: str) -> str:
    """Remove references to the page that contains the text, and shorten links to its sections."""
    text = re.sub(rf" See \[[^]]*\]\({re.escape(path.name)}\)\.", "", text)
    return text.replace(f"]({path.name}#", "](#")


def page() -> str:
    """Return the text of the reference."""
    sections = (line for name in commands() for line in section(name))
    return "\n".join([HEADER, *contents(), *sections])


def commands() -> list[str]:
    """Return the names of all commands, in the order of their definition."""
    return [name for of in CLASSES for name in vars(of) if name in MAGICS]


def contents() -> Iterator[str]:
    """Yield a table of all commands."""
    yield "| command | action |"
    yield "|---|---|"
    for name in commands():
        forms = forms_of(name)
        anchor = "-".join([name] * len(forms))
        action = MAGICS[name].description.splitlines()[0]
        yield f"| [{', '.join(forms)}](#{anchor}) | {action} |"
    yield ""


def section(name: str) -> Iterator[str]:
    """Yield the description of a command, and a table of its options."""
    command = MAGICS[name]
    yield f"## {', '.join(forms_of(name))}\n"
    yield f"{command.description}\n"
    yield from table(command)


def table(command: Magic) -> Iterator[str]:
    if not command.options:
        return
    yield "| option | values | default | meaning |"
    yield "|---|---|---|---|"
    for option in command.options:
        cells = (names(option), values(option), default(option), meaning(option))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def forms_of(name: str) -> list[str]:
    """Return the forms of a magic: for a line, for a cell, or both."""
    return [f"`{form}`" for form in MAGICS[name].forms]


def names(option: Option) -> str:
    if option.is_positional:
        dots = " ..." if option.nargs in ("*", "+") else ""
        return f"`{option.metavar or option.name.upper()}{dots}`"
    return ", ".join(f"`{flag}`" for flag in option.flags)


def values(option: Option) -> str:
    if option.kind == "switch":
        return ""
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.is_positional:
        return "number" if option.kind == "number" else ""
    return f"`{option.metavar or option.name.upper()}`"


def default(option: Option) -> str:
    if option.kind == "switch":
        return "off"
    if option.is_positional and not option.default:
        return ""
    is_value = option.default.isdecimal() or option.default in option.choices
    return f"`{option.default}`" if is_value else option.default or "none"


def meaning(option: Option) -> str:
    return " ".join(filter(None, (option.help, option.details)))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
