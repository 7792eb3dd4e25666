"""The command reference is made of the definitions of the options."""

from __future__ import annotations

import re

import pytest

from nbdist.magics.options import MAGICS
from nbdist.records import Option
from tools import generate_commands


def test_the_page_is_up_to_date() -> None:
    page = generate_commands.TARGET.read_text(encoding="utf-8")
    assert page == generate_commands.page(), "run: python -m tools.generate_commands"


def test_each_magic_has_a_section() -> None:
    magics = {
        name
        for of in generate_commands.CLASSES
        for kind in ("line", "cell")
        for name in of.magics[kind]
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
