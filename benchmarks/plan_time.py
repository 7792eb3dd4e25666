"""Published step times against `plan_of`, the planner's own path.

Each row of the tables in benchmarks/reference fixes the layout of a traced step, and the planner
estimates its time. Nothing is tuned for a row. Ours is the mean absolute error of a table, and the
peer that of the floor: products at peak rate. Attention is a fused kernel if it
was in the published step. The hosts of eager programs issue each operation, which
bounds steps of small models; `EAGER` has their tables. Tables of `CALIBRATION` have constants
fitted to them; the others are held out.

Further cases compare layouts of one model on the same devices with the same batch: the rank
correlation of their times, and the excess time of the layout with the least planned time. Only the
table of one host has such rows.
"""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from benchmarks.case import Case
from benchmarks.language_models import LanguageModel, gpt, traced_step
from benchmarks.planner_llama import llama
from benchmarks.planner_rows import REFERENCE, megatron, one_host
from benchmarks.planner_tables import spearman
from nbdist.planner.hardware.efficiency import PYTORCH_A100
from nbdist.records import DATA, MODEL, STAGE, Planning
from nbdist.worker.planning.plan_step import named_target, plan_of
from nbdist.worker.planning.query import PlanQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.case import Scale
    from benchmarks.language_models import Attention
    from benchmarks.planner_llama import LlamaRow
    from benchmarks.planner_rows import Row
    from nbdist.planner.cost.time import Target
    from nbdist.records import Plan, Remat, Schedule

CALIBRATION = frozenset(("a100_one_node_measured", "simumax_b200", "torchtitan_h100"))
"""Tables that constants of `nbdist.planner.hardware.efficiency` were fitted to."""

EAGER = frozenset(
    (
        *("megatron_sc21_table1", "a100_one_node_measured", "simumax_b200", "decentralized_v100"),
        *("mpt_h100", "mpt_a100_80gb", "mpt_a100_40gb"),
    )
)
"""Tables of programs of PyTorch that was not asked to compile them."""

EAGER_DISPATCH_S = 40e-6
"""Seconds in which the host of an eager program issues one operation of a traced step.

Of 36 to 48 microseconds, this has the least mean absolute error on the table of one host
(2026-11-30). A traced step has more operations than PyTorch has kernels, so that this is less than
`PYTORCH_A100` has. The other constants of issued work are those of `PYTORCH_A100`.
"""

SLOW = frozenset(("decentralized_v100",))
"""Tables of hosts with slow links between them."""

HELD_OUT_ERROR, SLOW_ERROR = 0.15, 0.25
"""Mean absolute errors that are wanted on tables that are held out."""

EVERY = 24
"""Every so-manyth row of the table of one host is used."""

EVERY_GROUP = 16
"""Every so-manyth group of layouts of the table of one host is used."""

UNRANKED, REGRET, WORST_REGRET = 0.1, 0.03, 0.15
"""Wanted: most of 1 - rank correlation, and most excess time of the layout that is picked."""

_NO_LIMIT = 2**60
"""Memory budget in bytes with which every published layout fits."""

_FEW = 2
"""Fewest layouts of a group, exclusive."""

_VOCABULARY = 128256
_WIDTH = 128


@dataclass(frozen=True)
class PublishedStep:
    """Published time of a step and the layout in which it ran.

    Attributes:
        table: table of the row.
        name: model and hardware.
        hardware: devices, as `--on` accepts them.
        batch: sequences in a step.
        fixed: sizes of the layout, as `--fix` accepts them.
        step_s: published seconds.
    """

    table: str
    name: str
    model: LanguageModel
    hardware: str
    batch: int
    fixed: tuple[tuple[str, int], ...]
    remat: Remat
    schedule: Schedule
    step_s: float

    @property
    def planning(self) -> Planning:
        fixed = dict(self.fixed)
        schedule = self.schedule if fixed[STAGE] > 1 else None
        return Planning(budget=_NO_LIMIT, fixed=fixed, remat=self.remat, schedule=schedule)

    @property
    def target(self) -> Target:
        target = named_target(self.hardware)
        if self.table not in EAGER:
            return target
        calibration = msgspec.structs.replace(
            target.calibration,
            dispatch_s=EAGER_DISPATCH_S,
            collective_dispatch_s=PYTORCH_A100.collective_dispatch_s,
            straggle_s=PYTORCH_A100.straggle_s,
        )
        return dataclasses.replace(target, calibration=calibration)

    def plan(self) -> Plan:
        traced, inputs = _traced(self.model, self.batch)
        return plan_of(PlanQuery(traced, inputs, self.target, self.planning))

    def error(self) -> float:
        """Return the relative error of the planned time."""
        return self.plan().time.step / self.step_s - 1

    def floor_error(self) -> float:
        """Return the relative error of products at peak rate, without recomputation."""
        time = self.plan().time
        return time.mfu * time.step / self.step_s - 1


def published_steps() -> list[PublishedStep]:
    """Return the rows of all tables."""
    steps = [_megatron(row) for row in megatron()]
    steps += [_one_host(row) for row in one_host()[::EVERY]]
    steps += [_blackwell(row) for row in llama()]
    for path in sorted(REFERENCE.glob("published_steps*.csv")):
        with path.open(newline="") as file:
            steps += [_row(row) for row in csv.DictReader(file)]
    return steps


def groups_of_layouts() -> list[list[PublishedStep]]:
    """Return rows of the same model, devices and batch, the fastest one of each layout."""
    groups: dict[tuple[str, int, int], dict[Any, PublishedStep]] = {}
    for row in sorted(one_host(), key=lambda row: -row.measured_s):
        step = _one_host(row)
        groups.setdefault((row.model, row.devices, row.batch), {})[step.fixed] = step
    found = [list(groups[key].values()) for key in sorted(groups)]
    return [group for group in found if len(group) > _FEW][::EVERY_GROUP]


