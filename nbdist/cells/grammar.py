"""What was typed for a cell, checked before anything runs."""

from __future__ import annotations

import inspect
import traceback
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cells.program import compile_step
from nbdist.errors import UsageError
from nbdist.records import CellRequest, StepOptions, StepRequest, StrategyName

STRATEGIES: tuple[StrategyName, ...] = ("mirrored", "pjrt")


def parse_cell(
    source: str,
    *,
    number: int,
    label: int,
    strategy: StrategyName | None,
    header: str = "",
    step: StepOptions | None = None,
) -> CellRequest:
    """A request for a cell.

    Args:
        source: the cell's body; IPython's own syntax (`!`, `%`, `?`) is understood.
        number: the cell's number within the cluster.
        label: the notebook's execution count.
        strategy: the strategy whose scope it runs in.
        header: the magic's line above the body, kept so that line numbers are the notebook's.
        step: the cell is the body of a step, to be run with these options.

    Raises:
        UsageError: the cell is empty, no Python or no step, with the line.
    """
    if not source.strip():
        raise UsageError("the cell is empty: type the code for the workers under the magic")
    if step is not None:
        return _step_request(source, step, number=number, label=label, strategy=strategy)
    numbered = f"# {header}\n{source}" if header else source
    return CellRequest(
        number=number,
        source=numbered,
        label=label,
        strategy=strategy,
        awaits=_awaits(numbered),
    )


def _step_request(
    source: str, step: StepOptions, *, number: int, label: int, strategy: StrategyName | None
) -> CellRequest:
    faults = [
        f"--{name} {value}: type a number from {least}"
        for name, value, least in (
            ("epochs", step.epochs, 1),
            ("batch", step.batch, 0),
            ("steps", step.steps, 0),
            ("shuffle", step.shuffle or 0, 0),
        )
        if value < least
    ]
    if not step.data.isidentifier():
        faults.append(f"--data {step.data}: type the name of a data set on the workers")
    if faults:
        raise UsageError("\n".join(faults))
    numbered = f"# the head of the step\n{source}"
    request = StepRequest(program=compile_step(numbered, carries=strategy == "pjrt"), options=step)
    return CellRequest(
        number=number, source=numbered, label=label, strategy=strategy, awaits=False, step=request
    )


def _awaits(source: str) -> bool:
    """Whether the cell uses `await` at top level."""
    try:
        python = TransformerManager().transform_cell(source)
        code = compile(python, "<cell>", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error)).replace(
            'File "<cell>"', "In the cell"
        )
        raise UsageError(f"nothing was run:\n{text.rstrip()}") from None
    return bool(code.co_flags & inspect.CO_COROUTINE)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks such as `0,2:4`: numbers, and slices whose end is not included, as in Python.

    Raises:
        UsageError: a word is neither, or a rank does not exist; all faults are named.
    """
    chosen: set[int] = set()
    faults = []
    for word in text.split(","):
        try:
            found = _ranks_of(word.strip(), world_size)
        except ValueError:
            faults.append(f"{word.strip()!r} is no rank and no slice")
            continue
        outside = [rank for rank in found if not 0 <= rank < world_size]
        if outside:
            faults.append(f"there is no rank {', '.join(map(str, outside))}")
        chosen.update(found)
    if not chosen and not faults:
        faults.append("no rank is in it")
    if faults:
        raise UsageError(
            f"--ranks {text}: {'; '.join(faults)}; ranks are 0 to {world_size - 1}, "
            "written as in 0,2:4 (2 and 3)"
        )
    return tuple(sorted(chosen))


def _ranks_of(word: str, world_size: int) -> tuple[int, ...]:
    if ":" not in word:
        return (int(word),)
    start, stop = (part.strip() for part in word.split(":"))
    return tuple(range(int(start or 0), int(stop or world_size)))
