"""Text of an exported program, from the cells of a notebook."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cells.dependencies import tree_of_cell
from nbdist.cells.names import Names
from nbdist.cells.plan_options import fixed_text
from nbdist.cells.step_function import function_of, function_of_statements, indented
from nbdist.errors import UsageError
from nbdist.jobs import pushed_objects
from nbdist.jobs.cells import INJECTED, job_cells
from nbdist.jobs.data import FILE, JobData
from nbdist.jobs.definitions import divided
from nbdist.jobs.gradient_loops import GradientLoops, has_loops
from nbdist.jobs.parameters import parameters_of, replaced
from nbdist.records import CellOptions, Planning, Saving, StepOptions
from nbdist.utils import hash_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.cells.dependencies import Entry, OwnTexts
    from nbdist.jobs.cells import JobCell
    from nbdist.records import ClusterRequest, Plan, StrategyName

_WIDTH = 100
_CHECKPOINTS = "checkpoints"
_DEFINITION = re.compile(r"^(def|class|async def) ", re.MULTILINE)
_INERT = {
    *("numpy", "scipy", "pandas", "sklearn", "matplotlib", "datasets"),
    *("pyarrow", "polars", "ml_dtypes"),
    *("jax", "jaxlib", "flax", "optax", "equinox", "orbax"),
    *sys.stdlib_module_names,
}
"""Modules whose imports go to the top.

