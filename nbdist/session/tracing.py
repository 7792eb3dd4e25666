"""Traces of cells with JAX's profiler (`%%dist_trace`), on ranks or in the notebook's kernel."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import socket
from collections import defaultdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import structs

from nbdist.errors import CellError, UsageError, WorkerError
from nbdist.records import CellOptions, LineTime, OperationTime, Trace, TracedRank
from nbdist.utils.timelines import spans_of, timeline_of
from nbdist.views import formatting
from nbdist.worker.remote import cell_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.records import ClusterRequest, SpentKind, Timeline
    from nbdist.session.inspection import ClusterInspection

TRACED_STEPS = 20
"""Default number of traced steps. A trace grows with each step, and nbdist reads it as a whole."""

MOST_SPANS = 4000
"""Limit for the spans in a timeline: the notebook stores about 10 bytes for each."""

_BUSY = (
    "another trace is in progress{where}, and JAX supports one at a time: end it first with "
    "jax.profiler.stop_trace()"
)
_DEFAULTS = CellOptions()
_log = logging.getLogger(__name__)


class Traceable(Protocol):
    """The part of a `Cluster` that a trace needs."""

    request: ClusterRequest
    inspection: ClusterInspection

    @property
    def run(self) -> Callable[..., object]: ...


def trace_on(
    cluster: Traceable,
    cell: str,
    options: CellOptions = _DEFAULTS,
    *,
    keep: str = "",
    show: Callable[[Trace], None] | None = None,
    label: int = 0,
    header: str = "",
) -> Trace:
    """Run a cell on ranks under JAX's profiler.

    Args:
        cluster: the cluster.
        cell: the code.
        options: the options of the cell: ranks, strategy (`pjrt` or None) and step. A step
            without a number of steps runs `TRACED_STEPS`.
        keep: a folder on this machine for the profiler's files; empty to discard them.
        show: a function that receives the trace, also if the cell raised.
        label: the notebook's execution count.
        header: the line above the cell in the notebook.

    Returns:
        The trace, merged over the ranks.

    Raises:
        UsageError: another strategy, no JAX, or another trace is in progress; nothing ran.
        CellError, WorkerError, KeyboardInterrupt: see `Cluster.run`.
    """
    _refuse_tensorflow(cluster.request, options.strategy)
    chosen = cluster.inspection.chosen(options.ranks)
    ask = _begun(cluster, chosen)
    step = options.step
    if step is not None and not step.steps:
        step = structs.replace(step, steps=TRACED_STEPS)
    options = structs.replace(options, strategy="pjrt", step=step)
    texts = _numbered(cell, header, is_step=step is not None).splitlines()
    try:
        cluster.run(cell, options, label=label, header=header)
    finally:
        trace = merged(_ended(ask, chosen, with_file=bool(keep)), texts, keep)
        if show is not None:
            show(trace)
    return trace


def trace_here(
    shell: Any,
    cell: str,
    *,
    keep: str = "",
    show: Callable[[Trace], None] | None = None,
    header: str = "",
) -> Trace:
    """Run a cell in this kernel under JAX's profiler.

    Args:
        shell: the IPython shell.
        cell: the code.
        keep: a folder for the profiler's file; empty to discard it.
        show: a function that receives the trace, also if the cell raised.
        header: the line above the cell in the notebook.

    Returns:
        The trace, with this process as rank 0.

    Raises:
        UsageError: JAX is not installed, or another trace is in progress; nothing ran.
        CellError: the cell raised. IPython has shown the traceback.
    """
    _begin_here()
    text = _numbered(cell, header, is_step=False)
    error: BaseException | None = None
    try:
        outcome = shell.run_cell(text)
        error = outcome.error_before_exec or outcome.error_in_exec
    finally:
        ended = msgspec.msgpack.decode(cell_trace.end(bool(keep)), type=TracedRank)
        trace = merged({0: ended}, text.splitlines(), keep)
        if show is not None:
            show(trace)
    if error is not None:
        raise _shown(error) from None
    return trace


def _begin_here() -> None:
    """Begin a trace. Raises UsageError without JAX, or if another trace is in progress."""
    if importlib.util.find_spec("jax") is None:
        raise UsageError(
            "%%dist_trace needs JAX, but no workers run and this kernel has no JAX: run "
            "%dist_start 4 hosts, or %pip install jax"
        )
    if not cell_trace.begin():
        raise UsageError(_BUSY.format(where=""))


def _shown(error: BaseException) -> CellError:
    """Return the error for an exception whose traceback IPython has shown."""
    return CellError(
        rank=0,
        host=socket.gethostname(),
        ename=type(error).__name__,
        evalue=str(error),
        traceback=(),
    )


def _numbered(cell: str, header: str, *, is_step: bool) -> str:
    """Return the cell with the lines that tracebacks count; see `cells.parse.parse_cell`.

    The line of the magic comes first. Without a magic, IPython counts from the first line that is
    not empty.
    """
    if header or is_step:
        return f"# {header or 'the head of the cell'}\n{cell}"
    lines = itertools.dropwhile(lambda line: not line.strip(), cell.splitlines(keepends=True))
    return "".join(lines)


def _refuse_tensorflow(request: ClusterRequest, strategy: str | None) -> None:
    why = "%%dist_trace supports only JAX: TensorFlow's own profiler does not work in workers"
    if "jax" not in request.frameworks:
        raise UsageError(
            f"the workers run {', '.join(request.frameworks) or 'no framework'}: {why}; run "
            "%dist_stop, then %dist_start with --framework jax, or use %%dist_run with --profile"
        )
    if strategy not in (None, "pjrt"):
        raise UsageError(f"--strategy {strategy}: {why}; use --strategy pjrt")


def _begun(cluster: Traceable, chosen: Sequence[int]) -> Callable[..., list[Any]]:
    """Begin a trace on ranks, and return a function that calls functions on these ranks.

    Raises:
        UsageError: another trace is in progress on a rank. Then no rank begins a trace.
    """
    ask = partial(cluster.inspection.engines(chosen).apply, ranks=chosen)
    begun = ask(cell_trace.begin)
    if not all(begun):
        ask(cell_trace.end, False)
        busy = formatting.ranks(r for r, began in zip(chosen, begun, strict=True) if not began)
        raise UsageError(_BUSY.format(where=f" on rank {busy}"))
    return ask


def _ended(
    ask: Callable[..., list[Any]], chosen: Sequence[int], *, with_file: bool
) -> dict[int, TracedRank]:
    """End the trace, and return it by rank.

    Empty if a rank died: the error of the cell reports it. Engines that have restarted during the
    cell have no trace.
    """
    try:
        payloads = ask(cell_trace.end, with_file)
    except WorkerError as error:
        _log.warning("the trace is lost: %s", error)
        return {}
    return {
        rank: msgspec.msgpack.decode(payload, type=TracedRank)
        for rank, payload in zip(chosen, payloads, strict=True)
        if payload
    }


def merged(ranks: Mapping[int, TracedRank], texts: Sequence[str], keep: str = "") -> Trace:
    """Merge the traces of ranks.

    Args:
        ranks: the trace of each rank.
        texts: the lines of the cell.
        keep: the folder for the profiler's files; empty to discard them.
    """
    if keep and ranks:
        _write(ranks, Path(keep))
    devices = [
        structs.replace(device, rank=rank)
        for rank, traced in sorted(ranks.items())
        for device in traced.by_device
    ]
    return Trace(
        ranks=tuple(sorted(ranks)),
        seconds=max((traced.seconds for traced in ranks.values()), default=0.0),
        by_operation=_by_operation(ranks),
        by_device=tuple(devices),
        by_line=_by_line(ranks, texts),
        notes=tuple(_notes(ranks)),
        folder=keep if ranks else "",
        timeline=_timeline(ranks),
    )


def _timeline(ranks: Mapping[int, TracedRank]) -> Timeline:
    """Return the lanes of all ranks on one clock."""
    spans = (spans_of(traced.timeline, rank) for rank, traced in sorted(ranks.items()))
    return timeline_of(itertools.chain.from_iterable(spans), MOST_SPANS)


def _by_operation(ranks: Mapping[int, TracedRank]) -> tuple[OperationTime, ...]:
    seconds: dict[tuple[str, SpentKind], float] = defaultdict(float)
    counts: dict[tuple[str, SpentKind], int] = defaultdict(int)
    for traced in ranks.values():
        for one in traced.by_operation:
            seconds[one.name, one.kind] += one.seconds
            counts[one.name, one.kind] += one.count
    return tuple(
        OperationTime(name=name, kind=kind, seconds=seconds[name, kind], count=counts[name, kind])
        for name, kind in sorted(seconds, key=seconds.__getitem__, reverse=True)
    )


def _by_line(ranks: Mapping[int, TracedRank], texts: Sequence[str]) -> tuple[LineTime, ...]:
    """Return the time by line. The cell's lines come first, and unknown lines last."""
    lines: dict[tuple[bool, str, int], LineTime] = {}
    for traced in ranks.values():
        for one in traced.by_line:
            is_unknown = not one.cell and not one.line
            key = is_unknown, one.cell, one.line
            had = lines.get(key)
            lines[key] = structs.replace(
                one,
                text=one.text
                or (texts[one.line - 1].strip() if 0 < one.line <= len(texts) else ""),
                compute_s=one.compute_s + (had.compute_s if had else 0.0),
                collective_s=one.collective_s + (had.collective_s if had else 0.0),
                transfer_s=one.transfer_s + (had.transfer_s if had else 0.0),
            )
    return tuple(lines[key] for key in sorted(lines))


def _notes(ranks: Mapping[int, TracedRank]) -> list[str]:
    """Return each note once. It starts with the ranks unless all ranks report it."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, traced in sorted(ranks.items()):
        for note in traced.notes:
            ranks_of[note].append(rank)
    return [
        note if len(who) == len(ranks) else f"rank {formatting.ranks(who)}: {note}"
        for note, who in ranks_of.items()
    ]


def _write(ranks: Mapping[int, TracedRank], folder: Path) -> None:
    """Write the files in XProf's structure: a folder for each trace, a file for each process."""
    now = datetime.now(UTC).astimezone().strftime("%Y_%m_%d_%H_%M_%S_%f")
    own = folder / "plugins" / "profile" / now
    own.mkdir(parents=True)
    for rank, traced in ranks.items():
        (own / f"rank-{rank}.xplane.pb").write_bytes(traced.file)
