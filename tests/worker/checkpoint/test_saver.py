"""Saving and restoring of a run: intervals, agreement of the ranks, and failed saves."""

from __future__ import annotations

import random
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from nbdist.errors import AnotherRankError, StepError
from nbdist.records import Opened, Saving
from nbdist.worker.checkpoint import saver
from nbdist.worker.checkpoint.folder import Checkpoint, Draft, Position, pack, steps_in
from nbdist.worker.checkpoint.saver import Saved, Unsaved, checkpoints
from tests.worker.doubles import NumberState, Recorder

if TYPE_CHECKING:
    from pathlib import Path

ATTEMPT = 5


class Rank:
    """One rank of a run with checkpoints.

    Args:
        folder: folder of the checkpoints.
        rank: number of the rank.
        ranks: number of ranks.
        chief: numbers that rank 0 contributes to a collective; by default, this rank's own.
        common: True if every rank has all data.
        batch: samples of a global batch.
        **saving: options of the checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        ranks: int = 1,
        *,
        chief: list[int] | None = None,
        common: bool = True,
        batch: int = 8,
        **saving: Any,
    ) -> None:
        self.reporter = Recorder(rank)
        self.state = NumberState()
        self.gathered: list[list[int]] = []
        self._chief = chief
        reporter: Any = self.reporter
        self.saved = Saved(
            Saving(folder=str(folder), **{"every_steps": 10, **saving}),
            reporter,
            ranks=ranks,
            batch=batch,
            common=common,
            gather=self._gather,
        )

    def _gather(self, numbers: np.ndarray) -> np.ndarray:
        assert numbers.dtype == np.int32
        self.gathered.append(numbers.tolist())
        return np.array([self._chief or numbers])

    def begin(self) -> Position | None:
        """Begin the run and open its checkpoints."""
        position = self.saved.begin()
        self.saved.open(self.state)
        return position

    def save(self, step: int) -> None:
        """Save a step, and wait until it is written."""
        self.saved.save(at(step))
        self.saved._finish()

    @property
    def failures(self) -> list[str]:
        return self.reporter.notes("checkpoint")


def at(step: int) -> Position:
    return Position(step=step, epoch=1, batches=step)


def run_to(folder: Path, *steps: int, **options: Any) -> Rank:
    rank = Rank(folder, **options)
    rank.begin()
    for step in steps:
        rank.state.number = rank.state.own_number = step
        rank.save(step)
    rank.saved.close(failed=False)
    return rank


class TestBegin:
    def test_run_begins_in_a_new_folder(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path / "a" / "b")
        assert rank.begin() is None
        (opened,) = rank.reporter.of(Opened)
        assert (opened.names, opened.step) == (("w",), -1)

    def test_checkpoints_of_another_run_are_refused(self, tmp_path: Path) -> None:
        run_to(tmp_path, 5, 7)
        with pytest.raises(StepError, match=r"the newest of step 7: use --resume to continue"):
            Rank(tmp_path).begin()

    def test_resumed_run_restores_the_newest_checkpoint(self, tmp_path: Path) -> None:
        run_to(tmp_path, 5, 7)
        rank = Rank(tmp_path, resume=True)
        assert rank.begin() == at(7)
        assert (rank.state.number, rank.state.own_number) == (7, 7)
        assert rank.failures == ["resumed from the checkpoint of step 7"]
        (opened,) = rank.reporter.of(Opened)
        assert opened.step == 7

    def test_resume_without_checkpoints_begins(self, tmp_path: Path) -> None:
        assert Rank(tmp_path, resume=True).begin() is None

    def test_rank_0_removes_drafts_of_earlier_attempts(self, tmp_path: Path) -> None:
        drafts = [Draft(tmp_path, 7, attempt) for attempt in (ATTEMPT, ATTEMPT + 1)]
        for draft in drafts:
            draft.write_own(1, b"")
        Rank(tmp_path, rank=1, ranks=2, chief=[-1, ATTEMPT]).begin()
        assert all(draft.path.exists() for draft in drafts)
        Rank(tmp_path, chief=[-1, ATTEMPT]).begin()
        assert [draft.path.exists() for draft in drafts] == [True, False]

    def test_folder_that_is_a_file_is_refused_on_all_ranks(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        chief = Rank(tmp_path / "file" / "runs", ranks=2)
        with pytest.raises(StepError, match="nothing can be saved there"):
            chief.begin()
        ((newest, attempt),) = chief.gathered
        other = Rank(tmp_path, rank=1, ranks=2, chief=[newest, attempt])
        with pytest.raises(AnotherRankError, match="rank 0 cannot write there"):
            other.begin()

    def test_folder_that_hosts_do_not_share_is_refused(self, tmp_path: Path) -> None:
        run_to(tmp_path, 5)
        text = "rank 0 sees a checkpoint of step 9, but this rank does not"
        with pytest.raises(StepError, match=text):
            Rank(tmp_path, rank=1, ranks=2, chief=[9, ATTEMPT], resume=True).begin()

    def test_checkpoint_that_only_this_rank_sees_is_ignored(self, tmp_path: Path) -> None:
        """Rank 0's view of a shared folder decides; this rank's may be older or newer."""
        run_to(tmp_path, 5, 7)
        older = Rank(tmp_path, rank=1, ranks=2, chief=[5, ATTEMPT], resume=True)
        assert older.saved.begin() == at(5)
        assert Rank(tmp_path, rank=1, ranks=2, chief=[-1, ATTEMPT]).begin() is None

    def test_other_batch_size_is_refused(self, tmp_path: Path) -> None:
        run_to(tmp_path, 5)
        with pytest.raises(StepError, match="was made with --batch 8, but this run has 4"):
            Rank(tmp_path, batch=4, resume=True).begin()

    def test_other_number_of_ranks_needs_common_data(self, tmp_path: Path) -> None:
        run_to(tmp_path, 5)
        assert Rank(tmp_path, ranks=2, resume=True).begin() == at(5)
        with pytest.raises(StepError, match="made by 1 workers, each with its own data, but this"):
            Rank(tmp_path, ranks=2, common=False, resume=True).begin()


class TestRestore:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Return the folder of a run of three ranks, with the own numbers 10 to 12."""
        run_to(tmp_path, 5)
        path = tmp_path / "step-00000005"
        own = msgspec.msgpack.decode((path / "rank-0.msgpack").read_bytes())
        for rank in range(3):
            own["arrays"] = pack({"own": np.array(10 + rank)})
            own["reports"]["frames"] = [b"of %d" % rank]
            (path / f"rank-{rank}.msgpack").write_bytes(msgspec.msgpack.encode(own))
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes())
        manifest["world_size"] = 3
        (path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return tmp_path

    @pytest.mark.parametrize(
        ("rank", "ranks", "own", "is_new", "orphans"),
        [
            (0, 3, 10, False, []),
            (2, 3, 12, False, []),
            (0, 1, 10, False, [11, 12]),
            (0, 2, 10, False, [12]),
            (1, 2, 11, False, []),
            (3, 4, 12, True, []),
            (0, 4, 10, False, []),
        ],
    )
    def test_ranks_take_the_state_of_their_number(
        self, folder: Path, rank: int, ranks: int, own: int, is_new: bool, orphans: list[int]
    ) -> None:
        resumed = Rank(folder, rank, ranks, chief=[5, ATTEMPT], resume=True)
        resumed.begin()
        (restored,) = resumed.state.restored
        assert (int(restored.values["own"]), restored.is_new) == (own, is_new)
        assert [int(values["own"]) for values in restored.orphans] == orphans
        frames = [reports.frames for reports in resumed.reporter.repeated]
        assert frames == [[b"of %d" % (number - 10)] for number in (own, *orphans)]

    def test_random_generators_continue(self, tmp_path: Path) -> None:
        def draw() -> list[float]:
            return [random.gauss(), random.random(), *np.random.normal(size=3)]

        draw()
        run_to(tmp_path, 5)
        expected = draw()
        Rank(tmp_path, resume=True).begin()
        assert draw() == expected


class TestIntervals:
    def test_steps_at_multiples_of_the_interval_are_due(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, every_steps=10)
        rank.begin()
        due = []
        for step in range(31):
            if rank.saved.due(step):
                due.append(step)
                rank.save(step)
        assert due == [0, 10, 20, 30]

    def test_extra_save_does_not_move_the_interval(self, tmp_path: Path) -> None:
        rank = run_to(tmp_path, 13)
        assert [step for step in range(13, 22) if rank.saved.due(step)] == [20, 21]

    def test_resumed_run_saves_after_the_interval(self, tmp_path: Path) -> None:
        run_to(tmp_path, 13)
        rank = Rank(tmp_path, resume=True)
        rank.begin()
        assert [step for step in range(13, 22) if rank.saved.due(step)] == [20, 21]

    def test_interval_in_seconds_follows_the_time_of_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now_s = [0.0]
        monkeypatch.setattr(saver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        rank = run_to(tmp_path, 0, every_steps=0, every_s=30.0)
        assert [step for step in (9, 10) if rank.saved.due(step)] == [10]
        now_s[0] = 5.0
        rank.save(10)
        assert [step for step in (69, 70) if rank.saved.due(step)] == [70]
        now_s[0] = 6005.0
        rank.save(70)
        assert rank.saved.due(71)
        assert rank.gathered[1:] == [[10], [60], [1]]

    def test_rank_0_decides_about_the_interval_in_seconds(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, 1, 2, chief=[-1, ATTEMPT], every_steps=0, every_s=30.0)
        rank.begin()
        rank._chief = [44]
        rank.saved._plan(0)
        assert [step for step in (10, 43, 44) if rank.saved.due(step)] == [44]

    def test_saved_step_is_written_once(self, tmp_path: Path) -> None:
        rank = run_to(tmp_path, 5)
        shutil.rmtree(tmp_path / "step-00000005")
        rank.save(5)
        assert steps_in(tmp_path) == []

    def test_only_the_newest_checkpoints_are_kept(self, tmp_path: Path) -> None:
        run_to(tmp_path, 1, 2, 3, keep=2)
        assert steps_in(tmp_path) == [2, 3]


class TestWriting:
    def test_manifest_describes_the_run(self, tmp_path: Path) -> None:
        rank = run_to(tmp_path, 5)
        manifest = Checkpoint(tmp_path, 5).manifest()
        assert manifest.position == at(5)
        assert (manifest.world_size, manifest.batch, manifest.names) == (1, 8, ("w",))
        assert manifest.parts == ("numbers",)
        assert rank.failures == []

    def test_other_ranks_write_only_their_own_state(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, rank=1, ranks=2, chief=[-1, ATTEMPT])
        rank.begin()
        rank.save(5)
        draft = Draft(tmp_path, 5, ATTEMPT)
        assert [path.name for path in draft.path.iterdir()] == ["rank-1.msgpack"]
        assert rank.state.assists == 1

    def test_rank_0_waits_for_the_state_of_all_ranks(self, tmp_path: Path) -> None:
        chief, other = (Rank(tmp_path, rank, 2, chief=[-1, ATTEMPT]) for rank in range(2))
        chief.begin()
        other.begin()
        chief.saved.save(at(5))
        assert steps_in(tmp_path) == []
        other.save(5)
        chief.saved.close(failed=False)
        assert steps_in(tmp_path) == [5]
        assert chief.failures == other.failures == []

    def test_state_is_that_of_the_saved_step(self, tmp_path: Path) -> None:
        """The state changes while the thread writes."""
        chief, other = (Rank(tmp_path, rank, 2, chief=[-1, ATTEMPT]) for rank in range(2))
        chief.begin()
        other.begin()
        chief.state.number = chief.state.own_number = 5
        chief.saved.save(at(5))
        chief.state.number = chief.state.own_number = 6
        other.save(5)
        chief.saved.close(failed=False)
        resumed = Rank(tmp_path, ranks=2, resume=True)
        resumed.begin()
        assert (resumed.state.number, resumed.state.own_number) == (5, 5)

    def test_rank_that_gives_up_ends_the_save(self, tmp_path: Path) -> None:
        chief = Rank(tmp_path, 0, 2, chief=[-1, ATTEMPT])
        chief.begin()
        Draft(tmp_path, 5, ATTEMPT).give_up(1)
        chief.save(5)
        assert chief.failures == ["!step 5 was not saved: another rank could not write its state"]
        assert list(tmp_path.iterdir()) == []

    def test_missing_rank_ends_the_save(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(saver, "_OTHERS_S", 0.02)
        chief = Rank(tmp_path, 0, 2, chief=[-1, ATTEMPT])
        chief.begin()
        chief.save(5)
        assert chief.failures == [
            "!step 5 was not saved: a rank has not written its state within 0.02 s"
        ]

    def test_failed_cell_does_not_wait_long(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(saver, "_GIVEN_UP_S", 0.02)
        chief = Rank(tmp_path, 0, 2, chief=[-1, ATTEMPT])
        chief.begin()
        chief.saved.save(at(5))
        chief.saved.close(failed=True)
        assert steps_in(tmp_path) == []
        assert chief.failures == []

    def test_full_disk_is_reported_before_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chief, other = (Rank(tmp_path, rank, 2, chief=[-1, ATTEMPT]) for rank in range(2))
        for rank in (chief, other):
            rank.begin()
            monkeypatch.setattr(rank.state, "size", lambda: 10**18)
        other.save(5)
        assert other.failures == []  # rank 0 writes the large part
        chief.save(5)
        (text,) = chief.failures
        assert text.startswith("!step 5 was not saved: 1,100,000,000,000,000")
        assert text.endswith(f"are free in {tmp_path}")

    def test_failed_save_does_not_end_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = Rank(tmp_path)
        rank.begin()
        with monkeypatch.context() as patch:
            patch.setattr(rank.reporter, "recent", lambda: 1 / 0)
            rank.save(5)
        assert rank.failures == ["!step 5 was not saved: division by zero"]
        rank.save(7)
        assert steps_in(tmp_path) == [7]

    def test_rank_whose_save_fails_gives_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise KeyError

        rank = Rank(tmp_path, 1, 2, chief=[-1, ATTEMPT])
        rank.begin()
        monkeypatch.setattr(rank.reporter, "recent", fail)
        rank.save(5)
        assert Draft(tmp_path, 5, ATTEMPT).given_up()
        assert rank.failures == ["!step 5 was not saved: KeyError"]


def test_a_missing_package_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)
    rank = Rank(tmp_path)
    rank.begin()
    monkeypatch.setattr(rank.state, "kind", "orbax")
    with pytest.raises(StepError, match="orbax-checkpoint on the workers"):
        rank.begin()


def test_run_without_checkpoints_saves_nothing() -> None:
    reporter: Any = Recorder()
    unsaved = checkpoints(None, reporter, ranks=1, batch=8, common=True, gather=lambda n: n[None])
    assert isinstance(unsaved, Unsaved)
    assert unsaved.begin() is None
    unsaved.open(NumberState())
    assert not any(map(unsaved.due, range(3)))
    unsaved.save(at(1))
    unsaved.close(failed=True)
    assert reporter.records == []
