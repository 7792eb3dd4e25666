"""Loop of a step cell on one rank: reports, limits, interrupts and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.records import (
    CellOptions,
    CellRequest,
    Checked,
    Compiled,
    Difference,
    Opened,
    Plan,
    Planned,
    PlannedMemory,
    PlannedTime,
    Planning,
    Saving,
    StepBegun,
    StepOptions,
    StepProgram,
    StepRequest,
)
from nbdist.worker.checkpoint import saver
from nbdist.worker.checkpoint.folder import steps_in
from nbdist.worker.runtime.cell_state import CellState
from nbdist.worker.training.loop import MANY_COMPILATIONS, check_names, run
from nbdist.worker.training.step_contract import Footprint, StepResult
from tests.worker.doubles import Recorder, SumStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TRAIN = np.arange(1, 11)
"""Ten samples: with batches of four, an epoch has the sums 10, 26 and 19."""


def request_of(**options: Any) -> StepRequest:
    program = StepProgram(
        body="", given=("batch",), reads={"a": 2}, carried=(), carried_lines={"w": 5}, report="loss"
    )
    return StepRequest(program, StepOptions(data="train", **options))


@dataclass
class Rank:
    """Double of a `Worker` with the real state of its cell."""

    reporter: Recorder = field(default_factory=Recorder)
    world_size: int = 1
    identity: Any = field(default_factory=lambda: SimpleNamespace(telemetry=True))

    def __post_init__(self) -> None:
        options = CellOptions(guard=0)
        request = CellRequest(
            number=3, source="", label=1, strategy=None, awaits=False, options=options
        )
        self.cell_state = CellState(request)
        self.progress = self.cell_state.progress
        self.request = request

    @property
    def rank(self) -> int:
        return self.reporter.rank


@dataclass
class Stop:
    """Double of a `StopPoint` after the ranks have agreed on a last step."""

    last: float = math.inf

    def is_before(self, step: int) -> bool:
        return step > self.last


@dataclass
class Trained:
    """A run of the loop.

    Attributes:
        step: the step.
        worker: the rank.
    """

    step: SumStep = field(default_factory=SumStep)
    worker: Rank = field(default_factory=Rank)

    def run(
        self,
        data: Any = TRAIN,
        *,
        last: float = math.inf,
        saving: Saving | None = None,
        **options: Any,
    ) -> Trained:
        if isinstance(data, np.ndarray):
            options = {"batch": 4, **options}
        worker: Any = self.worker
        stop: Any = Stop(last)
        run(worker, request_of(**options), {"train": data}, self.step, stop, saving)
        return self

    @property
    def reported(self) -> list[tuple[int, int, float]]:
        """Epoch, step and loss of each report."""
        return [(one.epoch, one.step, one.own["loss"]) for one in self.worker.reporter.values]

    @property
    def steps(self) -> list[int]:
        """Numbers of the reported steps."""
        return [one.step for one in self.worker.reporter.values if one.step >= 0]

    @property
    def begun(self) -> StepBegun:
        (record,) = self.worker.reporter.of(StepBegun)
        found: StepBegun = record
        return found


@pytest.fixture
def plan() -> Plan:
    return Plan(
        axes={"data": 1},
        zero=0,
        rows=4,
        on="1xCPU",
        tensors=(),
        memory=PlannedMemory(arguments=1, gradients=0, activations=0, margin=0, available=9),
        time=PlannedTime(compute=0.5, exposed=0.0, traffic=(), mfu=0.25),
    )


class TestEpochs:
    def test_steps_and_epochs_are_reported(self) -> None:
        trained = Trained().run(epochs=2)
        mean = 5.5  # every sample counts once, although the last batch is smaller
        assert trained.reported == [
            *((1, 1, 2.5), (1, 2, 6.5), (1, 3, 9.5), (1, -1, mean)),
            *((2, 4, 2.5), (2, 5, 6.5), (2, 6, 9.5), (2, -1, mean)),
        ]
        assert trained.worker.progress.step == 6
        assert not trained.worker.cell_state.unfinished

    def test_step_is_prepared_once_and_written_back_after_each_epoch(self) -> None:
        calls = Trained().run(TRAIN[:4], epochs=2).step.calls
        assert calls == [
            *("prepare", "state", "step 1", "read 1", "write back"),
            *("step 2", "read 2", "write back", "finish"),
        ]

    @pytest.mark.parametrize(("steps", "epochs"), [(2, [1]), (3, [1]), (4, [1, 2])])
    def test_run_ends_after_the_requested_steps(self, steps: int, epochs: list[int]) -> None:
        trained = Trained().run(epochs=3, steps=steps)
        assert trained.steps == [*range(1, steps + 1)]
        assert [epoch for epoch, step, _ in trained.reported if step < 0] == epochs

    def test_empty_data_are_refused(self) -> None:
        with pytest.raises(StepError, match="epoch 1 had no batch: the data are empty"):
            Trained().run(list, epochs=2, batch=4)

    def test_empty_second_epoch_is_refused(self) -> None:
        passes = iter([[1, 2], []])
        trained = Trained()
        with pytest.raises(StepError, match="epoch 2 had no batch"):
            trained.run(lambda: next(passes), epochs=2, batch=2)
        assert trained.step.calls[-1] == "finish"

    def test_data_must_be_a_data_set(self) -> None:
        trained = Trained()
        with pytest.raises(StepError, match="--data train has type int"):
            trained.run(5)
        assert trained.step.calls == ["finish"]


class TestBegin:
    def test_record_describes_the_run(self) -> None:
        begun = Trained().run(epochs=2).begun
        assert (begun.batch, begun.samples, begun.epochs, begun.steps) == (4, 10, 2, 6)
        assert (begun.replicas, begun.sharding, begun.changes) == (1, "by element", ("w",))
        assert begun.hyperparameters == {"learning_rate": 0.1}

    @pytest.mark.parametrize(
        ("data", "steps", "total"),
        [(TRAIN, 5, 5), (TRAIN, 100, 6), (lambda: iter([1] * 8), 1, 1), (lambda: iter([1]), 0, -1)],
    )
    def test_number_of_steps_is_limited_or_unknown(self, data: Any, steps: int, total: int) -> None:
        assert Trained().run(data, epochs=2, steps=steps, batch=4).begun.steps == total

    def test_first_batch_determines_the_batch_of_elements(self) -> None:
        assert Trained().run([np.ones(3), np.ones(2)]).begun.batch == 3

    def test_learning_rates_warm_up_over_a_tenth_of_the_run(self) -> None:
        assert Trained().run(TRAIN, epochs=20, scale_lr=True).step.warmups == [(6, 0)]
        assert not Trained().run().step.warmups

    def test_batch_that_replicas_do_not_divide_is_a_warning(self) -> None:
        trained = Trained()
        trained.step.replicas = 3
        trained.run()
        (text,) = trained.worker.reporter.notes("batch")
        assert text.startswith("!a batch of 4 does not divide over 3 replicas")

    def test_plan_of_the_step_is_reported_by_rank_0(self, plan: Plan) -> None:
        for rank in range(2):
            trained = Trained(worker=Rank(Recorder(rank), world_size=2))
            trained.step.plan = plan
            trained.run()
            assert [one.only for one in trained.worker.reporter.of(Planned)] == [False] * (1 - rank)

    def test_plan_without_a_run(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        for rank in range(2):
            trained = Trained(worker=Rank(Recorder(rank), world_size=2))
            rows: list[int] = []
            monkeypatch.setattr(
                trained.step, "layout", lambda batch, rows=rows: rows.append(batch.rows) or plan
            )
            trained.run(planning=Planning(only=True))
            assert [one.only for one in trained.worker.reporter.of(Planned)] == [True] * (1 - rank)
            assert trained.step.calls == ["finish"]
            assert rows == [4]


class TestCheck:
    def differing(self, *largest: float) -> Trained:
        trained = Trained()
        trained.step.differences = tuple(
            Difference(
                name=f"w{number}",
                reported=False,
                shape=(),
                dtype="float32",
                largest=one,
                tolerance=0.1,
            )
            for number, one in enumerate(largest)
        )
        return trained

    def test_differences_end_the_run_before_its_first_step(self) -> None:
        trained = self.differing(0.0, 0.3, 0.5, 0.2)
        message = (
            r"--check: 3 of 4 values differ between one replica and 1, most of all `w2` by 0.5 "
            r"\(tolerance 1e-01\); nothing was trained. Take the mean."
        )
        with pytest.raises(StepError, match=message):
            trained.run(check=True)
        assert trained.step.steps == 0
        (checked,) = trained.worker.reporter.of(Checked)
        assert (checked.rows, len(checked.differences)) == (4, 4)

    def test_run_continues_without_differences(self) -> None:
        trained = self.differing(0.1).run(check=True)
        assert trained.steps == [1, 2, 3]
        assert trained.step.calls.count("check") == 1

    def test_check_is_optional(self) -> None:
        trained = self.differing(1.0).run()
        assert not trained.worker.reporter.of(Checked)


class TestCompilations:
    def test_recompilation_is_reported_with_its_batch(self) -> None:
        trained = Trained()
        trained.step.compiled = {3: 2}
        trained.run()
        assert trained.worker.reporter.notes("compiled") == [
            "step 3 was recompiled for a batch of (2,)"
        ]

    def test_many_compilations_are_a_warning(self) -> None:
        trained = Trained()
        trained.step.compiled = {step: step for step in range(1, 9)}
        trained.run(TRAIN[:8], batch=1)
        notes = trained.worker.reporter.notes("compiled")
        (warning,) = [note for note in notes if note.startswith("!")]
        assert warning.startswith(f"!the step has been compiled {MANY_COMPILATIONS + 1} times")
        assert notes.index(warning) == MANY_COMPILATIONS
        assert len(notes) == 8

    def test_footprint_is_reported_for_each_compilation(self) -> None:
        trained = Trained()
        trained.step.footprint = Footprint(arguments=1, temporaries=2, seconds=0.5)
        trained.step.compiled = {3: 2}
        assert len(trained.run(epochs=1).worker.reporter.of(Compiled)) == 2


class TestEnd:
    def test_interrupt_before_the_first_step(self, tmp_path: Path) -> None:
        trained = Trained()
        with pytest.raises(KeyboardInterrupt):
            trained.run(last=0, saving=saving_in(tmp_path))
        assert trained.step.calls == ["finish"]
        assert steps_in(tmp_path) == []
        assert not trained.worker.cell_state.unfinished

    def test_interrupt_saves_the_last_step(self, tmp_path: Path) -> None:
        trained = Trained()
        with pytest.raises(KeyboardInterrupt):
            trained.run(last=2, epochs=3, saving=saving_in(tmp_path))
        assert trained.steps == [1, 2]
        assert steps_in(tmp_path) == [0, 2]
        assert not trained.worker.cell_state.unfinished

    def test_value_that_is_not_finite_leaves_no_step_unfinished(self) -> None:
        bad = StepResult({"loss": math.nan}, finite=False)
        trained = Trained(SumStep({1: bad}))
        with pytest.raises(StepError, match="`loss` is not finite at step 1"):
            trained.run(epochs=4)
        assert len(trained.steps) == 1
        assert not trained.worker.cell_state.unfinished

    @pytest.mark.parametrize(("raised", "unfinished"), [(LookupError, True), (StepError, False)])
    def test_error_of_the_data_leaves_steps_unfinished(
        self, raised: type[Exception], unfinished: bool
    ) -> None:
        trained = Trained()
        with pytest.raises(raised, match="third"):
            trained.run(failing(raised("third")), batch=1)
        assert trained.worker.cell_state.unfinished is unfinished
        assert trained.step.calls[-1] == "finish"

    def test_error_before_the_first_step_leaves_none_unfinished(self) -> None:
        trained = Trained()
        with pytest.raises(LookupError):
            trained.run(failing(LookupError("third")), batch=4)
        assert not trained.worker.cell_state.unfinished

    def test_hard_interrupt_counts_as_unfinished(self) -> None:
        """It may arrive while a step begins that is in no list yet."""
        trained = Trained()
        with pytest.raises(KeyboardInterrupt):
            trained.run(failing(KeyboardInterrupt("third")), batch=4)
        assert trained.worker.cell_state.unfinished


def failing(error: BaseException) -> Callable[[], Iterator[int]]:
    """Return a function that reads two numbers and raises the error at the third."""

    def data() -> Iterator[int]:
        yield from (1, 2)
        raise error

    return data


def saving_in(folder: Path, **options: Any) -> Saving:
    return Saving(folder=str(folder), **{"every_steps": 100, **options})


class TestCheckpoints:
    def test_begin_and_end_of_the_run_are_saved(self, tmp_path: Path) -> None:
        Trained().run(saving=saving_in(tmp_path))
        assert steps_in(tmp_path) == [0, 3]

    def test_state_is_saved_at_the_interval(self, tmp_path: Path) -> None:
        Trained().run(TRAIN, batch=2, saving=saving_in(tmp_path, every_steps=2, keep=9))
        assert steps_in(tmp_path) == [0, 2, 4, 5]

    @pytest.mark.parametrize("last", [1, 3, 4, 5])
    @pytest.mark.parametrize("data", [TRAIN, lambda: iter(TRAIN)], ids=["arrays", "iterator"])
    def test_resumed_run_reports_like_an_uninterrupted_one(
        self, tmp_path: Path, last: int, data: Any
    ) -> None:
        whole = Trained().run(data, epochs=2, batch=4)
        saving, first = saving_in(tmp_path), Trained()
        with pytest.raises(KeyboardInterrupt):
            first.run(data, epochs=2, batch=4, last=last, saving=saving)
        resumed = Trained()
        resumed.run(data, epochs=2, batch=4, saving=saving_in(tmp_path, resume=True))
        assert resumed.reported == [one for one in whole.reported if one not in first.reported]
        assert resumed.step.numbers.number == whole.step.numbers.number
        assert [one.step for one in resumed.worker.reporter.of(Opened)] == [last]

    def test_run_that_is_complete_only_restores_its_state(self, tmp_path: Path) -> None:
        Trained().run(saving=saving_in(tmp_path))
        resumed = Trained().run(saving=saving_in(tmp_path, resume=True))
        assert resumed.step.steps == 0
        assert resumed.step.numbers.number == TRAIN.sum()
        assert resumed.worker.progress.step == 3
        assert resumed.begun.steps == 3

    def test_resumed_run_with_fewer_steps_runs_none(self, tmp_path: Path) -> None:
        Trained().run(saving=saving_in(tmp_path))
        resumed = Trained().run(epochs=9, steps=2, saving=saving_in(tmp_path, resume=True))
        assert resumed.step.steps == 0

    def test_longer_run_continues_in_the_epoch(self, tmp_path: Path) -> None:
        Trained().run(steps=2, saving=saving_in(tmp_path))
        resumed = Trained().run(steps=3, saving=saving_in(tmp_path, resume=True))
        assert resumed.reported == [(1, 3, 9.5), (1, -1, 5.5)]

    @pytest.mark.parametrize("agreed", [True, False])
    def test_failed_run_does_not_wait_for_other_ranks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: bool
    ) -> None:
        """If all ranks agreed on the last step, each writes its state."""
        monkeypatch.setattr(saver, "_OTHERS_S", 0.05)
        monkeypatch.setattr(saver, "_GIVEN_UP_S", 0.01)
        trained = Trained(worker=Rank(world_size=2))
        data: Any = TRAIN if agreed else failing(LookupError("third"))
        with pytest.raises((KeyboardInterrupt, LookupError)):
            trained.run(data, batch=2, last=2, saving=saving_in(tmp_path, every_steps=1))
        notes = trained.worker.reporter.notes("checkpoint")
        failed = [f"step {step} was not saved" for step in range(3) if agreed]
        assert [note.lstrip("!").partition(":")[0] for note in notes] == failed

    def test_skipped_batches_count_as_progress(self, tmp_path: Path) -> None:
        """A rank that only skips batches does not seem hung."""
        saving, data = saving_in(tmp_path), lambda: iter(TRAIN)
        with pytest.raises(KeyboardInterrupt):
            Trained().run(data, epochs=2, batch=4, last=5, saving=saving)
        resumed = Trained()
        resumed.run(data, epochs=2, batch=4, saving=saving_in(tmp_path, resume=True))
        assert resumed.worker.progress.tested == 5

    def test_steps_of_the_earlier_run_count(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            Trained().run(last=2, saving=saving_in(tmp_path))
        resumed = Trained()
        resumed.run(epochs=9, steps=4, scale_lr=True, saving=saving_in(tmp_path, resume=True))
        assert resumed.steps == [3, 4]
        assert resumed.step.warmups == [(1, 2)]


def test_missing_names_are_listed_with_their_lines() -> None:
    request = request_of()
    check_names(request, {"a": 1, "w": 2, "train": 3})
    with pytest.raises(StepError) as caught:
        check_names(request, {"a": 1})
    text = "not defined on the workers: `w` (line 5), `train` (--data)"
    assert str(caught.value) == text
