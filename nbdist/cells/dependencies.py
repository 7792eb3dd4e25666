"""Dependencies of a run on earlier cells, for creating its inputs again on fresh workers.

A cell is needed if it binds or changes a name that the run, or a needed later cell, reads. Values
that training has changed come from the checkpoint. A value that a cell derived from a trained value
cannot be created again, unless the checkpoint contains it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cells.names import Names
from nbdist.cells.possible_changes import (
    CHANGING,
    READING,
    PossibleChanges,
    reached,
    with_origins,
)
from nbdist.cells.value_parts import passed
from nbdist.cells.written_files import WrittenFiles
from nbdist.errors import ReplayError
from nbdist.records import CellRequest, Plan  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    OwnTexts = Mapping[str, Sequence[str]]
    """Texts of the files of the user's own modules, by the modules' names."""

TRAINING = {"fit", "train_on_batch"}
"""Methods that train their object."""

_COLLECTING = {"append", "add", "extend", "insert", "setdefault", "update"}
"""Methods of collections, whose object is not trained by a training in their arguments."""

_WORD = re.compile(r"[A-Za-z_]\w*")
_CALL = re.compile(r"([A-Za-z_]\w*)\(")
_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_LEVELS = 2
_MOST_TEXT = 400_000
"""Characters of own modules that are analysed: about 12,000 lines, 1 s."""

_STAR = "*"
"""Name that `from module import *` binds. Any run may need what it imports."""


class CellNames(msgspec.Struct, frozen=True):
    """Names that a cell uses.

    Attributes:
        reads: names that the cell reads from the namespace.
        binds: names that the cell binds on at least one path.
        sure: names that the cell binds on every path.
        changes: names whose values the cell may change in place.
        trains: names whose values the cell trains.
        imports: modules that the cell imports.
    """

    reads: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    sure: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


class Entry(msgspec.Struct, frozen=True):
    """An earlier cell, or pushed objects.

    Attributes:
        kind: a plain cell, a step cell, or pushed objects.
        names: the names that it uses.
        ranks: the ranks that ran the cell or received the objects.
        request: the cell; None for pushed objects.
        payload: the pickled objects; empty for a cell, and for large objects.
        file: path of the file with the pickle of large objects.
        once: True if the cell must not run again (`--once`).
        run: id of its run; empty for pushed objects.
        trained: True if it made steps: those of a `fit`, a step cell or a training loop.
        loops: True if steps of its training loops ran on all replicas.
        drew: True if it changed the state of the random generators.
        generators: their states after it, packed; empty if they are those before it.
        failed: True if the cell did not end. Its effects are unknown.
        modules: digest of each of the user's own modules that the workers had.
        cell: id of the cell in the notebook; empty if it is unknown.
        deleted: True if that cell was deleted from the notebook.
        gone: True if the workers on which it ran have ended, and no others have repeated it.
        plan: layout of a step whose options set a part of it; None for other cells.
    """

    kind: Literal["cell", "step", "push"]
    names: CellNames
    ranks: tuple[int, ...]
    request: CellRequest | None = None
    payload: bytes = b""
    file: str = ""
    once: bool = False
    failed: bool = False
    run: str = ""
    trained: bool = False
    loops: bool = False
    drew: bool = False
    generators: bytes = b""
    modules: dict[str, str] = {}
    cell: str = ""
    deleted: bool = False
    gone: bool = False
    plan: Plan | None = None

    @property
    def place(self) -> str:
        """The label of the entry for messages, such as `[3]` or `%dist_push`."""
        return "%dist_push" if self.request is None else f"[{self.request.label}]"


@functools.lru_cache(maxsize=8)
def tree_of_cell(source: str) -> ast.Module:
    """Return the syntax tree of a cell. Empty if it is not valid Python or IPython syntax."""
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=8)
def names_of(source: str) -> CellNames:
    """Return the names that a cell uses. Empty if it is not valid Python or IPython syntax."""
    tree = tree_of_cell(source)
    names = Names()
    names.scan(tree.body)
    own = set(vars(builtins))
    return CellNames(
        reads=tuple(sorted(names.read.keys() - own)),
        binds=tuple(sorted(names.bound)),
        sure=tuple(sorted(name for name in names.bound if names.is_sure(name))),
        changes=tuple(sorted(set(_changed(tree)) - own)),
        trains=tuple(sorted(set(_trained(tree)))),
        imports=tuple(dict.fromkeys(_imported(tree))),
    )


def needed(
    entries: Sequence[Entry],
    run: CellNames,
    saved: Iterable[str],
    world_size: int,
    own: OwnTexts | None = None,
) -> Needed:
    """Return the entries to repeat for a run.

    Entries that may have changed its inputs are included if all of them can be repeated.

    Args:
        entries: all entries before the run.
        run: the names that the run uses.
        saved: the names whose values its checkpoint contains.
        world_size: the number of ranks.
        own: texts of the user's own modules.

    Raises:
        ReplayError: entries cannot be repeated. The message contains all reasons.
    """
    every = possible_changes(entries, own)
    chosen = _chosen(entries, run, world_size, every)
    possible = present(entries, every, chosen)
    faults = [*_incomplete(entries, chosen)]
    faults += _trained_before(entries, possible, chosen, set(run.reads) - set(saved))
    if faults:
        raise ReplayError("; ".join(faults))
    careful = _chosen(entries, run, world_size, possible, careful=True)
    if any(_incomplete(entries, careful)):
        careful = chosen
    every_one = _chosen(entries, run, world_size, possible, careful=True, with_replaced=True)
    left_out = "; ".join(_incomplete(entries, every_one))
    return Needed([entries[i] for i in sorted(careful)], left_out)


def needed_with_training(
    entries: Sequence[Entry],
    run: CellNames,
    world_size: int,
    own: OwnTexts | None = None,
    *,
    careful: bool = False,
    source: str = "",
) -> list[Entry]:
    """Return the entries to repeat for a run in new processes, earlier training included.

    Args:
        entries: all entries before the run.
        run: the names that the run uses.
        world_size: the number of ranks.
        own: texts of the user's own modules.
        careful: True to include also entries that may have changed values that the run uses, and
            entries that wrote files that it reads.
        source: text of the run, for the files that it reads.

    Raises:
        ReplayError: entries cannot be repeated. The message contains all reasons.
    """
    every = possible_changes(entries, own)
    chosen = _chosen(entries, run, world_size, every, trains=True)
    if careful:
        possible = present(entries, every, chosen)
        choose = functools.partial(
            _chosen, entries, run, world_size, possible, trains=True, careful=True
        )
        chosen = choose()
        with_writers = _with_writers(entries, source, chosen, choose)
        if not any(_incomplete(entries, with_writers)):
            chosen = with_writers
    if faults := list(_incomplete(entries, chosen)):
        raise ReplayError("; ".join(faults))
    return [entries[i] for i in sorted(chosen)]


class Needed(NamedTuple):
    """Entries to repeat for a run.

    Attributes:
        entries: the entries, in their order.
        left_out: reasons why others that may have changed its inputs cannot be repeated; empty
            without such entries.
    """

    entries: list[Entry]
    left_out: str


class Changes(NamedTuple):
    """Names whose values an entry may have changed.

    Attributes:
        direct: names that its text uses for these values.
        names: all names of these values.
        settings: imported names, such as `config` of JAX. They may concern any later cell.
    """

    direct: set[str]
    names: set[str]
    settings: set[str]


def possible_changes(entries: Sequence[Entry], own: OwnTexts | None = None) -> list[Changes]:
    """Return what each entry may have changed, by its text and those of the user's own modules."""
    sources = [entry.request.source if entry.request else "" for entry in entries]
    trees = [*map(tree_of_cell, sources)]
    modules = {name: [*map(tree_of_cell, texts)] for name, texts in _used(own or {}, sources)}
    possible = PossibleChanges(trees, modules)
    found = []
    for tree in trees:
        direct = possible.of_cell(tree)
        names = possible.with_aliases(direct)
        found.append(Changes(direct, names, names & possible.settings))
    return found


