"""Imports between packages follow one table, without import cycles.

All imports count: those in modules, in functions, and under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nbdist

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = Path(nbdist.__file__).parent
MOST_LINES = 600
MOST_MODULES = 22
"""Limit for one folder of `nbdist/`."""

MOST_ATTRIBUTES = 15
"""Limit for the instance attributes of one class, those of its bases in nbdist included.

Records have no limit: classes of `nbdist/records`, and the fields of frozen records elsewhere.
"""

MOST_AT_THE_TOP = 7
FRAMEWORKS = {"tensorflow", "jax", "jaxlib", "keras"}
WITH_FRAMEWORKS = {"worker", "jaxpr", "parallel"}

OF_SEVERAL_MODULES = {
    "worker/jax/keras/test_fit.py",
    "worker/lifting/test_random_loops.py",
    "worker/planning/test_compiler_check_tpus.py",
    "worker/profiling/test_cell_trace.py",
    "worker/tensorflow/keras/test_fit.py",
    "worker/tensorflow/keras/test_fit_local.py",
    "worker/tensorflow/keras/test_fit_property.py",
    "worker/tensorflow/replica/test_two_replicas.py",
    "worker/test_cell_ends.py",
}
"""Files of `tests/` whose tests need several modules at once. Others have the name of a module."""

FOUNDATION: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "private_api": {"errors"},
    "records": {"errors"},
    "settings": {"errors", "records"},
    "utils": {"errors", "records"},
}
"""Packages that all others may import."""

LEVELS: dict[str, tuple[set[str], ...]] = {
    "jaxpr": ({"jaxpr"}, {"jaxpr.pipeline"}),
    "planner": ({"planner.graph", "planner.hardware"}, {"planner.cost"}, {"planner.search"}),
    "views": (
        {"views"},
        {"views.cluster", "views.placement"},
        {"views.plan"},
        {"views.run"},
    ),
    "worker": (
        {"worker.runtime"},
        {"worker.data", "worker.checkpoint", "worker.keras", "worker.jax.runtime"}
        | {"worker.own_modules"},
        {"worker.jax.arrays", "worker.profiling", "worker.tensorflow.runtime"},
        {"worker.training", "worker.inspection", "worker.tensorflow.replica"},
        {"worker.planning", "worker.lifting", "worker.jax.rebuild"}
        | {"worker.tensorflow.keras", "worker.tensorflow.saving"},
        {"worker.jax.step", "worker.jax.keras", "worker.tensorflow"},
        {"worker.jax", "worker.fit"},
        {"worker"},
        {"worker.remote", "worker.script", "worker.export"},
    ),
    "parallel": ({"parallel.placement"}, {"parallel.pipeline", "parallel.autoplace"}),
    "cluster": (
        {"cluster.forkserver"},
        {"cluster.remote_host"},
        {"cluster.schedulers"},
        {"cluster"},
    ),
}
"""Levels of a package from low to high. A level may import those below it."""

PLANNER = set().union(*LEVELS["planner"])

PACKAGES: dict[str, set[str]] = {
    "cells": set(),
    "planner": set(),
    "telemetry": set(),
    "views": set(),
    "jaxpr": {"planner.graph"},
    "worker": {"cells", "jaxpr", "jaxpr.pipeline"} | PLANNER,
    "parallel.placement": {"views", "views.cluster", "worker.jax", "worker.jax.runtime"}
    | {"worker.planning", "worker.profiling", "worker.runtime"},
    "parallel.pipeline": {
        "jaxpr",
        "jaxpr.pipeline",
        "planner.graph",
        "views",
        "worker.jax.runtime",
    },
    "parallel.autoplace": {"views", "worker.jax.runtime"},
    # Stop on the page cancels the submitted job of a run.
    "server": {"jobs", "telemetry"},
    "cluster.forkserver": set(),
    "cluster.remote_host": {"views"},
    "cluster.schedulers": set(),
    # Checks of hosts compare GPUs with the planner's catalog. Functions of `worker.remote` run on
    # engines, through ipyparallel's `apply`.
    "cluster": {"planner.hardware", "telemetry", "views", "views.cluster", "worker.remote"},
    "execution": {"cells", "cluster", "telemetry", "views", "views.cluster", "views.run"}
    | {"worker.checkpoint", "worker.remote"},
    # `%dist_show` reads arrays on engines by functions of `worker.inspection`.
    "session": {"cells", "cluster", "cluster.forkserver", "execution", "jobs", "telemetry", "views"}
    | {"views.cluster", "views.placement", "views.run", "worker.inspection", "worker.remote"},
    # `nbdist run` gives processes the variables of engines, which `cluster` knows.
    "jobs": {"cells", "cluster", "cluster.schedulers", "views"},
    # Options of `%dist_start` become hosts and resources, which `cluster` checks.
    "magics": {"cells", "cluster", "execution", "parallel.placement", "session", "views"}
    | {"views.cluster", "views.placement", "views.plan"},
    "cli": {"jobs", "magics", "session"},
    "strategies": {"views"},
}
"""Packages that each package may import, besides the foundation and its own lower levels.