Other imports stay in place: Keras takes its backend from the strategy, and the user's own modules
may draw random numbers.
"""

_UNSEEDED = re.compile(r"default_rng(?!\(\s*[^\s)N])|shuffle")
"""Code whose random numbers may follow from the text of the cell: it sets no seed."""

_WITH_TENSORFLOW = {"tensorflow", "keras"}
"""Modules that workers with TensorFlow alone import first. Others import Keras in a cell."""


@dataclass(frozen=True)
class Program:
    """An exported program.

    Attributes:
        text: source of `train.py`.
        data: data of the notebook that it reads.
        imports: top-level modules that it imports.
        optional: those that it can do without, as `try: import x` with a handler.
        flags: its options, with a description.
        label: execution count of the cell that trains.
        strategy: its strategy.
        plans: layouts of its cells, by the name of the file.
    """

    text: str
    data: JobData
    imports: tuple[str, ...]
    optional: frozenset[str]
    flags: Mapping[str, str]
    label: int
    strategy: StrategyName
    plans: Mapping[str, Plan]


def program_of(
    entries: Sequence[Entry], cluster: ClusterRequest, own: OwnTexts | None = None
) -> Program:
    """Make a program of cells.

    Args:
        entries: the needed cells and pushed objects, and last the cell that trains.
        cluster: the request of the cluster on which they ran.
        own: texts of the user's own modules.

    Raises:
        UsageError: cells or objects cannot be exported. The message contains the remedies.
    """
    training = entries[-1].request
    assert training is not None
    strategy = training.strategy or "mirrored"
    cells = job_cells(entries, strategy, len(cluster.hosts))
    modules = [tree_of_cell(text) for texts in (own or {}).values() for text in texts]
    return _Writer(cells, entries, cluster, modules).program()


class _Writer:
    """Writer of one program.

    Args:
        cells: checked cells; the last one trains.
        entries: the cells and pushed objects, in order.
        cluster: the request of the cluster.
        modules: syntax trees of the user's own modules.
    """

    def __init__(
        self,
        cells: Sequence[JobCell],
        entries: Sequence[Entry],
        cluster: ClusterRequest,
        modules: Sequence[ast.Module],
    ) -> None:
        self._own = modules
        self._cells = {cell.request.number: cell for cell in cells}
        self._last = cells[-1]
        self._entries = entries
        self._cluster = cluster
        self._used = {name for cell in cells for name in (*cell.names.read, *cell.names.bound)}
        self._args, self._job = self._free("args"), self._free("job")
        self._parse = self._free("parse_arguments")
        self._data = JobData(self._free("data"), f"{self._args}.data", self._data_module)
        self._data_modules: dict[str, str] = {}
        self._parameters = parameters_of(cells)
        self._imports: dict[str, str] = {}
        self._plans: dict[str, Plan] = {}
        trees = [cell.tree for cell in cells]
        divides = any(entry.loops for entry in entries)
        self._loops = GradientLoops(trees, modules) if divides else None

    @property
    def _hoisted(self) -> set[str]:
        """Modules whose imports go to the top."""
        has_tensorflow_alone = self._cluster.frameworks == ("tensorflow",)
        return _INERT | (_WITH_TENSORFLOW if has_tensorflow_alone else set())

    @property
    def _modules(self) -> dict[str, None]:
        """Top-level modules that the cells import, in their order."""
        aliases = itertools.chain.from_iterable(_modules(c.tree) for c in self._cells.values())
        return dict.fromkeys(alias.partition(".")[0] for alias in aliases)

    @functools.cached_property
    def _ambiguous(self) -> set[str]:
        """Names that the cells import from several places, or that they also bind otherwise.

        `*` stands for unknown names.
        """
        statements = [statement for cell in self._cells.values() for statement in cell.tree.body]
        origins = {
            origin
            for statement in statements
            if isinstance(statement, (ast.Import, ast.ImportFrom))
            for origin in _origins(statement)
        }
        others = Names()
        others.scan([s for s in statements if not isinstance(s, (ast.Import, ast.ImportFrom))])
        pushed = {n for e in self._entries if e.request is None for n in e.names.binds}
        counts = Counter(origin.name for origin in origins)
        return {n for n in counts if counts[n] > 1 or n in others.bound or n in pushed} | {"*"}

    @property
    def _has_keys(self) -> bool:
        """True if random numbers may follow from the texts of cells."""
        return (
            self._last.request.strategy == "mirrored"
            or any(_UNSEEDED.search(ast.unparse(cell.tree)) for cell in self._cells.values())
            or not self._modules.keys() <= _INERT | _WITH_TENSORFLOW
        )

    def program(self) -> Program:
        """Return the program."""
        parts = [part for entry in self._entries for part in self._part(entry)]
        flags = {flag: text for flag, _, text in self._flags()}
        start = self._start()
        head = [self._docstring(), self._head(), self._parser(), start]
        text = _joined([*head, *parts, f"{self._job}.close()"])
        tree = ast.parse(text)
        modules = dict.fromkeys([*self._modules, *self._data_modules])
        strategy = self._last.request.strategy or "mirrored"
        required = _modules(tree, is_required=True)
        optional = {*modules} - {name.partition(".")[0] for name in required}
        return Program(
            text,
            self._data,
            tuple(modules),
            frozenset(optional),
            flags,
            self._last.label,
            strategy,
            self._plans,
        )

    def _data_module(self, module: str) -> str:
        """Return the name of an imported package for the data, and let the program import it."""
        if module not in self._data_modules:
            taken = {name for cell in self._cells.values() for name in cell.names.assigned}
            taken |= {n for e in self._entries if e.request is None for n in e.names.binds}
            name = self._free(module) if module in taken else module
            self._data_modules[module] = name
            if module in self._hoisted:
                self._imports[_import(module, name)] = ""
        return self._data_modules[module]

    def _free(self, name: str) -> str:
        """Return a name that the program does not use yet."""
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name

    # Head of the program.

    def _docstring(self) -> str:
        return (
            f'"""Training of cell [{self._last.label}] of a notebook.\n\n'
            "python train.py                       one process\n"
            'nbdist run train.py --hosts 2         two processes on this machine\n"""'
        )

    def _head(self) -> str:
        lines = []
        future = [text for text in self._imports if text.startswith("from __future__")]
        backend = ""
        if any("keras" in cell.request.source for cell in self._cells.values()):
            named = "jax" if self._last.request.strategy == "pjrt" else "tensorflow"
            backend = f'os.environ["KERAS_BACKEND"] = "{named}"'
        trees = [*(cell.tree for cell in self._cells.values()), *self._own]
        ordered = self._with_hash_seed() if any(map(_has_set, trees)) else ""
        own = [
            "import argparse",
            *["import os"] * bool(backend or ordered),
            *["import pathlib"] * bool(self._data),
            *["import sys"] * bool(ordered),
        ]
        imported = {o for text in self._imports for o in _origins(_statement_of(text))}
        own = [text for text in own if not imported.issuperset(_origins(_statement_of(text)))]
        every = dict.fromkeys([*own, *self._imports])
        standard = _sorted(t for t in every if _is_standard(t) and t not in future)
        others = _sorted(t for t in every if not _is_standard(t) and t not in future)
        lines += [*future, *[""] * bool(future), *standard]
        lines += ["", ordered] if ordered else []
        lines += ["", backend] if backend else []
        return "\n".join([*lines, "", *others, *[""] * bool(others), "import nbdist"])

    def _with_hash_seed(self) -> str:
        """Return the statement that starts the program again with the notebook's order of sets."""
        name = hash_seed.VARIABLE
        seed = self._cluster.env.get(name, hash_seed.value())
        return (
            f'if os.environ.get("{name}") != "{seed}":  # it decides the order of sets\n'
            f'    os.environ["{name}"] = "{seed}"\n'
            "    os.execv(sys.executable, sys.orig_argv)"
        )

    def _parser(self) -> str:
        title = f'description="Training of cell [{self._last.label}] of a notebook."'
        lines = [
            f"def {self._parse}():",
            _call("    parser = argparse.ArgumentParser", [title]),
        ]
        for flag, settings, text in self._flags():
            given = [f'"{flag}"', *settings, f'help="{text}"']
            lines.append(_call("    parser.add_argument", given))
        return "\n".join([*lines, "    return parser.parse_args()"])

    def _flags(self) -> Iterator[tuple[str, Sequence[str], str]]:
        """Yield the flag, the settings and the description of each argument."""
        options = self._last.request.options
        numbers: dict[str, float] = {p.flag: p.value for p in self._parameters}
        if options.step is not None and options.step.data:
            numbers["--epochs"] = options.step.epochs
            if options.step.batch:
                numbers["--batch"] = options.step.batch
        texts = {
            "--epochs": "Passes through the data.",
            "--batch": "Samples in a global batch.",
            "--learning-rate": "Learning rate.",
        }
        for flag in (flag for flag in texts if flag in numbers):
            kind = "int" if isinstance(numbers[flag], int) else "float"
            yield flag, (f"type={kind}", f"default={numbers[flag]!r}"), texts[flag]
        if self._data:
            default = "default=pathlib.Path(__file__).parent"
            yield "--data", ("type=pathlib.Path", default), "Folder of the notebook's data."
        if options.saving is None:
            text = "Folder of checkpoints, to save and to continue from. Default: none."
            yield "--checkpoint", (), text
        else:
            text = "Folder of checkpoints, to save and to continue from."
            yield "--checkpoint", (f'default="{_CHECKPOINTS}"',), text

    def _start(self) -> str:
        request, cluster = self._last.request, self._cluster
        given = [f'"{request.strategy}"', f"seed={cluster.seed}"]
        each = {host.devices or cluster.devices_per_host for host in cluster.hosts}
        if request.strategy == "pjrt" and max(each):
            given.append(f"devices_per_host={max(each)}")
        if request.strategy == "mirrored" and cluster.communication != "auto":
            given.append(f'communication="{cluster.communication}"')
        lines = [
            f"{self._args} = {self._parse}()",
            _call(f"{self._job} = nbdist.script", given),
        ]
        names = [n for n in INJECTED if any(n in c.names.read for c in self._cells.values())]
        lines += [f"{name} = {self._job}.{name}" for name in names]
        if self._data.arrays:
            numpy = self._data_module("numpy")
            lines.append(f'{self._data.source} = {numpy}.load({self._args}.data / "{FILE}")')
        return "\n".join(lines)

    # Cells.

    def _part(self, entry: Entry) -> Iterator[str]:
        if entry.request is None:
            wanted = {n for cell in self._cells.values() for n in cell.names.read}
            wanted |= {
                cell.request.step.options.data
                for cell in self._cells.values()
                if cell.request.step is not None
            }
            payload = Path(entry.file).read_bytes() if entry.file else entry.payload
            objects = {n: v for n, v in pushed_objects.read(payload).items() if n in wanted}
            before = {*self._data_modules}
            lines = self._data.assignments(objects)
            imports = [
                _import(module, name)
                for module, name in self._data_modules.items()
                if module not in before and module not in self._hoisted
            ]
            yield "\n".join(["# Data of the notebook", *imports, *lines])
            return
        cell = self._cells[entry.request.number]
        if cell.request.step is not None:
            yield from self._step(cell)
            return
        own = [p for p in self._parameters if p.cell == cell.label]
        text, trees = self._without_imports(cell, replaced(cell.request.source, own, self._args))
        definitions, statements = divided(cell, self._marked(text, trees), trees)
        title = f"# Cell [{cell.label}]"
        if definitions:
            yield f"{title}\n{definitions}"
            title += ", continued"
        if not statements:
            return
        options = self._options(cell)
        if entry.loops and has_loops(cell.tree):
            function = self._free("train_loop")
            yield f"{title}\n{_function(statements, function, cell)}"
            yield _call(f"{self._job}.run", [function, *options])
        else:
            head = _call(f"with {self._job}.cell", options, ":")
            yield f"{title}\n{head}\n{indented(statements)}"

    def _step(self, cell: JobCell) -> tuple[str, str]:
        """Return the function of a step, and the call that runs it."""
        program, name = cell.request.program, self._free("train_step")
        assert program is not None
        function = function_of(cell.request.source, program, name)
        call = _call(f"{self._job}.train", [name, *self._options(cell)])
        return f"# Cell [{cell.label}]\n{function}", call

    def _without_imports(self, cell: JobCell, source: str) -> tuple[list[str], list[ast.stmt]]:
        """Return the lines and statements of a cell without imports, which go to the top."""
        lines = source.split("\n")
        if lines[0].startswith("# %%"):  # the line of the magic
            lines[0] = ""
        rest = []
        used = [n for s in cell.tree.body for n in range(s.lineno, (s.end_lineno or 0) + 1)]
        for statement in cell.tree.body:
            numbers = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            if (
                isinstance(statement, (ast.Import, ast.ImportFrom))
                and all(name.partition(".")[0] in self._hoisted for name in _modules(statement))
                and self._ambiguous.isdisjoint(origin.name for origin in _origins(statement))
                and all(used.count(n) == 1 for n in numbers)
            ):
                self._imports |= dict.fromkeys(map(ast.unparse, _single(statement)), "")
                for number in numbers:
                    lines[number - 1] = ""
            else:
                rest.append(statement)
        return lines, rest

    def _marked(self, lines: list[str], statements: list[ast.stmt]) -> list[str]:
        """Mark the functions and classes with training loops."""
        lines = lines.copy()
        for node in statements:
            is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if is_definition and self._loops is not None and self._loops.within(node):
                lines[node.lineno - 1] = f"@{self._job}.lift\n{lines[node.lineno - 1]}"
        return lines

    def _options(self, cell: JobCell) -> list[str]:
        """Return the options of a cell as keyword arguments."""
        options, step = cell.request.options, cell.request.step
        given: dict[str, object] = {}
        if step is not None:
            given |= {name: repr(value) for name, value in _changed(step.options, _OF_STEP)}
            given["data"] = f'"{step.options.data}"'
            given["epochs"] = f"{self._args}.epochs" if cell is self._last else step.options.epochs
            if step.options.batch:
                batch = f"{self._args}.batch" if cell is self._last else step.options.batch
                given["batch"] = batch
        elif options.step is not None and options.step.check:
            given["check"] = "True"
        given |= self._layout(cell)
        given |= {name: repr(value) for name, value in _changed(options, _OF_CELL)}
        if cell is self._last or self._trained(cell):
            given |= self._saving(cell, options.saving)
        if self._has_keys:
            given["shuffle_key"] = str(zlib.crc32(cell.request.source.encode()))
        return [f"{name}={value}" for name, value in given.items()]

    def _layout(self, cell: JobCell) -> dict[str, str]:
        """Return the options of the layout. On other numbers of devices, they plan it again."""
        step, given = cell.request.options.step, dict[str, str]()
        planning = Planning() if step is None else step.planning
        if cell.plan is not None:
            name = "plan.json" if cell is self._last else f"plan-{cell.label}.json"
            self._plans[name] = cell.plan
            given["plan"] = f'"{name}"'
        elif planning.verify:
            given["verify"] = "True"
        if fixed := fixed_text(planning):
            given["fix"] = f'"{fixed}"'
        if planning.budget:
            given["budget"] = f"{planning.budget:_}"
        return given

    def _trained(self, cell: JobCell) -> bool:
        """Return True if a cell made steps of a training."""
        (entry,) = (e for e in self._entries if e.request is cell.request)
        return entry.trained or entry.loops or entry.kind == "step"

    def _saving(self, cell: JobCell, saving: Saving | None) -> dict[str, str]:
        """Return the options of checkpoints. Each earlier training has a folder of its own."""
        folder = within = f"{self._args}.checkpoint"
        if cell is not self._last:
            within = f'{folder} and f"{{{folder}}}/cell-{cell.label}"'
        given = {"checkpoint": within, "resume": f"{folder} is not None"}
        if saving is not None:
            every = f"{saving.every_steps}" if saving.every_steps else f"{saving.every_s:g}s"
            given |= {"save_every": f'"{every}"', "keep": str(saving.keep)}
        return given


