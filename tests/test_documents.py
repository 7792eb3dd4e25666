"""Limits and links of documents, and the cells of the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from notebooks.run import execute
from tools import check_language, planner_figures

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
AT_THE_TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = (README, *(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").glob("*.md")))
LINES = {"README.md": 130, "docs/planner.md": 200}
WORDS = {"README.md": 900, "ARCHITECTURE.md": 900, "docs/design.md": 2000}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


@pytest.mark.parametrize(("page", "limit"), LINES.items())
def test_a_page_has_at_most_its_number_of_lines(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text("utf-8").splitlines()) <= limit


@pytest.mark.parametrize(("page", "limit"), WORDS.items())
def test_a_page_has_at_most_its_number_of_words(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text("utf-8").split()) <= limit


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_point_to_files(page: Path) -> None:
    text = CODE.sub("", page.read_text("utf-8"))
    local = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_contains_no_coined_words(page: Path) -> None:
    assert list(check_language.check(page)) == []


def test_the_planner_page_has_a_section_for_its_figures() -> None:
    text = planner_figures.DOCUMENT.read_text("utf-8")
    assert text.count(planner_figures.TITLE) == 1
    assert planner_figures.BY_HAND in text


@pytest.mark.processes
def test_the_cells_of_the_readme_run(tmp_path: Path) -> None:
    cells = [*_cells_of(README), "%dist_stop"]
    assert len(cells) == 6
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    source, target = tmp_path / "readme.ipynb", tmp_path / "executed.ipynb"
    nbformat.write(notebook, source)
    execute(source, target)
    text = target.read_text("utf-8")
    assert "4 workers are ready" in text
    assert text.count("epoch 4  loss") == 2, "one step cell for each strategy is expected"


def _cells_of(page: Path) -> Iterator[str]:
    for block in re.findall(r"```\n(.*?)\n```", page.read_text("utf-8"), re.DOTALL):
        if block.startswith("%"):
            yield block