A package without a row has that of the package around it.
"""

ALONE = ("cli", "strategies")
"""Modules at the top, which ARCHITECTURE.md does not list."""

STARTED_BY_NAME: dict[str, set[str]] = {
    "nbdist": {
        "nbdist.execution.alerts",
        "nbdist.execution.result",
        "nbdist.execution.saved_runs",
        "nbdist.magics.extension",
        "nbdist.parallel",
        "nbdist.parallel.autoplace.decorator",
        "nbdist.parallel.pipeline.stacked_layers",
        "nbdist.parallel.pipeline.stages",
        "nbdist.parallel.placement.devices",
        "nbdist.parallel.placement.meshes",
        "nbdist.parallel.placement.place",
        "nbdist.parallel.placement.where",
        "nbdist.records",
        "nbdist.server",
        "nbdist.session.cluster",
        "nbdist.session.discovery",
        "nbdist.session.submission",
        "nbdist.strategies",
        "nbdist.worker.export.model_export",
        "nbdist.worker.script.job",
    },
    "nbdist.cluster.fleet": {
        "nbdist.worker.engine",
        "nbdist.worker.jax.backend",
        "nbdist.worker.jax.step.step",
        "nbdist.worker.keras.dependencies",
        "nbdist.worker.tensorflow.step",
        "nbdist.worker.tensorflow.strategy",
        "nbdist.worker.tensorflow.without_keras",
    },
    "nbdist.cluster.forkserver.control_socket": {"nbdist.session.detached"},
    "nbdist.cluster.jax_coordinators": {"nbdist.worker.jax.runtime.coordinator"},
    "nbdist.cluster.launcher": {"nbdist.worker.engine"},
    "nbdist.jobs.launch_files": {"nbdist.cli"},
    "nbdist.strategies": {"nbdist.worker.jax.strategy"},
    "nbdist.worker.script.run_store": {"nbdist.execution.program_runs"},
    "nbdist.worker.data.sources": {"nbdist.worker.jax.arrays.distributed_dataset"},
}
"""Modules that a string may name although the table does not allow their import.

