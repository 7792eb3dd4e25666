"""Checkpoints that cannot be written or do not match the training that loads them."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from nbdist.cells.options import cell_options, check_options
from nbdist.errors import CellError, UsageError
from nbdist.records import Saving
from tests import clusters, training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

FULL = pytest.mark.full
FORM = training.FORMS["pjrt step"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        running.run(FORM.setup, strategy="pjrt")
        yield running


@pytest.fixture(scope="module")
def saved(cluster: nbdist.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the checkpoints of one epoch."""
    folder = tmp_path_factory.mktemp("saved") / "kept"
    FORM.run(cluster, epochs=1, saving=Saving(folder=str(folder), every_steps=4))
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step-{step:08}" for step in (0, 4, 8)
    ]
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Private copy of the saved checkpoints that a test may damage."""
    shutil.copytree(saved, tmp_path / "kept")
    return tmp_path / "kept"


def resume_from(folder: Path) -> Saving:
    return Saving(folder=str(folder), every_steps=4, resume=True)


def test_existing_checkpoints_are_not_overwritten(cluster: nbdist.Cluster, copied: Path) -> None:
    with pytest.raises(CellError, match="newest of step 8: use --resume to continue"):
        FORM.run(cluster, saving=Saving(folder=str(copied), every_steps=4))


def test_finished_run_is_not_trained_again(cluster: nbdist.Cluster, copied: Path) -> None:
    """The run loads the final state and makes no steps."""
    run = FORM.run(cluster, epochs=1, saving=resume_from(copied))
    assert not run.reports
    assert cluster.run("int(count)").results == {0: "8", 1: "8"}


def test_broken_collectives_are_restored_without_a_recovery(
    cluster: nbdist.Cluster, copied: Path
) -> None:
    """No rank died, so nbdist must not rerun the set-up: earlier runs changed its variables."""
    with pytest.raises(CellError, match="ValueError"):
        cluster.run(
            "if rank == 0:\n    raise ValueError\n"
            "jax.experimental.multihost_utils.sync_global_devices('wait')",
            strategy="pjrt",
        )
    assert cluster._worker_group.collectives.broken == {"pjrt"}
    run = FORM.run(cluster, saving=resume_from(copied))
    assert not run.recoveries
    assert cluster.run("int(count)").results == {0: "24", 1: "24"}


def test_journal_contains_failed_cells(cluster: nbdist.Cluster) -> None:
    with pytest.raises(CellError):
        cluster.run("late = 1\nraise ValueError")
    with pytest.raises(CellError):
        FORM.run(cluster, data="late")  # no data set
    cell, step = cluster._journal._entries[-2:]
    assert (cell.failed, cell.names.binds) == (True, ("late",))
    assert (step.failed, step.kind) == (True, "step")


def test_resume_with_another_batch_size_is_refused(cluster: nbdist.Cluster, copied: Path) -> None:
    with pytest.raises(CellError, match=r"made with --batch 12, but this run has 0"):
        FORM.run(cluster, data="batches", saving=resume_from(copied))


def test_resume_with_different_state_is_refused(cluster: nbdist.Cluster, copied: Path) -> None:
    cluster.run(
        FORM.setup + "\nparams = {'w': jnp.ones((8, 3)), 'v': jnp.ones((3, 1)), 'u': jnp.ones(2)}\n"
        "opt_state = optimizer.init(params)"
    )
    with pytest.raises(CellError) as error:
        FORM.run(cluster, saving=resume_from(copied))
    assert "missing: opt_state[0].mu['u'], opt_state[0].nu['u'], params['u'];" in str(error.value)
    assert "params['w'] has shape (8, 16) in the checkpoint and (8, 3) in the cell" in str(
        error.value
    )
    cluster.run(FORM.setup)


@pytest.mark.parametrize("file", [pytest.param("manifest.json", marks=FULL), "rank-1.msgpack"])
def test_damaged_checkpoint_is_named(cluster: nbdist.Cluster, copied: Path, file: str) -> None:
    (copied / "step-00000008" / file).write_bytes(b"\x00garbage")
    with pytest.raises(CellError, match=r"step-00000008 cannot be read"):
        FORM.run(cluster, saving=resume_from(copied))
    cluster.run(FORM.setup)  # the other rank may have donated its arrays


@pytest.mark.full  # worker/checkpoint/test_saver.py
def test_partial_save_of_an_earlier_run_is_removed(cluster: nbdist.Cluster, copied: Path) -> None:
    (copied / ".step-00000012.part-1a").mkdir()
    FORM.run(cluster, saving=resume_from(copied))
    assert not list(copied.glob(".*"))


def test_unwritable_folder_is_refused(cluster: nbdist.Cluster) -> None:
    with pytest.raises(CellError, match=r"--checkpoint /proc/kept: nothing can be saved there"):
        FORM.run(cluster, saving=Saving(folder="/proc/kept", every_steps=4))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=FULL), 1])
def test_full_disk_does_not_stop_the_run(
    cluster: nbdist.Cluster, tmp_path: Path, rank: int
) -> None:
    """The previous checkpoint stays the newest when a file size limit stops a rank's writes.

    Rank 0 does not wait for the files of the other rank.
    """
    cluster.run(
        FORM.setup + f"\nimport resource\ndef at(step):\n    if step == 10 and rank == {rank}:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))"
    )
    run = FORM.run(cluster, data="batches", saving=Saving(folder=str(tmp_path), every_steps=4))
    cluster.run("resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (resource.RLIM_INFINITY,))")
    newest = max(path.name for path in tmp_path.glob("step-*"))
    assert newest in ("step-00000004", "step-00000008")  # step 8 may still be incomplete
    failed = [note.text for note in run.notes if note.warning and note.topic == "checkpoint"]
    assert failed
    assert all("was not saved" in text for text in failed)
    assert run.summary.steps == training.STEPS
    assert run.summary.seconds < 30


@pytest.mark.full  # worker/checkpoint/test_saver.py
def test_save_interval_in_seconds_becomes_steps_on_all_ranks(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    cluster.run(FORM.setup + "\ndef at(step):\n    time.sleep(0.02)")
    FORM.run(cluster, data="batches", saving=Saving(folder=str(tmp_path), every_s=0.15, keep=99))
    steps = sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))
    assert steps[:2] == [0, 10]
    assert 3 < len(steps) < training.STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": "0"}, "--save-every 0: use steps, as in 100, or seconds"),
        ({"save_every": "soon"}, "--save-every soon"),
        ({"keep": 0}, "--keep 0: use a whole number from 1"),
        ({"checkpoint": __file__}, "is a file: use a folder"),
        (
            {"checkpoint": None, "save_every": "3"},
            "--save-every without --checkpoint: name the folder",
        ),
        ({"checkpoint": None, "resume": True}, "--resume without --checkpoint: name the folder"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check_options(cell_options({"checkpoint": "kept"} | options), None)


def test_resume_restores_arrays_lost_in_a_failed_step(
    cluster: nbdist.Cluster, tmp_path: Path
) -> None:
    """The resumed run restores the arrays without a rerun of the set-up."""
    folder = tmp_path / "kept"
    cluster.run(FORM.setup)
    FORM.run(cluster, data="batches")
    undisturbed = FORM.digest_of(cluster)
    cluster.run(FORM.setup)
    cluster.run("def at(step):\n    if rank == 1 and step == 10:\n        raise ValueError")
    with pytest.raises(CellError, match="ValueError"):
        FORM.run(cluster, data="batches", saving=Saving(folder=str(folder), every_steps=4))
    cluster.run("def at(step):\n    pass")
    run = FORM.run(cluster, data="batches", saving=resume_from(folder))
    assert [recover.ranks for recover in run.recoveries] == [()]
    assert run.recoveries[0].reason.endswith("missing after a failed step")
    assert FORM.digest_of(cluster) == undisturbed
