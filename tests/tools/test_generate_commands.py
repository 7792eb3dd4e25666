"""Command reference, generated from the definitions of the options."""

from __future__ import annotations

import re

import pytest

from nbdist.magics.options import MAGICS
from nbdist.records import Option
from tools import generate_commands


def test_pages_are_up_to_date() -> None:
    pages = generate_commands.pages()
    assert {path.name for path in pages} >= {"commands.md", "placement.md", "planner.md"}
    old = [path.name for path, text in pages.items() if path.read_text("utf-8") != text]
    assert not old, "run: python -m tools.generate_commands"


def test_tables_between_marks_are_renewed() -> None:
    text = "a\n<!-- options of dist_devices -->\nold\n<!-- end of options -->\nb\n"
    page = generate_commands.with_tables(text, generate_commands.DOCS / "x.md")
    before, table, after = page.split("\n\n")
    assert (before, after) == (
        "a\n<!-- options of dist_devices -->",
        "<!-- end of options -->\nb\n",
    )
    assert table.splitlines() == [*generate_commands.table(MAGICS["dist_devices"])][:-1]
    assert generate_commands.with_tables(page, generate_commands.DOCS / "x.md") == page


def test_a_table_without_an_end_is_refused() -> None:
    text = "<!-- options of dist_devices -->\n| option |\n"
    with pytest.raises(ValueError, match=r"x\.md: .* has no <!-- end of options -->"):
        generate_commands.with_tables(text, generate_commands.DOCS / "x.md")


def test_a_table_does_not_refer_to_its_own_page() -> None:
    row = "Text. See [a](x.md). More. See [b](x.md#c). See [d](y.md)."
    path = generate_commands.DOCS / "x.md"
    assert generate_commands.within(path, row) == "Text. More. See [b](#c). See [d](y.md)."


def test_each_magic_has_a_section() -> None:
    magics = {
        name
        for cls in generate_commands.CLASSES
        for kind in ("line", "cell")
        for name in cls.magics[kind]
    }
    assert magics == set(generate_commands.commands())
    headings = re.findall(r"^## .*?(dist_\w+)`$", generate_commands.page(), re.MULTILINE)
    assert headings == generate_commands.commands()
    assert sorted(headings) == sorted(MAGICS)


@pytest.mark.parametrize("name", MAGICS)
def test_each_option_is_in_the_table_of_its_magic(name: str) -> None:
    text = "\n".join(generate_commands.section(name))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(MAGICS[name].options)
    for option, row in zip(MAGICS[name].options, rows, strict=True):
        assert option.help.replace("|", "\\|") in row
        assert all(f"`{choice}`" in row for choice in option.choices)


def test_values_and_defaults_are_shown() -> None:
    option = Option(
        flags=("-n", "--number"), kind="number", metavar="N|M", default="3", help="A number."
    )
    command = generate_commands.Magic("dist_x", "", (option,))
    (*_, row, _) = generate_commands.table(command)
    assert row == "| `-n`, `--number` | `N\\|M` | `3` | A number. |"
