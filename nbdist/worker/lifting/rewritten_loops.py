"""Training loops of cells, modules and programs: their rewritten code, and what it calls."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from typing import TYPE_CHECKING, Any

from nbdist.cells.loops import LoopError, place_of, undivided
from nbdist.worker.data.batches import RankRows
from nbdist.worker.lifting import passes
from nbdist.worker.lifting.callees import Callees
from nbdist.worker.lifting.jax_callees import JaxCallees
from nbdist.worker.lifting.lifted_loop import LiftedLoop, MakeStep
from nbdist.worker.lifting.passes import OuterLoop, PassSkipped
from nbdist.worker.lifting.rewrite import LIFTED, LIFTS, OUTER, REFUSE, SKIPPED, LoopProgram, lift
from nbdist.worker.runtime import context
from nbdist.worker.runtime.reachable import code_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import StrategyName

_programs: dict[int, tuple[StrategyName, LoopProgram | LoopError, int]] = {}
"""Strategy and program of each loop, and the execution count of its cell."""


_makers: dict[StrategyName, Callable[[], MakeStep]] = {}
_REPEATING = {"map", "reduce", "scan", "fori_loop", "while_loop"}
"""Functions that call a function repeatedly."""

_CALLEES: dict[StrategyName, type[Callees]] = {"mirrored": Callees, "pjrt": JaxCallees}


def use(strategy: StrategyName, maker: Callable[[], MakeStep]) -> None:
    """Run the steps of loops under a strategy by the steps that `maker` creates."""
    _makers[strategy] = maker


def rewritten(
    tree: ast.Module,
    source: str,
    namespace: dict[str, Any],
    strategy: StrategyName,
    file: str = "",
    label: int = 0,
) -> ast.Module | None:
    """Rewrite the training loops of a cell or module, and register them.

    Args:
        tree: the cell or the module.
        source: its source.
        namespace: its global names.
        strategy: strategy of the cell.
        file: name of the module's file; empty for a cell.
        label: execution count of the cell; 0 without one.

    Returns:
        The rewritten tree; None if it leads to no training loop.
    """
    if not _may_repeat(tree, namespace):
        return None  # most cells: the search for callees takes longer than such a cell
    callees = _CALLEES[strategy](tree, namespace)
    if not file:
        _note_undivided(tree, callees)
    changed, programs = lift(tree, source, callees, file)
    _programs.update({number: (strategy, found, label) for number, found in programs.items()})
    vars(builtins).update(
        {LIFTS: lifts, LIFTED: lifted, REFUSE: refuse, OUTER: outer, SKIPPED: PassSkipped}
    )
    return changed


def _may_repeat(tree: ast.Module, namespace: dict[str, Any]) -> bool:
    """Return True if code has a loop, or calls a function that may contain one of JAX."""
    for node in ast.walk(tree):
        match node:
            case ast.For() | ast.While() | ast.comprehension():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                value = namespace.get(name)
                function = inspect.unwrap(value) if callable(value) else None
                code = getattr(function, "__code__", None)
                if name in _REPEATING or (code and _REPEATING & {*code_names(code)}):
                    return True
    return False


def _note_undivided(tree: ast.Module, callees: Callees) -> None:
    """Note the first training in a form that nbdist does not divide."""
    worker = context.if_any()
    if worker is None or worker.world_size == 1:
        return
    for line, form in undivided(tree, callees):
        text = f"line {line}: every worker computes all of it, because it trains in {form}"
        worker.reporter.note("strategy", text, warning=True)
        return


def lifts(number: int, read_needed: Callable[[], object] = tuple) -> bool:
    """Return True if the steps of a loop run on all replicas here.

    Args:
        number: number of the loop.
        read_needed: reads the names that need a value before the loop. If one has none, the loop
            runs as written, with a message.
    """
    return _may_lift(number) and _has_values(number, read_needed)


def _has_values(number: int, read_needed: Callable[[], object]) -> bool:
    try:
        read_needed()
    except NameError as error:
        _, program, label = _programs[number]
        assert isinstance(program, LoopProgram)
        place = _place(program.file, label, program.loop.line)
        reason = f"`{error.name}` has no value before the loop"
        _note_whole(place, reason, "assign the name before")
        return False
    return True


def _may_lift(number: int) -> bool:
    worker = context.if_any()
    strategy, _, _ = _programs[number]
    if worker is None or worker.strategy != strategy or worker.request.options.no_lift:
        return False
    if _is_traced(strategy):  # a function of the user may call the loop
        return False
    if strategy == "pjrt":
        return True
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and bool(tensorflow.distribute.in_cross_replica_context())


def _is_traced(strategy: StrategyName) -> bool:
    """Return True while a framework traces a function: its loops run once for many calls."""
    if strategy == "pjrt":
        from nbdist.private_api.jax import trace_state_clean

        return not trace_state_clean()
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and bool(tensorflow.inside_function())


def refuse(number: int) -> None:
    """Warn that the steps of a loop cannot run on all replicas. The loop then runs as written."""
    if not lifts(number):
        return
    _, error, label = _programs[number]
    assert isinstance(error, LoopError)
    place = _place(error.file, label, error.line)
    remedy = "make the body of the loop a step cell: %%dist_run --data NAME"
    _note_whole(place, error.reason, remedy)


def _note_whole(place: str, reason: str, remedy: str) -> None:
    text = f"{place}: {reason}. Every worker computes the whole loop; to divide it, {remedy}"
    context.current().reporter.note_once("strategy", text, warning=True)


def lifted(number: int) -> LiftedLoop:
    """Return the loop of this number in the cell that runs."""
    worker = context.current()
    loops = worker.cell_state.loops
    if number not in loops:
        strategy, program, label = _programs[number]
        assert isinstance(program, LoopProgram)
        program.place = _place(program.file, label, program.loop.line)
        loops[number] = LiftedLoop(
            worker, program, _makers[strategy](), _rank_rows(worker, strategy)
        )
    loop: LiftedLoop = loops[number]
    return loop


def _rank_rows(worker: context.Worker, strategy: StrategyName) -> RankRows | None:
    """Return a rank's rows of the batches of a loop; None if it reads whole batches."""
    if worker.world_size == 1:
        return None
    replicas = worker.strategies[strategy].num_replicas_in_sync
    return RankRows(rank=worker.rank, ranks=worker.world_size, replicas=replicas)


def outer() -> OuterLoop:
    """Return a loop around training loops, for the function or cell that calls this."""
    worker, frame = context.if_any(), sys._getframe(1)
    if worker is None or worker.strategy is None or _is_traced(worker.strategy):
        return OuterLoop(None, frame)
    return OuterLoop(passes.of_cell(worker), frame)


def _place(file: str, label: int, line: int) -> str:
    """Return a line for messages, with its file, or with its cell unless that is running."""
    is_elsewhere = label not in (0, context.current().request.label)
    return place_of(file or (f"Cell In[{label}]" if is_elsewhere else ""), line)