Another process starts or preloads them, or they are imported when first used. Code may also only
compare a class with the name, as in `worker/data/sources.py`.
"""

NAMED = re.compile(r"(nbdist(?:\.[a-z_0-9]+)+)(?::\w+)?(?:\.[A-Z]\w*)?")
PROGRAM = re.compile(r"-m (nbdist(?:\.[a-z_0-9]+)+)")
PRIVATE = re.compile(
    r"(jax\._src|jaxlib\._jax|tensorflow\.python|keras\.src|orbax\.checkpoint\._src)\b"
)
"""Private modules of libraries. `nbdist/private_api` has all of their names."""

NOT_MODULES = {"nbdist.ipyparallel", "nbdist.options"}
"""A logger, and a matcher of completions."""


def allowed() -> dict[str, set[str]]:
    """Return the whole table: the packages that each package may import."""
    table = {name: set(may) for name, may in FOUNDATION.items()}
    for name in {name.partition(".")[0] for name in PACKAGES}:
        lower = set(FOUNDATION)
        for level in LEVELS.get(name, ({name},)):
            table |= {package: lower | row_of(package) for package in level}
            lower = lower | level
    return table


def row_of(package: str) -> set[str]:
    """Return the row of a package in `PACKAGES`, or that of the package around it."""
    return PACKAGES[package] if package in PACKAGES else row_of(package.rpartition(".")[0])


@cache
def modules() -> Mapping[str, Path]:
    """Return all modules and packages by their dotted names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        words = ["nbdist", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(words).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """Return the nbdist modules that each module imports anywhere in its code."""
    return {
        module: frozenset(name for node in nodes(path) for name in imported(node))
        for module, path in modules().items()
    }


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        inside = {f"{node.module}.{alias.name}" for alias in node.names}
        names = {name if name in modules() else str(node.module) for name in inside}
    else:
        names = set()
    return {name for name in names if name.partition(".")[0] == "nbdist"}


def package_of(module: str) -> str:
    """Return the most specific package of the table that contains the module."""
    words = module.split(".")[1:]
    heads = [".".join(words[:n]) for n in range(len(words), 0, -1)]
    return next((head for head in heads if head in allowed()), module)


def test_imports_in_functions_and_for_type_checking_are_found() -> None:
    found = imports()
    assert "nbdist.cluster.fleet" in found["nbdist.cluster.launcher"]  # for type checking
    assert "nbdist.worker.jax.backend" in found["nbdist.worker.remote.setup"]  # in functions
    assert package_of("nbdist.worker.jax.step.names") == "worker.jax.step"
    assert package_of("nbdist.worker.jax.backend") == "worker.jax"


def test_each_module_is_in_a_package_of_the_table() -> None:
    known = {module for module in modules() if package_of(module) in allowed()}
    only_names = {"nbdist", "nbdist.parallel", "nbdist.planner"}
    assert modules().keys() - known == only_names
    assert all(modules()[name].name == "__init__.py" for name in only_names)
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert packages - {f"nbdist.{name}" for name in allowed()} == only_names


def test_imports_follow_the_table() -> None:
    table = allowed()
    wrong = [
        f"{module} imports {used}"
        for module, names in imports().items()
        if module != "nbdist"
        for used in sorted(names)
        if package_of(used) not in {package_of(module), *table[package_of(module)]}
    ]
    assert not wrong


def test_the_architecture_page_has_the_same_table() -> None:
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z_, ]+) \| ([a-z_., ]+) \|$", page, re.MULTILINE)[1:]
    written = {
        name: set() if cell == "nothing else" else set(cell.split(", "))
        for names, cell in rows
        for name in names.split(", ")
    }
    assert written.keys() == {name.partition(".")[0] for name in PACKAGES} - set(ALONE)
    for package, names in written.items():
        used = set().union(*(may for name, may in PACKAGES.items() if inside(name, package)))
        unused = {name for name in names if not any(inside(one, name) for one in used)}
        missing = {one for one in used if not any(inside(one, name) for name in names)}
        assert (package, unused, missing) == (package, set(), set())


def test_the_architecture_page_lists_the_same_levels() -> None:
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    text = page.partition("\nLevels from low to high:\n")[2].partition("\n`tests/")[0]
    written = {}
    for package, line, numbered in re.findall(r"^- (\w+):(.*)\n((?: +\d.*\n?)*)", text, re.M):
        rows = re.findall(r"\d+\. (.*)", numbered)
        levels = [re.split(", | and ", row) for row in rows or line.split(", ")]
        written[package] = tuple({full_name(name, package) for name in level} for level in levels)
    assert written == LEVELS


def full_name(written: str, package: str) -> str:
    """Return the full name of a package in a list of levels.

    `shared modules` and `the other modules` are those of the package itself.
    """
    return package if written.endswith(" modules") else f"{package}.{written.strip()}"


def inside(name: str, package: str) -> bool:
    """Return True if a name is a package or is in it."""
    return name == package or name.startswith(f"{package}.")


