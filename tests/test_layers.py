"""Imports run one way: errors, settings, records ← the stages ← session ← magics."""

from __future__ import annotations

import ast
from pathlib import Path

import nbdist

PACKAGE = Path(nbdist.__file__).parent
FOUNDATION = {"errors", "settings", "records", "doors"}
STAGES = {
    "cells",
    "plan",
    "cluster",
    "worker",
    "telemetry",
    "views",
    "server",
    "export",
    "placing",
}
COMPOSERS = {
    "session",
    "run",
    "result",
    "objects",
    "live",
    "kept",
    "placement",
    "plans",
    "board",
    "held",
    "collectives",
    "pairing",
    "crew",
    "checkup",
    "inspected",
    "doctor",
    "healing",
    "alignment",
    "drift",
    "heals",
    "journal",
    "recorder",
    "running",
    "sights",
    "escalation",
    "stopping",
    "standstill",
    "lone",
    "task",
    "adoption",
    "takeover",
    "failure",
    "former",
    "holding",
    "unkept",
    "tracing_cells",
}
FRONT = {
    "magics",
    "placing_magics",
    "planning_magics",
    "options",
    "starting",
    "noticed",
    "command",
    "completion",
    "keeper",
    "strategies",
    "__init__",
}
MAY_IMPORT = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    **{name: FOUNDATION | {name} for name in STAGES},
    "server": FOUNDATION | {"server", "telemetry"},  # another process, which reads what was kept
    "worker": FOUNDATION | {"worker", "plan"},  # it plans in mid-cell, and where no notebook is
    "placing": FOUNDATION | {"placing", "worker", "plan", "views"},  # a stage by itself, for users
    **dict.fromkeys(COMPOSERS, FOUNDATION | STAGES | COMPOSERS),
    **dict.fromkeys(FRONT, FOUNDATION | STAGES | COMPOSERS | FRONT),
}


def part_of(module: str) -> str:
    """`cells` for nbdist.cells.parse; `__init__` for nbdist itself."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def imports() -> list[tuple[Path, str, str]]:
    """Every import of ours by ours: file, its part, the part it imports."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        own = part_of(".".join(["nbdist", *path.relative_to(PACKAGE).with_suffix("").parts]))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbdist"):
                whole = node.module or ""
                names = [f"{whole}.{a.name}" for a in node.names] if whole == "nbdist" else [whole]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names if a.name.startswith("nbdist")]
            else:
                continue
            found += [(path, own, part_of(name)) for name in names]
    return found


def test_the_walk_finds_imports() -> None:
    assert ("session", "cluster") in {(own, used) for _, own, used in imports()}


def test_no_import_runs_backwards() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}: {own} imports {used}"
        for path, own, used in imports()
        if used not in MAY_IMPORT[own]
    ]
    assert not wrong


def test_frameworks_are_imported_only_where_they_are_run() -> None:
    frameworks = {"tensorflow", "jax", "jaxlib", "keras"}
    for path in PACKAGE.rglob("*.py"):
        roots = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        if roots & frameworks:
            assert path.parent.name in {"worker", "placing"}, f"{path} imports {roots & frameworks}"


def test_files_stay_small() -> None:
    long = {
        p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 600
    }
    assert not long


def test_no_import_cycle() -> None:
    """Between modules, imports for type checking aside."""
    graph = {module: runtime_imports(path) for module, path in modules().items()}
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", f"cycle: {' -> '.join((*trail, module))}"
        if module in state:
            return
        state[module] = "open"
        for used in graph[module] & graph.keys():
            visit(used, (*trail, module))
        state[module] = "done"

    for module in graph:
        visit(module, ())


def modules() -> dict[str, Path]:
    return {
        ".".join(["nbdist", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def runtime_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbdist"):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found
