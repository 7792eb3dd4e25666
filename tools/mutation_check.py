"""Change the code in many places, and report the changes that no test detects.

Run `python -m tools.mutation_check [PART...]`. `tools/mutants.toml` names the modules
of each part, its tests and the libraries to import once. Every mutant differs from the code by one
operator of Cosmic Ray. It runs in a copy of the repository, so workers of its tests import it too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "tools" / "mutants.toml"
COPIED = ("nbdist", "tests", "tools", "pyproject.toml")
USELESS = ("NoOp", "Variable", "Decorator", "ExceptionReplacer")
"""Parts of the names of operators that change nothing, need arguments or break the import."""
QUIET = ("-W", "ignore:Module already imported")  # libraries of the parent may be plugins of pytest
LEAST_S = 60.0


@dataclass(frozen=True)
class Mutant:
    """A changed module: `line` is the first changed line, and `change` its old and new text."""

    module: str
    line: int
    change: str
    code: str


def mutants_of(module: str, chance: random.Random) -> Iterator[Mutant]:
    """Yield one mutant for each operand or operator of a module that Cosmic Ray can change."""
    code = (ROOT / module).read_text(encoding="utf-8")
    nodes = list(ast_nodes(get_ast(code)))
    found: dict[Any, list[tuple[Any, int]]] = {}
    for name in operator_names():
        if any(word in name for word in USELESS):
            continue
        operator = get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for number, place in enumerate(places):
            found.setdefault(place, []).append((operator, number))
    for _, changes in sorted(found.items()):
        operator, number = chance.choice(changes)
        changed = mutate_code(code, operator, number)
        with contextlib.suppress(SyntaxError):
            if changed is not None and behaviour(changed) != behaviour(code):
                yield Mutant(module, *first_change(code, changed), changed)


def behaviour(code: str) -> str:
    """Return the syntax tree without annotations, which are never evaluated."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, ast.Constant(None))
    return ast.dump(tree)


def first_change(code: str, changed: str) -> tuple[int, str]:
    lines = zip(code.splitlines(), changed.splitlines(), strict=False)
    line, (old, new) = next((n, pair) for n, pair in enumerate(lines, 1) if pair[0] != pair[1])
    return line, f"{old.strip()}  ->  {new.strip()}"


def surviving(part: dict[str, Any], mutants: list[Mutant], copy: Path) -> list[str]:
    """Run the tests of a part with each of its mutants, and return the mutants that pass them."""
    for name in part.get("imports", ()):
        importlib.import_module(name)
    began = time.monotonic()
    if run_tests(part["tests"], copy, 10 * LEAST_S) != "survived":
        raise SystemExit(f"the tests fail without a mutant:\n{(copy / 'output.txt').read_text()}")
    limit_s = LEAST_S + 5 * (time.monotonic() - began)
    print(f"{len(mutants)} mutants, {time.monotonic() - began:.1f} s for each", flush=True)  # noqa: T201
    survivors = []
    for number, mutant in enumerate(mutants, 1):
        path = copy / mutant.module
        before, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutant.code, encoding="utf-8")
        result = run_tests(part["tests"], copy, limit_s)
        path.write_text(before, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the compiled file stays valid
        found = f"{mutant.module}:{mutant.line}: {mutant.change}"
        print(f"{number:3} {result:8} {found}", flush=True)  # noqa: T201
        survivors += [found] if result == "survived" else []
    return survivors


def run_tests(tests: list[str], copy: Path, limit_s: float) -> str:
    """Run tests in a fork of this process, which has imported the libraries already."""
    child = os.fork()
    if child == 0:
        try:
            code = _pytest(tests, copy)
        except BaseException:  # noqa: BLE001 - the fork must not return to the caller
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if status == 0 else "killed"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed"


def _pytest(tests: list[str], copy: Path) -> int:
    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "tests")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(copy)
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *QUIET, *tests]))


def main() -> int:
    configuration = tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Change the code, and list undetected changes.")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(configuration['parts'])}")
    rows, survivors = ["| part | mutants | killed | survived |", "|---|---|---|---|"], []
    for name in parser.parse_args().parts or configuration["parts"]:
        part = configuration["parts"][name]
        chance = random.Random(configuration["seed"])  # noqa: S311 - a fixed sample, no secret
        every = [mutant for module in part["modules"] for mutant in mutants_of(module, chance)]
        chosen = chance.sample(every, min(part["sample"], len(every)))
        with tempfile.TemporaryDirectory(prefix="mutants") as folder:
            for path in map(ROOT.joinpath, COPIED):
                is_file = path.is_file()
                (shutil.copy2 if is_file else shutil.copytree)(path, Path(folder, path.name))
            left = surviving(part, chosen, Path(folder))
        rows.append(f"| {name} | {len(chosen)} | {len(chosen) - len(left)} | {len(left)} |")
        survivors += left
    print("\n".join([*rows, "", *survivors]))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