def test_no_file_imports_itself_through_others() -> None:
    """Names in strings do not count: most of them start another process (`STARTED_BY_NAME`)."""
    graph, done = imports(), set[str]()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for used in sorted(graph[module]):
                visit(used, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_frameworks_are_imported_only_by_code_that_computes() -> None:
    wrong = [
        f"{module} imports {', '.join(sorted(found))}"
        for module, path in modules().items()
        if module.split(".")[1:2] and module.split(".")[1] not in WITH_FRAMEWORKS
        if (found := FRAMEWORKS & {root for node in nodes(path) for root in roots(node)})
    ]
    assert not wrong


def roots(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {str(node.module).partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def test_private_modules_of_libraries_are_named_in_one_package() -> None:
    found = [
        f"{module}: {path}"
        for module, file in modules().items()
        if package_of(module) != "private_api"
        for node in nodes(file)
        for path in named_paths(node)
        if PRIVATE.match(path)
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import jax._src.core",
        "from jax import _src",
        "from jax._src import api",
        "from jaxlib import _jax",
        "import tensorflow.python as tfp",
        "import tensorflow as tf\nf = tf.python.framework.ops",
        "import jax\njax._src.api.vjp",
        "import sys\nsys.modules['keras.src.saving']",
        "def f():\n    from keras.src import tree",
        "from orbax.checkpoint._src import serialization",
    ],
)
def test_names_of_private_modules_are_found(code: str) -> None:
    paths = [path for node in ast.walk(ast.parse(code)) for path in named_paths(node)]
    assert any(map(PRIVATE.match, paths))


def named_paths(node: ast.AST) -> list[str]:
    """Return the dotted paths that a node imports, reads or has as a string."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute():
            return [re.sub(r"^tf\.", "tensorflow.", ast.unparse(node))]
        case ast.Constant(value=str(text)):
            return [text]
    return []


def test_files_and_folders_have_a_limited_size() -> None:
    files = {path for path in modules().values() if path.name != "__init__.py"}
    long = {
        str(path): lines
        for path in files
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert not long
    sizes = Counter(path.parent for path in files)
    assert sizes[PACKAGE] + 1 <= MOST_AT_THE_TOP  # with `__init__.py`
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names that methods assign on `self`, the fields of an instance, and `__slots__`.

    The fields of a record count only if it is mutable.
    """
    assigned = {
        node.attr
        for method in cls.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if (is_mutable(cls) if is_record(cls) else is_of_instances(node))
    }
    return assigned | fields | slots(cls)


def is_record(cls: ast.ClassDef) -> bool:
    """Return True if a class is a dataclass, a struct or a named tuple."""
    return any(re.search(r"\b(dataclass|Struct|Record|NamedTuple)\b", text) for text in makers(cls))


def is_mutable(cls: ast.ClassDef) -> bool:
    """Return True if a record is not frozen."""
    options = [ast.unparse(keyword) for keyword in cls.keywords]
    return not any(re.search("frozen=True|NamedTuple", text) for text in (*makers(cls), *options))


def makers(cls: ast.ClassDef) -> list[str]:
    return [ast.unparse(maker) for maker in (*cls.decorator_list, *cls.bases)]


def is_of_instances(field: ast.AnnAssign) -> bool:
    """Return True for an annotation without a value, other than that of a class variable."""
    return field.value is None and "ClassVar" not in ast.unparse(field.annotation)


def slots(cls: ast.ClassDef) -> set[str]:
    """Return the names in the `__slots__` of a class."""
    found = set[str]()
    for node in cls.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                named = ast.literal_eval(value)
                found |= {named} if isinstance(named, str) else set(named)
    return found


@cache
def classes() -> Mapping[str, ast.ClassDef]:
    """Return the classes of nbdist by their dotted names."""
    return {
        f"{module}.{node.name}": node
        for module, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }


@cache
def imported_names(module: str) -> Mapping[str, str]:
    """Return the full name of each name that a module imports."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes(modules()[module])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def bases(name: str) -> set[str]:
    """Return the full names of the bases of a class, as far as they are in nbdist."""
    module = name.rpartition(".")[0]
    found = set()
    for base in classes()[name].bases:
        plain = base.value if isinstance(base, ast.Subscript) else base  # `Base[T]`
        head, *rest = ast.unparse(plain).split(".")
        origin = imported_names(module).get(head, f"{module}.{head}")
        found.add(".".join((origin, *rest)))
    return found & classes().keys()


def all_attributes(name: str) -> set[str]:
    """Return the attributes of a class and of its bases in nbdist."""
    inherited = (all_attributes(base) for base in bases(name))
    return attributes(classes()[name]).union(*inherited)


def test_the_count_of_attributes_is_correct() -> None:
    source = """
@dataclass(slots=True)
class Mutable:
    a: int
    def move(self):
        self.b, (self.c, *self.d) = 1, (2, 3)
        self.e: int = 4
        self.f += self.not_assigned
        other.g = 5

class Frozen(msgspec.Struct, frozen=True):
    a: int

class Plain:
    a: int = 0

class Annotated:
    a: int
    b: ClassVar[int]

class Slotted:
    __slots__ = ("a", "b")
"""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    expected = [{*"abcdef"}, set(), set(), {"a"}, {*"ab"}]
    assert [attributes(cls) for cls in found] == expected


def test_attributes_of_bases_in_other_modules_count() -> None:
    remote = "nbdist.cluster.remote_host.remote_forkserver.RemoteForkServer"
    client = "nbdist.cluster.forkserver.client.ForkServerClient"
    assert bases(remote) == {client}
    assert attributes(classes()[client]) < all_attributes(remote)


def test_classes_have_few_instance_attributes() -> None:
    counts = {
        name: len(all_attributes(name))
        for name in classes()
        if package_of(name.rpartition(".")[0]) != "records"
    }
    assert {name: n for name, n in counts.items() if n > MOST_ATTRIBUTES} == {}


def test_test_files_have_the_names_of_modules() -> None:
    tests = PACKAGE.parent / "tests"
    mirrored = [path for path in tests.iterdir() if (PACKAGE / path.name).is_dir()]
    found = {
        path.relative_to(tests).as_posix()
        for folder in mirrored
        for path in folder.rglob("test_*.py")
        if folder.name != "labextension"
    }
    expected = {
        path.relative_to(PACKAGE).with_name(f"test_{path.name.lstrip('_')}").as_posix()
        for path in modules().values()
    }
    assert found - expected == OF_SEVERAL_MODULES


def test_imports_are_absolute() -> None:
    relative = [
        f"{module}: line {node.lineno}"
        for module, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@cache
def named_in_strings() -> Mapping[str, frozenset[str]]:
    """Return the names in the strings of each module: programs, fork targets, preloaded modules.

    A string is the name of a module, perhaps with a function or class, or a command with `-m`.
    """
    return {
        module: frozenset(
            found[1]
            for node in nodes(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if (found := NAMED.fullmatch(node.value) or PROGRAM.search(node.value))
            if found[1] not in NOT_MODULES
        )
        for module, path in modules().items()
    }


def named_against_the_table() -> dict[str, set[str]]:
    """Return the modules that strings name and that the table of imports does not allow."""
    table = allowed() | {"nbdist": set()}
    above = {
        module: {
            name
            for name in names
            if package_of(name) not in {package_of(module), *table[package_of(module)]}
        }
        for module, names in named_in_strings().items()
    }
    return {module: names for module, names in above.items() if names}


def test_modules_that_strings_name_exist() -> None:
    wrong = [
        f"{module}: {name}"
        for module, names in named_in_strings().items()
        for name in sorted(names - modules().keys())
    ]
    assert not wrong


def test_strings_name_modules_of_the_table() -> None:
    assert (
        "nbdist.cluster.forkserver.server" in named_in_strings()["nbdist.cluster.forkserver.client"]
    )
    assert (
        "nbdist.cluster.forkserver.remote_start"
        in named_in_strings()["nbdist.cluster.remote_host.ssh_connection"]
    )  # in a command
    assert named_against_the_table() == STARTED_BY_NAME
