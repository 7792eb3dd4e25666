"""What was typed for a cell, checked before anything runs."""

from __future__ import annotations

import inspect
import math
import traceback
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from pathlib import Path
from typing import Literal

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.cells.dependencies import CellNames, names_of
from nbdist.cells.step_program import compile_step
from nbdist.errors import UsageError
from nbdist.records import (
    BATCH_NAME,
    GUARD_STEPS,
    MASK_NAME,
    MOST_SEED,
    CellRequest,
    ClusterRequest,
    Planning,
    Precision,
    Saving,
    StepOptions,
    StepRequest,
    StrategyName,
    is_seed,
)
from nbdist.records.base import STRATEGY_OF

STRATEGIES = tuple(STRATEGY_OF.values())


def parse_cell(
    source: str,
    *,
    number: int,
    label: int,
    strategy: StrategyName | None,
    header: str = "",
    precision: Precision | None = None,
    step: StepOptions | None = None,
    saving: Saving | None = None,
    guard: int = GUARD_STEPS,
    seed: int | None = None,
    own_data: bool = False,
) -> CellRequest:
    """A request for a cell.

    Args:
        source: the cell's body; IPython's own syntax (`!`, `%`, `?`) is understood.
        number: the cell's number within the cluster.
        label: the notebook's execution count.
        strategy: the strategy whose scope it runs in.
        header: the magic's line above the body, kept so that line numbers are the notebook's.
        precision: what Keras's layers compute in.
        step: the cell is the body of a step, to be run with these options; without data, it is
            planned what the cell fits.
        saving: how its state is saved.
        guard: steps after which the ranks' states are compared again; 0 is never.
        seed: of every random generator when the cell begins; None leaves them as they are.
        own_data: what Keras is given is each rank's part of the data.

    Raises:
        UsageError: the cell is empty, no Python or no step, with the line.
    """
    if not source.strip():
        raise UsageError("the cell is empty: type the code for the workers under the magic")
    numbered = f"# {header or 'the head of the cell'}\n{source}" if header or step else source
    planning = Planning()
    if step is not None and not step.data:
        planning, step = step.planning, None
    is_looked_at = step is None and (saving is not None or strategy is not None)
    names = names_of(numbered) if is_looked_at else CellNames()
    makes = tuple(name for name in names.binds if name not in names.reads)
    _check_options(step, strategy, precision, guard, saving, planning, seed)
    return CellRequest(
        number=number,
        source=numbered,
        label=label,
        strategy=strategy,
        awaits=step is None and _awaits(numbered),
        precision=precision,
        step=None if step is None else _step_request(numbered, step, strategy),
        saving=saving,
        names=(*names.reads, *makes),  # of two for one object, it is called as it was before
        makes=makes,
        guard=guard,
        planning=planning,
        seed=seed,
        own_data=own_data,
    )


def _check_options(
    step: StepOptions | None,
    strategy: StrategyName | None,
    precision: Precision | None,
    guard: int,
    saving: Saving | None,
    planning: Planning,
    seed: int | None,
) -> None:
    """Raises UsageError that names every option that is wrong."""
    faults = [f"--guard {guard}: type a number from 0"] if guard < 0 else []
    if seed is not None and not is_seed(seed):
        faults.append(f"--seed {seed}: type a whole number from 0 to {MOST_SEED}")
    if planning != Planning() and strategy != "pjrt":
        faults.append("--plan, --budget, --fix: what is fitted is laid out under --strategy pjrt")
    if step is not None:
        faults += _faults_of_step(step, strategy, precision)
        if step.scale_lr and saving is not None and saving.shrink:
            faults.append(
                "--shrink with --scale-lr: the rates are scaled by the number of replicas, and the "
                "batch stays as it is; leave one out"
            )
    if faults:
        raise UsageError("\n".join(faults))


