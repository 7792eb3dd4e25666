"""Benchmarks at a tiny size, and the functions that store, show and compare their results."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import results
from benchmarks.__main__ import NAMES
from benchmarks.case import Case, Scale, Skipped
from benchmarks.limits import limited, wait_until
from benchmarks.turns import Turn, in_turns, sides

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SMOKE_S = 560
FULL = Scale()


def line(case: str, ours: float, peer: float = 1.0, **more: object) -> results.Line:
    return Case(case, ours, peer, "s", 1.0, 3).line("step") | more


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [("--strategy", "pjrt"), pytest.param((), marks=pytest.mark.full)], ids=" ".join
)
def test_every_benchmark_runs_at_a_tiny_size(options: Sequence[str]) -> None:
    """The default suite measures one strategy, and all benchmarks without a strategy."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--smoke", *options, "all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SMOKE_S,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert {found["benchmark"] for found in lines} == set(NAMES)
    assert all(found.get("skipped") or found["runs"] >= 1 for found in lines)


@pytest.mark.processes
def test_a_benchmark_that_fails_gives_an_exit_status() -> None:
    program = (
        "import sys\n"
        "from benchmarks import __main__, imports\n"
        "def cases(scale):\n"
        "    raise ValueError('no figure')\n"
        "    yield\n"
        "imports.cases = cases\n"
        "sys.argv = ['benchmarks', '--smoke', 'imports', 'planner_tables']\n"
        "sys.exit(__main__.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SMOKE_S,
    )
    assert done.returncode == 1
    assert "ValueError: no figure" in done.stderr
    assert "failed: imports\n" in done.stderr
    assert "planner_tables" in done.stdout, "the other benchmarks still run"


def test_no_benchmark_assigns_to_names_of_nbdist() -> None:
    """Also not in the texts of cells."""
    for path in (ROOT / "benchmarks").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        for source in [tree, *map(parsed, texts)]:
            replaced = assigned(source) & imported(source)
            assert not replaced, f"{path.name} replaces attributes of {replaced}"


def parsed(text: object) -> ast.AST:
    """Return the tree of a text; an empty one if it is no program."""
    try:
        return ast.parse(text) if isinstance(text, str) else ast.Module([], [])
    except SyntaxError:
        return ast.Module([], [])


def imported(tree: ast.AST) -> set[str]:
    """Return the names that a program imports from nbdist."""
    return {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbdist"))
        or isinstance(node, ast.Import)
        for alias in node.names
        if isinstance(node, ast.ImportFrom) or alias.name.startswith("nbdist")
    }


def assigned(tree: ast.AST) -> set[str]:
    """Return the names whose attributes a program assigns."""
    targets = {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    found = set()
    for target in targets:
        value: ast.expr = target
        while isinstance(value, ast.Attribute):
            value = value.value
        if isinstance(value, ast.Name):
            found.add(value.id)
    return found


def test_the_search_for_assignments_finds_them() -> None:
    tree = ast.parse("from nbdist.worker import loop as l\nl.inner.value = 1\nother.x = 2")
    assert assigned(tree) & imported(tree) == {"l"}


@pytest.mark.processes
def test_a_day_has_one_file_of_results(tmp_path: Path) -> None:
    first = results.save([line("a", 1.0), line("b", 2.0)], tmp_path, "2026-01-02")
    again = results.save([line("b", 3.0)], tmp_path, "2026-01-02")
    assert first == again == tmp_path / "2026-01-02.json"
    content = results.load(again)
    assert [(found["case"], found["ours"]) for found in content["cases"]] == [
        ("a", 1.0),
        ("b", 3.0),
    ]
    assert content["versions"].keys() == {
        *("python", "commit", "nbdist", "tensorflow", "jax", "ipyparallel")
    }
    assert content["machine"].keys() == {"cores", "cpu", "memory_bytes"}


@pytest.mark.processes
def test_the_previous_results_are_those_of_the_last_day_before(tmp_path: Path) -> None:
    assert results.latest(tmp_path) is None
    for date in ("2026-01-02", "2026-02-01", "2026-02-03"):
        results.save([line("a", 1.0)], tmp_path, date)
    assert results.latest(tmp_path) == tmp_path / "2026-02-03.json"
    assert results.latest(tmp_path, before="2026-02-03") == tmp_path / "2026-02-01.json"
    assert results.latest(tmp_path, before="2026-01-02") is None


def test_the_comparison_flags_ratios_that_grew_by_more_than_five_percent() -> None:
    skipped = Skipped("d", "no browser").line("step")
    old = [line("a", 1.0), line("b", 1.0), line("gone", 1.0), skipped]
    new = [line("a", 1.04), line("b", 1.06), line("new", 1.0), skipped]
    assert list(results.comparison(old, new))[2:] == [
        "| a | 1.000 | 1.040 |  |",
        "| b | 1.000 | 1.060 | **worse** |",
    ]


def test_the_table_shows_figures_in_fitting_units() -> None:
    ratios = {"ratio": 0.5, "target": 1.0}
    rows = results.table(
        [
            line("a", 0.0123, 0.0246),
            line("b", 3e6, 1e3, unit="bytes", ratio=3000.0),
            line("c", 2e-6, 1.5) | ratios,
            line("d", 123.4, 0.5, unit=""),
            Skipped("e", "no browser").line("chart"),
        ]
    )
    assert list(rows)[2:] == [
        "| a | 12.3 ms | 24.6 ms | 0.5 | 1 |  |",
        "| b | 3 MB | 1 kB | 3000.0 | 1 | **missed** |",
        "| c | 2 µs | 1.5 s | 0.5 | 1 |  |",
        "| d | 123 | 0.5 | 246.8 | 1 | **missed** |",
        "| e | | | | | not run: no browser |",
    ]


def test_a_limit_ends_a_wait_with_an_error() -> None:
    with pytest.raises(TimeoutError, match="the case did not end within"), limited(0.1, "the case"):
        time.sleep(60)
    with limited(60, "the case"):
        pass
    with pytest.raises(TimeoutError, match="the signal: not within"):
        wait_until(bool, 0.1, "the signal")
    wait_until(lambda: True, 0.1, "the signal")


def test_steps_count_in_turns_of_both_sides() -> None:
    turns = [Turn(0.0, 1.0, 2.0), Turn(10.0, 11.0, 12.0)]
    ours = [0.1 * i for i in range(10)] + [10.1, 10.2]
    peer = [1 + 0.2 * i for i in range(5)]
    case = in_turns(FULL, "a step", [sides(turns, ours, peer)], 1.0)
    assert (case.ours, case.peer, case.runs) == pytest.approx((0.1, 0.2, 1))
    with pytest.raises(ValueError, match="a step: no turn of 2"):
        in_turns(FULL, "a step", [sides(turns, ours, [])], 1.0)
    quick = sides(turns, [0.0, 0.5, 2.0], [0.0, 3.0])
    smoke = in_turns(Scale(smoke=True), "a step", [quick], 1.0)
    assert (smoke.ours, smoke.peer) == (1.0, 3.0)


def test_parts_in_which_both_sides_change_places_count_equally() -> None:
    turns = [Turn(0.0, 1.0, 2.0)]
    fast, slow = [0.1 * i for i in range(10)], [1 + 0.2 * i for i in range(5)]
    first, second = sides(turns, fast, slow)
    case = in_turns(FULL, "a step", [(first, second), (second, first)], 1.0)
    assert (case.ours, case.peer, case.runs) == pytest.approx((0.15, 0.15, 2))
