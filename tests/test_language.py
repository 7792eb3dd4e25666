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
        ('x = f"{1} and {{2}} {3}, healed"', "coined word 'healed'"),
        ('x = f"""\n{1}\n{2} was healed\n"""', "coined word 'healed'"),
        ('"""Return the state."""\n# A plain comment.', None),
        ('x = "--max-heals"', None),
        ("run = '{ heals: [], healing: 1 }'", None),
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


def test_tokens_of_strings_include_parts_of_f_strings() -> None:
    """Python 3.12 and later split an f-string into tokens."""
    parts = list(check_language.texts('x = f"""a {1}\nb"""'))
    assert parts[-1][0] == 2
    assert parts[-1][1].startswith("b")


def test_files_of_all_kinds_are_checked() -> None:
    names = {str(path.relative_to(check_language.ROOT)) for path in check_language.tracked()}
    assert names >= {
        "Makefile",
        "mkdocs.yml",
        "pyproject.toml",
        "README.md",
        ".github/workflows/ci.yml",
        "labextension/src/panel/runs.tsx",
        "labextension/style/run.css",
        "nbdist/views/placement/placement.css",
        "nbdist/worker/engine.py",
        "tests/conftest.py",
    }
    assert not names & {"tests/test_language.py", "tools/check_language.py"}