def _faults_of_step(
    step: StepOptions, strategy: StrategyName | None, precision: Precision | None
) -> list[str]:
    faults = [
        f"--{name} {value}: type a number from {least}"
        for name, value, least in (
            ("epochs", step.epochs, 1),
            ("batch", step.batch, 0),
            ("steps", step.steps, 0),
            ("shuffle", step.shuffle or 0, 0),
            ("bucket", min(step.bucket, default=1), 1),
            ("profile", step.profile, 0),
            ("prefetch", 0 if step.prefetch == "auto" else step.prefetch, 0),
        )
        if value < least
    ]
    if not step.data.isidentifier():
        faults.append(f"--data {step.data}: type the name of a data set on the workers")
    if precision is not None and strategy == "pjrt":
        faults.append(
            f"--precision {precision}: a step under pjrt computes in the types of its arrays; "
            f"cast them, as in x.astype(jnp.{precision})"
        )
    return faults


def choose_strategy(name: str | None, cluster: ClusterRequest) -> StrategyName:
    """The strategy of that name, or of the first framework.

    Raises:
        UsageError: there is none of that name, or the workers do not run its framework.
    """
    built = {STRATEGY_OF[framework]: framework for framework in cluster.frameworks}
    for strategy in built:
        if name in (None, strategy):
            return strategy
    for framework, strategy in STRATEGY_OF.items():
        if name == strategy:
            raise UsageError(
                f"--strategy {name} needs {framework}, and the workers run "
                f"{', '.join(built.values())}: type %dist_stop, then "
                f"%dist_start {len(cluster.hosts)} hosts --framework both"
            )
    raise UsageError(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}")


def parse_bucket(text: str) -> tuple[int, ...]:
    """Lengths such as `32,64,128`.

    Raises:
        UsageError: a word is no number.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--bucket {text}: type lengths, as in --bucket 32,64,128") from None


def parse_seconds(option: str, text: str | None) -> float:
    """A time that was typed; 0 where none was.

    Raises:
        UsageError: it is no time to wait.
    """
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option} {text}: type a number of seconds, as in {option} 60")
    return seconds


def parse_saving(
    folder: str | None,
    every: str | None,
    keep: int | None,
    *,
    resume: bool = False,
    shrink: bool = False,
) -> Saving | None:
    """How a run is saved; None where nothing was typed of it.

    Args:
        folder: where.
        every: steps, or seconds as in `30s`; left out, half a minute.
        keep: how many checkpoints; left out, 3.
        resume: go on from the newest one.
        shrink: go on with fewer workers where some cannot be started again.

    Raises:
        UsageError: a value is none, or there is no folder; every fault is named.
    """
    given = {
        "--save-every": every,
        "--keep": keep,
        "--resume": resume or None,
        "--shrink": shrink or None,
    }
    if folder is None:
        idle = [name for name, value in given.items() if value is not None]
        if idle:
            raise UsageError(f"{', '.join(idle)} without --checkpoint: name the folder")
        return None
    text = "30s" if every is None else every
    number = text.removesuffix("s")
    faults = []
    if not number.isdecimal() or not int(number):
        faults.append(f"--save-every {text}: type steps, as in 100, or seconds, as in 30s")
        number = "1"
    if keep is not None and keep < 1:
        faults.append(f"--keep {keep}: type a number from 1")
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        faults.append(f"--checkpoint {folder}: it is a file; name a folder")
    if faults:
        raise UsageError("\n".join(faults))
    return Saving(
        folder=str(path.absolute()),
        every_steps=0 if text.endswith("s") else int(number),
        every_s=float(number) if text.endswith("s") else 0.0,
        keep=3 if keep is None else keep,
        resume=resume,
        shrink=shrink,
    )


def parse_prefetch(text: str) -> int | Literal["auto"]:
    """`auto`, or a number of batches.

    Raises:
        UsageError: it is neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise UsageError(f"--prefetch {text}: type auto, or how many batches, as in --prefetch 4")
    return int(text)


def _step_request(numbered: str, step: StepOptions, strategy: StrategyName | None) -> StepRequest:
    given = (BATCH_NAME, MASK_NAME) if step.bucket else (BATCH_NAME,)
    program = compile_step(numbered, given=given, carries=strategy == "pjrt")
    return StepRequest(program=program, options=step)


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
