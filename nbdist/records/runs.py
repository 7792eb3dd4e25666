"""Runs on disk and in a browser. TypeScript types are generated from these records."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgspec

from nbdist.records.base import Record, StrategyName
from nbdist.records.cluster import WorkerState
from nbdist.records.events import Columns
from nbdist.records.media import MediaEntry  # noqa: TC001 - msgspec reads the annotation

RUN_MIME = "application/vnd.nbdist.run.v1+json"
"""MIME type of an output that shows a run."""

RUN_VERSION = 1
"""Version of the format of `run.json`. Fields with a default are no new version."""

RUN_ID = r"\d{8}-\d{6}-[0-9a-f]{6}"
"""Pattern of run ids."""

SHORT_ID = r"[0-9a-f]{6}"
"""Pattern of the last part of run ids, which people read and type."""
MOST_RANKS = 2**16
"""Limit for the ranks that a browser may name."""

CLUSTER_ID = r"[0-9a-f]{12}"
"""Pattern of cluster ids."""

RunStatus = Literal["running", "stopping", "finished", "stopped", "failed", "interrupted", "lost"]
"""`lost`: the kernel, or the process beside a program, ended without a report of the run's end."""

RunKind = Literal["", "step", "loop", "fit"]
"""Steps of a run: of a step cell, a training loop or a Keras `fit`; empty without known steps."""

RankStatus = Literal["running", "finished", "failed", "interrupted", "dead"]
FindingTopic = Literal[
    "network",
    "straggler",
    "starved",
    "dropped",
    "disk",
    "batch",
    "checkpoint",
    "compiled",
    "media",
    "nan",
    "strategy",
    "watch",
]


CurveAxis = Literal["step", "epoch", "report"]


class Table(Record, frozen=True):
    """An append-only file of rows. Reports with equal columns share a table."""

    number: int
    columns: Columns


class RunWorker(Record, frozen=True):
    """A rank of a run.

    Attributes:
        devices: description, such as `2 x cpu`.
        said: error of a failed rank; else empty.
    """

    rank: int
    host: str
    pid: int
    devices: str
    status: RankStatus = "running"
    said: str = ""


class Finding(Record, frozen=True):
    """A remark about a run. nbdist removes it when it no longer applies.

    Attributes:
        topic: its subject.
        text: observation and remedy.
        ranks: affected ranks; empty for all.
        value: observed share or ratio; 0 if there is none.
        warning: the user should act.
    """

    topic: FindingTopic
    text: str
    ranks: tuple[int, ...] = ()
    value: float = 0.0
    warning: bool = True


class Writer(Record, frozen=True):
    """The process that writes a run, identified by pid and start.

    Attributes:
        started: seconds from the boot of the machine. Changes of the clock do not affect it.
    """

    host: str
    pid: int
    started: float


class RecoveryRecord(Record, frozen=True):
    """A recovery of a run from a loss of ranks.

    Attributes:
        time_s: seconds of the run at the recovery. Reports of repeated steps are later.
        ranks: lost ranks.
        reason: cause of the loss.
        step: last step that was not repeated.
        lost_s: seconds from the loss to the next step.
        workers: remaining workers if they are fewer than before; else 0.
    """

    time_s: float
    ranks: tuple[int, ...]
    reason: str
    step: int
    lost_s: float
    workers: int = 0


class StepFigures(Record, frozen=True):
    """Cost of a step; None for unknown figures.

    Attributes:
        step_s: seconds between two steps.
        collectives: share of `step_s` in collectives alone, from 0 to 1.
        arguments: bytes of the arguments on each device.
        memory: bytes of arguments and temporaries on each device.
    """

    step_s: float | None = None
    collectives: float | None = None
    arguments: int | None = None
    memory: int | None = None


class PlanCheck(Record, frozen=True):
    """Predicted and measured cost of a step.

    Attributes:
        title: layout, such as `data 4 x tensor 2`.
        planned: prediction without the memory margin.
        measured: measurement over the last steps. Bytes are XLA's, after compilation.
    """

    title: str
    planned: StepFigures
    measured: StepFigures


class WorkerStack(Record, frozen=True):
    """Position of a worker at one moment of the run.

    Attributes:
        at: seconds since 1970.
        step: last step that it started; 0 for none.
        place: innermost line of a cell; empty outside of cells.
        waits: the main thread waits for another thread, usually one in a collective.
        stack: stack of the main thread from the cell on; empty if no line of a cell runs.
        threads: stacks of all Python threads; empty if nbdist asked only for the position.
    """

    at: float
    rank: int
    step: int
    place: str
    waits: bool
    stack: str
    threads: str


