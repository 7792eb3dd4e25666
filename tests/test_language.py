"""The language check reports each violation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tools import check_language

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('"""What a rank says."""', "docstring opens with 'What': What a rank says."),
        (
            'def f():\n    """Whether it runs."""',
            "docstring opens with 'Whether': Whether it runs.",
        ),
        ('X = 1\n"""Of a run."""', "docstring opens with 'Of': Of a run."),
        ('"""' + 99 * "a" + ' b"""', f"summary of 101 characters: {99 * 'a'} b"),
        ("x = 1  # the crew", "coined word 'crew'"),
        ('x = f"rank {1} was healed"', "coined word 'healed'"),
        ('"""Return the state."""\n# A plain comment.', None),
        ('x = "--max-heals"', None),
    ],
)
def test_findings_of_a_module(tmp_path: Path, source: str, finding: str | None) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [found.text for found in check_language.check(path)] == ([finding] if finding else [])


def test_findings_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nbdist recovers the run.\nIt is broken off.\n")
    assert [found[1:] for found in check_language.check(page)] == [(2, "coined word 'broken off'")]