_OF_STEP = (
    *("steps", "shuffle", "order", "bucket", "scale_lr"),
    *("check", "jit", "on_nan", "prefetch"),
)
_OF_CELL = ("seed", "own_data", "no_lift", "precision", "guard")
"""Options that a program uses. The others concern the notebook."""


def _function(statements: str, name: str, cell: JobCell) -> str:
    """Return the statements of a cell as a function.

    Raises:
        UsageError: they are no function.
    """
    try:
        text = function_of_statements(statements, name)
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UsageError(
            f"cannot export cell [{cell.label}]: its training loop becomes a function, and there "
            f"`{(error.text or '').strip()}` is invalid ({error.msg}): move it to another cell"
        ) from None
    return text


def _changed(
    record: StepOptions | CellOptions, names: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield the options that differ from their defaults."""
    default = StepOptions(data="") if isinstance(record, StepOptions) else CellOptions()
    for name in names:
        value = getattr(record, name)
        if value != getattr(default, name):
            yield name, value


def _call(head: str, given: Sequence[str], end: str = "") -> str:
    """Return a call, on several lines if it is long."""
    line = f"{head}({', '.join(given)}){end}"
    if len(line) <= _WIDTH:
        return line
    margin = head[: len(head) - len(head.lstrip())]
    words = (f"{margin}    {word}," for word in given)
    return "\n".join([f"{head}(", *words, f"{margin}){end}"])


def _joined(parts: Sequence[str]) -> str:
    """Join the parts of a program; two blank lines surround definitions."""
    text = parts[0]
    for before, part in itertools.pairwise(parts):
        defines = any(_DEFINITION.search(each) for each in (before, part))
        text += ("\n\n\n" if defines else "\n\n") + part.strip("\n")
    return text + "\n"


def _has_set(tree: ast.AST) -> bool:
    """Return True if code creates sets."""
    return any(
        isinstance(node, (ast.Set, ast.SetComp))
        or (isinstance(node, ast.Name) and node.id in ("set", "frozenset"))
        for node in ast.walk(tree)
    )


class _Origin(NamedTuple):
    """A name that an import binds, the module, and the name in the module."""

    name: str
    module: str
    attribute: str


def _origins(statement: ast.Import | ast.ImportFrom) -> Iterator[_Origin]:
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            yield _Origin(alias.asname or alias.name, module, alias.name)
        else:
            package = alias.name.partition(".")[0]
            yield _Origin(alias.asname or package, alias.name if alias.asname else package, "")


def _single(statement: ast.Import | ast.ImportFrom) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield an import for each module of `import os, sys`, which are sorted apart."""
    if isinstance(statement, ast.ImportFrom):
        yield statement
    else:
        yield from (ast.Import([alias]) for alias in statement.names)


def _statement_of(text: str) -> ast.Import | ast.ImportFrom:
    """Return the statement of an import."""
    (statement,) = ast.parse(text).body
    assert isinstance(statement, (ast.Import, ast.ImportFrom))
    return statement


def _modules(tree: ast.AST, *, is_required: bool = False) -> Iterator[str]:
    """Yield the modules that code imports; with `is_required`, those without an error handler."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        parts = [*ast.iter_child_nodes(node)]
        if is_required and isinstance(node, ast.Try) and node.handlers:
            parts = [part for part in parts if part not in node.body]
        waiting += parts[::-1]


def _import(module: str, name: str) -> str:
    return f"import {module}" if module == name else f"import {module} as {name}"


def _sorted(imports: Iterable[str]) -> list[str]:
    return sorted(imports, key=lambda text: (text.startswith("from "), text))


def _is_standard(text: str) -> bool:
    return text.split()[1].partition(".")[0] in sys.stdlib_module_names