def cases(scale: Scale) -> Iterator[Case]:
    yield from _errors(scale)
    yield from _ranks(scale)


def _ranks(scale: Scale) -> Iterator[Case]:
    groups = groups_of_layouts()
    chosen = [g[: scale.of(len(g), _FEW + 1)] for g in groups[: scale.of(len(groups), 1)]]
    measured = [[step.step_s for step in group] for group in chosen]
    planned = [[step.plan().time.step for step in group] for group in chosen]
    pairs = list(zip(planned, measured, strict=True))
    unranked = 1 - fmean(spearman(np.array(one), np.array(other)) for one, other in pairs)
    excess = [real[ours.index(min(ours))] / min(real) - 1 for ours, real in pairs]
    rows, detail = sum(map(len, chosen)), f"{len(chosen)} groups of layouts"
    of = "plan_of, layouts of one model, a100_one_node_measured (calibration)"
    yield Case(f"{of}, 1 - rank correlation", unranked, UNRANKED, "", 1, rows, detail)
    for name, figure, most in (
        ("mean", fmean(excess), REGRET),
        ("worst", max(excess), WORST_REGRET),
    ):
        case = f"{of}, excess of the picked one, {name}"
        yield Case(case, figure, most, "over the best", 1, rows, detail)


def _errors(scale: Scale) -> Iterator[Case]:
    by_table: dict[str, list[PublishedStep]] = {}
    for step in published_steps():
        by_table.setdefault(step.table, []).append(step)
    for table, steps in by_table.items():
        chosen = steps[: scale.of(len(steps), 1)]
        errors = [step.error() for step in chosen]
        ours, peer = fmean(map(abs, errors)), fmean(abs(step.floor_error()) for step in chosen)
        wanted = SLOW_ERROR if table in SLOW else HELD_OUT_ERROR
        side = "calibration" if table in CALIBRATION else "held out"
        name = f"plan_of, mean absolute error, {table} ({side})"
        yield Case(
            name, ours, peer, "of measured", wanted / peer, len(chosen), _detail(chosen, errors)
        )


def _detail(steps: list[PublishedStep], errors: list[float]) -> str:
    worst = max(range(len(errors)), key=lambda place: abs(errors[place]))
    return (
        f"mean {fmean(errors):+.0%}, median absolute {median(map(abs, errors)):.0%}, worst "
        f"{errors[worst]:+.0%} ({steps[worst].name})"
    )


@cache
def _traced(model: LanguageModel, batch: int) -> tuple[Any, Any]:
    return traced_step(model, batch)


def _fixed(**sizes: int) -> tuple[tuple[str, int], ...]:
    usual = {DATA: 1, MODEL: 1, STAGE: 1, "zero": 0, "micro": 1, "rounds": 1}
    return tuple((usual | sizes).items())


def _row(row: dict[str, str]) -> PublishedStep:
    sizes = {name: int(text) for name, text in row.items() if text.isdigit()}
    names = ("vocabulary", "width", "layers", "length", "heads", "groups", "head", "wide")
    model = LanguageModel(
        **{name: sizes[name] for name in names},
        gated=bool(sizes["gated"]),
        attention=cast("Attention", row["attention"]),
        dtype=row["dtype"],
        is_scanned=True,
    )
    layout = {name: sizes[name] for name in (DATA, STAGE, "zero", "micro", "rounds", "sequence")}
    return PublishedStep(
        table=row["table"],
        name=f"{row['model']} on {row['hardware']}",
        model=model,
        hardware=row["hardware"],
        batch=sizes["batch"],
        fixed=_fixed(**{**layout, MODEL: sizes["tensor"]}),
        remat=cast("Remat", row["remat"]),
        schedule=cast("Schedule", row["schedule"]),
        step_s=float(row["step_s"]),
    )


def _megatron(row: Row) -> PublishedStep:
    return _gpt(row, "megatron_sc21_table1", f"{row.devices}xA100-80GB")


def _one_host(row: Row) -> PublishedStep:
    return _gpt(row, "a100_one_node_measured", f"{row.devices}xA100-80GB")


def _gpt(row: Row, table: str, hardware: str) -> PublishedStep:
    sizes = row.gpt
    return PublishedStep(
        table=table,
        name=f"{row.model} on {hardware}",
        model=gpt(sizes.vocabulary, sizes.hidden, sizes.layers, sizes.sequence, sizes.heads),
        hardware=hardware,
        batch=row.batch,
        fixed=_fixed(
            **{DATA: row.data, MODEL: sizes.tensor, STAGE: row.pipeline},
            micro=row.microbatches,
            rounds=row.chunks,
            sequence=0,
        ),
        remat="full" if row.recomputed else "",
        schedule="1f1b",
        step_s=row.measured_s,
    )


def _blackwell(row: LlamaRow) -> PublishedStep:
    model = LanguageModel(
        vocabulary=_VOCABULARY,
        width=row.hidden,
        layers=row.layers,
        length=row.length,
        heads=row.hidden // _WIDTH,
        groups=row.keys // _WIDTH,
        head=_WIDTH,
        wide=row.wide,
        gated=True,
        attention="cudnn",
    )
    return PublishedStep(
        table="simumax_b200",
        name=f"{row.model} with {row.layers} layers on 8xB200",
        model=model,
        hardware="8xB200",
        batch=row.microbatches * row.data,
        fixed=_fixed(
            **{DATA: row.data, MODEL: row.tensor, STAGE: row.pipeline},
            zero=1 if row.data > 1 else 0,
            micro=row.microbatches,
        ),
        remat="",
        schedule="1f1b",
        step_s=row.measured_s,
    )