class RunState(Record, frozen=True):
    """Content of `run.json`, replaced as a whole at each change.

    Attributes:
        id: id of the run and name of its directory; matches `RUN_ID`.
        number: number of the cell in its cluster.
        label: execution count of the notebook.
        header: the magic's line, or the line of the program that began the run.
        name: name of the run (`--name`), or `run_name`; empty in runs of older versions.
        kind: kind of its steps.
        strategy: strategy whose scope the cell ran in; None for no scope.
        framework: framework with its version.
        status: state of the run.
        began: seconds since 1970.
        ended: seconds since 1970; 0 while it runs.
        replicas: replicas that share a batch; 0 if the cell has no steps.
        batch: samples in the first global batch; 0 if the cell has no steps or no batches.
        samples: samples in an epoch; -1 if unknown.
        epochs: epochs of the run; 0 if unknown.
        steps: steps of the run; -1 if unknown.
        split: description of how data are distributed over ranks.
        workers: ranks, in order.
        findings: remarks.
        error: error of a failed run.
        versions: versions of Python and packages, by name.
        writer: process that writes the run.
        stoppable: Stop ends the run at the end of a step.
        program: file name of the exported program whose run it is; empty for a notebook's cell.
        job: id of the submitted job (`%dist_submit`) that runs the program; else empty. The page
            can only stop such programs.
        job_folder: folder of this job.
        request: id of the front end's execution request; empty if unknown.
        cell: id of the cell in its notebook; empty if unknown.
        recoveries: recoveries of lost ranks, `heals` in run.json. They supersede earlier reports of
            later steps. Viewers get this field before the new rows of these steps.
        recovering: `healing` in run.json: the reason while ranks are being replaced, else empty.
        plan: predicted and measured cost of the steps; None without a plan.
        seed: seed of the cluster's random generators; None in runs of older versions.
        cell_seed: seed of the generators at the start of the cell (`--seed`); None if not given.
        hyperparameters: options of the cell, numbers that it assigns, and its optimizers, by name.
        notebook: path of the notebook in the file system; empty if unknown.
        signal_steps: steps between two steps with `SIGNALS`; 0 without signals.
    """

    id: str
    number: int
    label: int
    header: str
    strategy: StrategyName | None
    framework: str
    status: RunStatus
    began: float
    workers: tuple[RunWorker, ...]
    versions: dict[str, str]
    writer: Writer
    ended: float = 0.0
    name: str = ""
    kind: RunKind = ""
    replicas: int = 0
    batch: int = 0
    samples: int = -1
    epochs: int = 0
    steps: int = -1
    split: str = ""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    stoppable: bool = False
    program: str = ""
    job: str = ""
    job_folder: str = ""
    request: str = ""
    cell: str = ""
    recoveries: tuple[RecoveryRecord, ...] = msgspec.field(name="heals", default=())
    recovering: str = msgspec.field(name="healing", default="")
    plan: PlanCheck | None = None
    seed: int | None = None
    cell_seed: int | None = None
    hyperparameters: dict[str, float | str] = msgspec.field(default_factory=dict)
    notebook: str = ""
    signal_steps: int = 0
    version: int = RUN_VERSION

    @property
    def is_over(self) -> bool:
        return self.status not in ("running", "stopping")

    @property
    def short_id(self) -> str:
        return short_id(self.id)

    @property
    def title(self) -> str:
        """The name of the run. Runs of older versions have none."""
        return self.name or run_name(self.label, self.kind, self.began, self.program)

    @property
    def seconds(self) -> float:
        """Duration: from the start of the run to its end; 0 while it runs."""
        return max(0.0, self.ended - self.began) if self.ended else 0.0


def short_id(run: str) -> str:
    """Return the short form of a run's id, which people read and type: its last part."""
    return run.rpartition("-")[2]


def run_name(label: int, kind: RunKind, began: float, program: str = "") -> str:
    """Return the default name of a run: `Cell 30, fit, 20:27`, or `train.py, fit, 20:27`.

    Args:
        label: execution count of the notebook.
        kind: kind of its steps.
        began: start of the run, in seconds since 1970.
        program: file name of an exported program.
    """
    at = time.strftime("%H:%M", time.localtime(began))
    return ", ".join(filter(None, (program or f"Cell {label}", kind, at)))


class RunList(Record, frozen=True):
    """Response to `GET runs`.

    Attributes:
        runs: states of the runs, newest first.
        refused: reasons for runs that this version cannot read, by id, newest first.
    """

    runs: tuple[RunState, ...]
    refused: dict[str, str]


