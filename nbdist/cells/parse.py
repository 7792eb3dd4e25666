"""Checks of a cell, its options and its ranks, before anything runs."""

from __future__ import annotations

import inspect
import traceback
import warnings
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cells.dependencies import CellNames, names_of
from nbdist.cells.options import check_options
from nbdist.cells.step_program import compile_step
from nbdist.errors import UsageError
from nbdist.records import (
    BATCH_NAME,
    MASK_NAME,
    CellOptions,
    CellRequest,
    ClusterRequest,
    StepOptions,
    StepProgram,
    StrategyName,
)
from nbdist.records.base import STRATEGY_OF
from nbdist.utils.installed import lacks_tensorflow

STRATEGIES = tuple(STRATEGY_OF.values())
_DEFAULTS = CellOptions()


def parse_cell(
    source: str,
    options: CellOptions = _DEFAULTS,
    *,
    number: int,
    label: int,
    strategy: StrategyName | None,
    header: str = "",
) -> CellRequest:
    """Check a cell and its options, and return the request for it.

    Args:
        source: the body of the cell. IPython's syntax (`!`, `%`, `?`) is allowed.
        options: the options of the cell.
        number: the number of the cell in the cluster.
        label: the notebook's execution count.
        strategy: the strategy whose scope the cell runs in.
        header: the line of the magic above the body, for the notebook's line numbers.

    Raises:
        UsageError: the cell is empty, invalid Python or an invalid step, or an option is wrong.
    """
    if not source.strip():
        raise UsageError("the cell is empty: write the code for the workers under the magic")
    step = options.step
    has_head = header or step is not None
    numbered = f"# {header or 'the head of the cell'}\n{source}" if has_head else source
    is_step = step is not None and bool(step.data)
    is_looked_at = not is_step and (options.saving is not None or strategy is not None)
    names = names_of(numbered) if is_looked_at else CellNames()
    makes = tuple(name for name in names.binds if name not in names.reads)
    check_options(options, strategy)
    return CellRequest(
        number=number,
        source=numbered,
        label=label,
        strategy=strategy,
        awaits=not is_step and _awaits(numbered),
        options=options,
        program=_program(numbered, step, strategy) if step is not None and step.data else None,
        names=(*names.reads, *makes),  # reads first: an object keeps its earlier name
        makes=makes,
    )


def _program(numbered: str, step: StepOptions, strategy: StrategyName | None) -> StepProgram:
    given = (BATCH_NAME, MASK_NAME) if step.bucket else (BATCH_NAME,)
    return compile_step(numbered, given=given, carries=strategy == "pjrt")


def choose_strategy(name: str | None, cluster: ClusterRequest) -> StrategyName:
    """Return the strategy with a name; without a name, that of the first framework.

    Raises:
        UsageError: no strategy has the name, or the workers do not run its framework.
    """
    built = {STRATEGY_OF[framework]: framework for framework in cluster.frameworks}
    for strategy in built:
        if name in (None, strategy):
            return strategy
    for framework, strategy in STRATEGY_OF.items():
        if name == strategy:
            reason = lacks_tensorflow() if framework == "tensorflow" else ""
            start = f"%dist_start {len(cluster.hosts)} hosts --framework both"
            raise UsageError(
                f"--strategy {name} needs {framework}, and the workers run "
                f"{', '.join(built.values())}: {reason or f'run %dist_stop, then {start}'}"
            )
    raise UsageError(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}")


def _awaits(source: str) -> bool:
    """Return True if the cell uses `await` at top level."""
    try:
        python = TransformerManager().transform_cell(source)
        with warnings.catch_warnings():  # the workers print a SyntaxWarning
            warnings.simplefilter("ignore", SyntaxWarning)
            code = compile(python, "<cell>", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error)).replace(
            'File "<cell>"', "In the cell"
        )
        raise UsageError(f"the cell is not valid, nothing ran:\n{text.rstrip()}") from None
    return bool(code.co_flags & inspect.CO_COROUTINE)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Read ranks such as `0,2:4`: numbers and slices. The end of a slice is excluded.

    Raises:
        UsageError: a word is neither, or a rank does not exist. The message contains all faults.
    """
    chosen: set[int] = set()
    faults = []
    for word in text.split(","):
        try:
            found = _ranks_of(word.strip(), world_size)
        except ValueError:
            faults.append(f"{word.strip()!r} is neither a rank nor a slice")
            continue
        outside = [rank for rank in found if not 0 <= rank < world_size]
        if outside:
            faults.append(f"no rank {', '.join(map(str, outside))}")
        chosen.update(found)
    if not chosen and not faults:
        faults.append("it contains no rank")
    if faults:
        raise UsageError(
            f"--ranks {text}: {'; '.join(faults)}; use ranks from 0 to {world_size - 1}, "
            "as in 0,2:4 (0, 2 and 3)"
        )
    return tuple(sorted(chosen))


def _ranks_of(word: str, world_size: int) -> tuple[int, ...]:
    if ":" not in word:
        return (int(word),)
    start, stop = (part.strip() for part in word.split(":"))
    return tuple(range(int(start or 0), int(stop or world_size)))