def present(
    entries: Sequence[Entry], possible: Sequence[Changes], chosen: Collection[int]
) -> list[Changes]:
    """Return possible changes; those by workers that ended count only if the run needs such cells.

    Args:
        entries: all entries before the run.
        possible: changes that each entry may have made.
        chosen: the indices of the entries that the run needs.
    """
    if any(entries[i].gone for i in chosen):
        return [*possible]
    none = Changes(set(), set(), set())
    return [none if e.gone else found for e, found in zip(entries, possible, strict=True)]


def _used(own: OwnTexts, sources: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each own module with its files whose functions and classes the sources may use.

    Also those that these files call. Large packages have many files, and few that cells use.
    """
    words = {word for source in sources for word in _WORD.findall(source)}
    left = [(name, text) for name, texts in own.items() for text in texts]
    used: dict[str, list[str]] = {name: [] for name in own}
    room = _MOST_TEXT
    for _ in range(_LEVELS):
        found = [one for one in left if not words.isdisjoint(_DEFINITION.findall(one[1]))]
        left = [one for one in left if one not in found]
        words = set()
        for name, text in sorted(found, key=lambda one: len(one[1])):
            room -= len(text)
            if room > 0:
                used[name].append(text)
                words.update(_CALL.findall(text))
    yield from used.items()


def _chosen(
    entries: Sequence[Entry],
    run: CellNames,
    world_size: int,
    possible: Sequence[Changes],
    *,
    trains: bool = False,
    careful: bool = False,
    with_replaced: bool = False,
    forced: Collection[int] = (),
) -> set[int]:
    """Return the indices of the needed entries, found backwards from the run.

    Args:
        entries: all entries before the run.
        run: the names that the run uses.
        world_size: the number of ranks.
        possible: changes that each entry may have made.
        trains: True if entries that train needed names are needed too.
        careful: True to include all entries that may have changed values.
        with_replaced: True to include failed entries that were corrected and ran again.
        forced: indices of entries that are needed for other reasons, such as their files.
    """
    wanted, chosen = Wanted(entries, run), set()
    for i in range(len(entries) - 1, -1, -1):
        entry, names = entries[i], entries[i].names
        if entry.kind == "step" and not trains:
            continue
        if not with_replaced and _is_replaced(entry, entries[i + 1 :], run):
            continue
        changes = _really_changed(entry, possible[i]) if entry.failed else names.changes
        made = {*names.binds, *changes, *(names.trains if trains else ())}
        may_matter = careful and wanted.may_matter(possible[i])
        if may_matter or i in forced or not wanted.names.isdisjoint(made):
            chosen.add(i)
            # The cluster may have been larger.
            wanted.add(names, is_on_all=len(entry.ranks) >= world_size)
    return chosen


class Wanted:
    """Names that a run needs, found backwards over the entries before it.

    Args:
        entries: all entries before the run.
        run: the names that the run uses.

    Attributes:
        names: names that the run and its entries until here read.
    """

    def __init__(self, entries: Sequence[Entry], run: CellNames) -> None:
        self.names = {*run.reads, _STAR}
        self._bound_later: set[str] = set()
        self._beside: dict[str, set[str]] = {}
        for entry in entries:
            names = {*entry.names.reads, *entry.names.binds}
            for name in entry.names.binds:
                self._beside.setdefault(name, set()).update(names)

    def add(self, names: CellNames, *, is_on_all: bool) -> None:
        """Add an entry that the run needs.

        Args:
            names: the names that the entry uses.
            is_on_all: True if it ran on all ranks.
        """
        if is_on_all:
            self.names -= set(names.sure)
            self._bound_later |= set(names.sure)
        self.names |= {*names.reads, _STAR}

    def may_matter(self, changes: Changes) -> bool:
        """Return True if an entry before those until here may have changed what the run uses."""
        return bool(changes.settings) or not changes.names.isdisjoint(self.used())

    def used(self) -> set[str]:
        """Return the names with those that their values may use, as functions use global names."""
        beside = {name: others - self._bound_later for name, others in self._beside.items()}
        return reached(self.names, beside)


def _is_replaced(entry: Entry, later: Iterable[Entry], run: CellNames) -> bool:
    """Return True if an entry failed before it trained, and a corrected version ran later."""
    if not entry.failed or entry.trained:
        return False
    binds, changes = {*entry.names.binds}, {*entry.names.changes}
    versions = [*(each.names for each in later if not each.failed), run]
    return any(binds.issubset(one.binds) and changes.issubset(one.changes) for one in versions)


def _with_writers(
    entries: Sequence[Entry], source: str, chosen: set[int], choose: Callable[..., set[int]]
) -> set[int]:
    """Return the chosen entries, those that wrote files which they read, and what these need.

    Args:
        entries: all entries before the run.
        source: text of the run.
        chosen: the indices of the entries that the run needs for its names.
        choose: `_chosen` for this run; it receives the indices of the writers as `forced`.
    """
    texts = [entry.request.source if entry.request else "" for entry in entries]
    files = WrittenFiles([tree_of_cell(text) for text in (*texts, source)])
    writers: set[int] = set()
    while not (found := files.writers({*chosen, len(entries)})) <= writers:
        writers |= found
        chosen = choose(forced=writers)
    return chosen


def _incomplete(entries: Sequence[Entry], chosen: set[int]) -> Iterator[str]:
    """Yield the needed cells that cannot run again, or that did not run to their end."""
    for i in sorted(chosen):
        entry, names = entries[i], entries[i].names
        if entry.once:
            yield f"{entry.place} is marked --once, and creates {_listed(names.binds)}"
        if entry.failed:
            made = dict.fromkeys((*names.binds, *names.changes))
            yield f"{entry.place} did not run to its end, and may have created {_listed(made)}"


def _trained_before(
    entries: Sequence[Entry], possible: Sequence[Changes], chosen: set[int], unsaved: set[str]
) -> Iterator[str]:
    """Yield the needed names whose values result from training.

    Args:
        entries: all entries before the run.
        possible: changes that each entry may have made.
        chosen: the indices of the needed entries.
        unsaved: the names that the run reads and the checkpoint does not contain.
    """
    stale: dict[str, str] = {}
    for i, entry in enumerate(entries):
        names = entry.names
        made = dict.fromkeys((*names.binds, *_really_changed(entry, possible[i])))
        if i in chosen and not stale.keys().isdisjoint(names.reads):
            of = next(name for name in names.reads if name in stale)
            stale |= dict.fromkeys(made, f"{entry.place} derived it from the trained `{of}`")
        elif i in chosen:
            for name in names.sure:
                stale.pop(name, None)
        trained = _trained_by(entry, possible[i])
        stale |= dict.fromkeys(trained, f"{entry.place} trained it")
        after = _bound_after(entry, trained) if i in chosen else ()
        stale |= dict.fromkeys(after, f"{entry.place} computed it from a training")
    for name in sorted(unsaved & stale.keys()):
        yield f"`{name}`: {stale[name]}"


def _really_changed(entry: Entry, possible: Changes) -> Collection[str]:
    """Return the names that an entry may change, without those that its functions only read."""
    is_known = entry.loops or entry.request is None
    return entry.names.changes if is_known else possible.names & {*entry.names.changes}


def _trained_by(entry: Entry, possible: Changes) -> set[str]:
    """Return the names that an entry trains by `fit`, also in functions. A repetition does not."""
    if not entry.trained or entry.loops or entry.request is None:
        return {*entry.names.trains}
    return {*entry.names.trains, *(possible.direct & _handed(tree_of_cell(entry.request.source)))}


def _handed(tree: ast.AST) -> set[str]:
    """Return the names whose values code passes to functions and methods, as object or argument."""
    found: set[str] = set()
    for node in outside_functions(tree):
        if not isinstance(node, ast.Call):
            continue
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method not in READING | TRAINING:  # a repeated `fit` reads its data
            found.update(part.id for part in passed(node) if isinstance(part, ast.Name))
        if method and method not in READING | _COLLECTING:
            found.update(_root(node.func))
    return found


def _bound_after(entry: Entry, trained: set[str]) -> set[str]:
    """Return the names that a cell binds from what it has trained before."""
    found: set[str] = set()
    if not trained or entry.loops or entry.request is None:
        return found
    by_function = trained - {*entry.names.trains}
    began = False
    for statement in tree_of_cell(entry.request.source).body:
        names = Names()
        names.scan([statement])
        fits = next(_trained(statement), None) is not None
        trains = fits or not by_function.isdisjoint(_handed(statement))
        if _is_history(statement):
            found -= names.bound.keys()  # the records of a fit contain its history
        elif trains or (began and not (trained | found).isdisjoint(names.read)):
            found |= names.bound.keys()
        began |= trains
    return found - trained


def _is_history(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Call(func=ast.Attribute(attr="fit"))):
            return True
    return False


def _changed(tree: ast.Module) -> Iterator[str]:
    """Yield names whose values a statement may change.

    Examples are `a.b = 1`, `a[0] += 1`, `a.append(1)`, `f(a)`, and `for b in a: b.c = 1`.
    """
    nodes = list(outside_functions(tree))
    stored = {
        name
        for node in nodes
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
        for name in _root(node)
    }
    yield from with_origins(stored, nodes)
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _changed_by(node.value)
    yield from _trained(tree)


def _changed_by(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in READING:
            return
        yield from _root(call.func)
    elif isinstance(call.func, ast.Name):
        name = call.func.id
        if name in vars(builtins) and name not in CHANGING:
            return
    for value in passed(call):
        if isinstance(value, ast.Name):
            yield value.id


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _trained(tree: ast.AST) -> Iterator[str]:
    for node in outside_functions(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method) as func) if method in TRAINING:
                yield from _root(func)


def _root(node: ast.expr) -> Iterator[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run with the cell, without the bodies of functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