class Annotations(Record, frozen=True):
    """Edits of a user: content of `annotations.json` in the directory of a run.

    Attributes:
        name: name that replaces the default one; empty to keep that.
        tags: tags, in the order of the user.
        note: text.
        pinned: nbdist does not delete the run when it deletes old ones.
    """

    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    tags: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=60)], ...], msgspec.Meta(max_length=20)
    ] = ()
    note: Annotated[str, msgspec.Meta(max_length=20_000)] = ""
    pinned: bool = False


class RunRow(Record, frozen=True):
    """A run in the table of all runs.

    Attributes:
        state: state of the run, without its workers, versions, findings and plan.
        annotations: edits of the user.
        metrics: mean over ranks of the last value of each metric; None if it is not finite.
        step: last reported step; -1 if none was reported.
        ranks: number of workers.
        notebook: path of the notebook on the Jupyter server; empty if the server has none.
    """

    state: RunState
    annotations: Annotations
    metrics: dict[str, float | None]
    step: int
    ranks: int
    notebook: str


class RunTable(Record, frozen=True):
    """Response to `GET runs/table`: all runs that this version can read, newest first."""

    rows: tuple[RunRow, ...]


class RunCurve(Record, frozen=True):
    """Response to `GET runs/<id>/curve`: the mean of a metric over ranks.

    Attributes:
        axis: unit of `x`.
        x: steps, epochs, or numbers of reports from 1.
        seconds: seconds of the run at each of them.
        y: values; None if they are not finite.
    """

    axis: CurveAxis
    x: tuple[float, ...]
    seconds: tuple[float, ...]
    y: tuple[float | None, ...]


class RunOutput(Record, frozen=True):
    """Content of an output of type `RUN_MIME`.

    Attributes:
        id: id of the run.
        text: summary in one line, for front ends without the extension.
        over: the run has ended and the output is final.
    """

    id: str
    text: str
    over: bool = False


class ShownPlacement(Record, frozen=True):
    """Last output of `%dist_show`. The picture is `placement.html` beside `cluster.json`.

    Attributes:
        names: names in the request.
        at: time in seconds since 1970.
        pids: process ids of the workers that had the arrays.
    """

    names: tuple[str, ...]
    at: float
    pids: tuple[int, ...] = ()


class ClusterState(Record, frozen=True):
    """Content of `cluster.json` while a cluster exists.

    Attributes:
        id: id of the cluster.
        frameworks: frameworks of its workers.
        workers: ranks, in order.
        run: id of the current run; empty between runs.
        writer: kernel of the notebook.
        kernel: id of the kernel in its Jupyter server; empty without a server.
        placement: last output of `%dist_show`; None before the first.
    """

    id: str
    frameworks: tuple[str, ...]
    workers: tuple[WorkerState, ...]
    run: str
    writer: Writer
    kernel: str = ""
    placement: ShownPlacement | None = None


# Messages of the server to a browser that shows a run. Rows are binary: float64, little-endian, the
# number of the table, then its rows.


class ServerMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One text message to a browser."""


class StateMessage(ServerMessage, frozen=True):
    """State of the run, sent first and at each change."""

    state: RunState


class TableMessage(ServerMessage, frozen=True):
    """Columns of a table, sent before its rows."""

    table: Table


class MediaMessage(ServerMessage, frozen=True):
    """Next lines of the index of the run's media. `GET runs/<id>/media/<number>` is a content."""

    entries: tuple[MediaEntry, ...]


class TextMessage(ServerMessage, frozen=True):
    """Next part of the cell's text output, both streams in order."""

    text: str


class StackMessage(ServerMessage, frozen=True):
    """Last known position of a worker."""

    stack: WorkerStack


class CaughtUp(ServerMessage, frozen=True):
    """End of the stored content. The following messages are new."""


class StopRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request of a browser to end the run at the end of a step."""


class RequestStack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request of a browser for the current stack of a worker. A `StackMessage` answers it."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]


AnyServerMessage = (
    StateMessage | TableMessage | MediaMessage | TextMessage | StackMessage | CaughtUp
)

NO_SUCH_RUN = 4404
"""Close code: the run does not exist."""

RUN_IS_GONE = 4410
"""Close code: the directory of the run was deleted."""

UNREADABLE_RUN = 4422
"""Close code: another version of nbdist wrote the run, or it is damaged. The reason explains it."""

BAD_MESSAGE = 4400
"""Close code: invalid message."""
