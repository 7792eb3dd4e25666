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
        (
            'def f(a):\n    """Run.\n\n    Args:\n        a: Whether it runs.\n    """',
            "entry opens with 'Whether': a: Whether",
        ),
        ('def f(a):\n    """Run.\n\n    Args:\n        a: as in `g`.\n    """', None),
        ("x = 1  # the crew", "coined word 'crew'"),
        ('x = f"rank {1} was healed"', "coined word 'healed'"),
        ('x = f"{1} and {{2}} {3}, healed"', "coined word 'healed'"),
        ('x = f"""\n{1}\n{2} was healed\n"""', "coined word 'healed'"),
        ('"""Return the state."""\n# A plain comment.', None),
        ('x = "--max-heals"', None),
        ("run = '{ heals: [], healing: 1 }'", None),
        ("# An escalation of the seat", ["coined word 'escalation'", "coined word 'seat'"]),
        (
            "# It hurries. It landed, mended.",
            [f"coined word {w!r}" for w in ["hurries", "landed", "mended"]],
        ),
        (
            "# Rescued by a door of the seed server",
            [f"coined word {w!r}" for w in ("Rescued", "door", "seed server")],
        ),
        (
            "# A rank's own time, 2 own times",
            [f"coined word {w!r}" for w in ("own time", "own times")],
        ),
        ("# Steps measure their own times; a step, its own time.", None),
        ("# A rank takes no orders.", "coined word 'takes no orders'"),
        ("# The order of ranks, turns and deals", None),
    ],
)
def test_findings_of_a_module(tmp_path: Path, source: str, finding: str | list[str] | None) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    expected = [finding] if isinstance(finding, str) else finding or []
    assert [found.text for found in check_language.check(path)] == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("class CellDoor: pass", "CellDoor"),
        ("class HTTPSeat: pass", "HTTPSeat"),
        ("def take_order_said(): pass", "take_order_said"),
        ("async def rescue_all(): pass", "rescue_all"),
        ("def f(former): pass", "former"),
        ("wishes = 1", "wishes"),
        ("def f(*, is_told=1): pass", "is_told"),
        ("f = lambda *former: 1", "former"),
        ("self._holding = 1", "_holding"),
        ("MENDED: int = 1", "MENDED"),
        ("a, [*said] = b", "said"),
        ("[said for said in b]", "said"),
        ("with a as door: pass", "door"),
        ("for seat in a: pass", "seat"),
        ("if (told := a): pass", "told"),
        ("import a as former", "former"),
        ("try: pass\nexcept E as told: pass", "told"),
        ("match a:\n    case [seat]: pass", "seat"),
        ("match a:\n    case [*seat]: pass", "seat"),
        ("match a:\n    case {**seat}: pass", "seat"),
    ],
)
def test_coined_identifiers_of_python(tmp_path: Path, source: str, name: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    findings = [found.text for found in check_language.check(path)]
    assert len(findings) == 1
    assert findings[0].startswith(f"coined identifier {name!r}")


@pytest.mark.parametrize(
    "source",
    [
        "from other import former, told",
        "said.former(told, said=1)",
        "a = ctypes.c_void_p",
        "seed, order, turn, between, caller, probe, void = a",
        "outdoor = unsaid = aformer = 1",
        "class RunWorker:\n    said: str = ''",
        "class CellOptions:\n    max_heals: int = 1",
    ],
)
def test_other_identifiers_of_python_are_allowed(tmp_path: Path, source: str) -> None:
    """A name is judged where it is defined. Fields of `run.json` and options keep their names."""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert not list(check_language.check(path))


@pytest.mark.parametrize(
    ("folder", "findings"),
    [
        ("planner", ["'Cut': write shard, split or truncate", "'cuts'"]),
        ("jaxpr/pipeline", ["'Cut'", "'cuts'"]),
        ("worker", []),
    ],
)
def test_packages_about_shardings_do_not_cut(
    tmp_path: Path, folder: str, findings: list[str]
) -> None:
    path = tmp_path / "nbdist" / folder / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        'class Cut:\n    """Execute a shortcut."""\n\n    is_executed: int  # an axis cuts it'
    )
    found = [finding.text for finding in check_language.check(path)]
    assert len(found) == len(findings)
    assert all(map(str.startswith, found, findings))


def test_coined_module_names(tmp_path: Path) -> None:
    path = tmp_path / "cell_door.py"
    path.write_text("")
    assert [found.text for found in check_language.check(path)] == ["coined identifier 'cell_door'"]


def test_coined_identifiers_of_typescript(tmp_path: Path) -> None:
    path = tmp_path / "view.tsx"
    path.write_text("const formerRun = tell(run.said, step);\n// The former run, as said above.\n")
    assert [found[1:] for found in check_language.check(path)] == [
        (1, "coined identifier 'formerRun'"),
        (1, "coined identifier 'tell'"),
    ]


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
