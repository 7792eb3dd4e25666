"""A run as it is kept on disk and shown in a browser: JSON, and TypeScript made from these."""

from __future__ import annotations

from typing import Literal

import msgspec

from nbdist.records.base import Record, StrategyName
from nbdist.records.cluster import WorkerState
from nbdist.records.events import Columns

RUN_MIME = "application/vnd.nbdist.run.v1+json"
"""The type of an output that shows a run."""

RUN_ID = r"\d{8}-\d{6}-[0-9a-f]{6}"
"""What names of runs look like."""

CLUSTER_ID = r"[0-9a-f]{12}"
"""What ids of clusters look like."""

RunStatus = Literal["running", "stopping", "finished", "stopped", "failed", "interrupted", "lost"]
"""`lost`: the kernel that wrote it is gone and has not said how it ended."""

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
    "nan",
    "strategy",
]


class Table(Record, frozen=True):
    """One append-only file of rows; reports with the same columns are in one table."""

    number: int
    columns: Columns


class RunWorker(Record, frozen=True):
    """A rank of a run.

    Attributes:
        devices: in words, as in `2 x cpu`.
        said: of a rank that failed, its error.
    """

    rank: int
    host: str
    pid: int
    devices: str
    status: RankStatus = "running"
    said: str = ""


class Finding(Record, frozen=True):
    """Something about a run that is worth a line; one that no longer holds is taken away.

    Attributes:
        topic: what it is about.
        text: what was seen, and what to type.
        ranks: whom it is about; empty where it is all.
        value: the share or the ratio that was seen; 0 where there is none.
        warning: whether something should be done.
    """

    topic: FindingTopic
    text: str
    ranks: tuple[int, ...] = ()
    value: float = 0.0
    warning: bool = True


class Writer(Record, frozen=True):
    """The process that keeps a run: its start tells it from a later process of the same pid.

    Attributes:
        started: seconds after the machine came up: the same however its clock is set later.
    """

    host: str
    pid: int
    started: float


class RecoveryRecord(Record, frozen=True):
    """Ranks were lost, and the run went on without the user.

    Attributes:
        time_s: of the run, when it did: all that is reported of the steps after has a later time.
        ranks: those that were lost.
        reason: what became of them.
        step: the last one that it had not to make again.
        lost_s: from the loss on, until steps were made again.
        workers: how many went on, where they are fewer than before; else 0.
    """

    time_s: float
    ranks: tuple[int, ...]
    reason: str
    step: int
    lost_s: float
    workers: int = 0


class StepFigures(Record, frozen=True):
    """What a step takes; None is what is not known, or not yet.

    Attributes:
        step_s: seconds between two steps.
        collectives: the share of them that is spent in collectives, and in nothing else.
        arguments: bytes on each device of what the step is given.
        memory: the same with what it makes on its way.
    """

    step_s: float | None = None
    collectives: float | None = None
    arguments: int | None = None
    memory: int | None = None


class PlanCheck(Record, frozen=True):
    """What the plan of a step has foretold, and what came of it.

    Attributes:
        title: of the layout, as in `data 4 x tensor 2`.
        planned: without the margin for what nobody can foretell.
        measured: over the last steps; bytes are those that XLA counts, once it has compiled.
    """

    title: str
    planned: StepFigures
    measured: StepFigures


class RunState(Record, frozen=True):
    """What `run.json` holds; replaced as a whole whenever it changes.

    Attributes:
        id: names the run's directory; matches `RUN_ID`.
        number: of the cell within its cluster.
        label: the notebook's execution count.
        header: the magic's line, as typed.
        strategy: whose scope the cell ran in; None where it ran in none.
        framework: in words, with its version.
        status: how it is.
        began: seconds since 1970.
        ended: seconds since 1970; 0 while it runs.
        replicas: how many share a batch; 0 where the cell is no step.
        batch: samples in the first global batch; 0 where the cell is no step.
        samples: samples in an epoch; -1 where nobody knows.
        epochs: how many there will be; 0 where nobody knows.
        steps: steps of the whole run; -1 where nobody knows.
        split: how the data come to the ranks, in words.
        workers: the ranks, in their order.
        findings: what is worth a line.
        error: of a run that failed, the one that ended it.
        versions: of what ran, by name.
        writer: who keeps it.
        stoppable: whether Stop ends it at the end of a step.
        request: id of the front end's request to run the cell; empty where there was none.
        cell: the cell's id in its notebook; empty where the front end has not told.
        recoveries: of lost ranks, `heals` in run.json. Earlier reports of later steps are
            superseded. Whoever watches is told before the rows that stand for these.
        recovering: `healing` in run.json: the reason while ranks are being replaced, else empty.
        plan: what was foretold of the steps, and what came of it; None where nothing was planned.
        seed: of the cluster's random generators when it started; None in runs of older versions.
        cell_seed: of the generators when the cell began (`--seed`); None if not given.
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
    replicas: int = 0
    batch: int = 0
    samples: int = -1
    epochs: int = 0
    steps: int = -1
    split: str = ""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    stoppable: bool = False
    request: str = ""
    cell: str = ""
    recoveries: tuple[RecoveryRecord, ...] = msgspec.field(name="heals", default=())
    recovering: str = msgspec.field(name="healing", default="")
    plan: PlanCheck | None = None
    seed: int | None = None
    cell_seed: int | None = None
    version: int = 1

    @property
    def is_over(self) -> bool:
        return self.status not in ("running", "stopping")


class RunOutput(Record, frozen=True):
    """What an output of type `RUN_MIME` holds: where to look, and what to say until then.

    Attributes:
        id: the run's.
        text: the run in a line.
        over: it has ended; what is shown will not change.
    """

    id: str
    text: str
    over: bool = False


class ShownPlacement(Record, frozen=True):
    """What `%dist_show` showed last; the picture is in `placement.html`, beside `cluster.json`.

    Attributes:
        names: as asked for.
        at: when, in seconds since 1970.
    """

    names: tuple[str, ...]
    at: float


class ClusterState(Record, frozen=True):
    """What `cluster.json` holds while a cluster is there.

    Attributes:
        id: names it.
        frameworks: what its workers load.
        workers: the ranks, in their order.
        run: the run that is under way; empty between runs.
        writer: the notebook's kernel.
        kernel: the kernel's id within its Jupyter server; empty where there is none.
        placement: where arrays were when somebody last looked; None until then.
    """

    id: str
    frameworks: tuple[str, ...]
    workers: tuple[WorkerState, ...]
    run: str
    writer: Writer
    kernel: str = ""
    placement: ShownPlacement | None = None


# What the server tells a browser that watches a run; rows go as binary: float64, little-endian, the
# table's number and then its rows.


class ServerMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One text message to a browser."""


class StateMessage(ServerMessage, frozen=True):
    """How the run is; sent first, and whenever it changes."""

    state: RunState


class TableMessage(ServerMessage, frozen=True):
    """A table's columns; sent before its rows."""

    table: Table


class TextMessage(ServerMessage, frozen=True):
    """What the cell shows as text, on from what was sent; of both streams in their order."""

    text: str


class CaughtUp(ServerMessage, frozen=True):
    """All that the run had when the browser came has been sent; what follows is new."""


class StopRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a browser may say: end the run at the end of a step."""


AnyServerMessage = StateMessage | TableMessage | TextMessage | CaughtUp

NO_SUCH_RUN = 4404
"""The socket is closed with this where there is no such run."""

RUN_IS_GONE = 4410
"""The socket is closed with this when the run's directory was deleted."""

BAD_MESSAGE = 4400
"""The socket is closed with this after a message that is none of ours."""
