"""Figures of the planner in its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import results
from benchmarks.case import Case, Skipped
from tools import planner_figures

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes


def test_the_newest_results_replace_the_section_of_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    title = planner_figures.TITLE
    page.write_text(f"# Page\n\nText.\n\n{title}\n\nold\n\n## Later\n\nMore.\n", encoding="utf-8")
    monkeypatch.setattr(planner_figures, "DOCUMENT", page)
    monkeypatch.setattr(results, "latest", lambda: None)
    assert planner_figures.main() == 0
    assert "old" in page.read_text("utf-8"), "there are no results"
    lines = [
        Case("a plan", 0.5, 1.0, "s", 1.0, 1, "data 4").line("plan"),
        Case("a cell", 0.5, 1.0, "s", 1.0, 1).line("cell"),
        Skipped("memory", "no compiler").line("compiled"),
    ]
    path = results.save(lines, tmp_path, "2026-01-02")
    monkeypatch.setattr(results, "latest", lambda: path)
    for _ in range(2):
        assert planner_figures.main() == 0
    text = page.read_text("utf-8")
    assert text.startswith(f"# Page\n\nText.\n\n{title}\n\nA run of `make bench` on 2026-01-02, ")
    assert text.endswith("| a plan: data 4 | 0.5 | 1 | s | 0.5 | 1 |  |\n\n## Later\n\nMore.\n")
    assert "a cell" not in text
