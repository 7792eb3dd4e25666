"""Checkpoint folders are complete, despite concurrent writers and killed processes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from nbdist.errors import StepError
from nbdist.worker.checkpoint import folder as folders
from nbdist.worker.checkpoint.folder import (
    Checkpoint,
    Draft,
    Manifest,
    Position,
    names_in,
    pack,
    prepare,
    prune,
    steps_in,
    sweep,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANK_STATE = msgspec.msgpack.encode({"arrays": {}})


def manifest(step: int, *names: str) -> bytes:
    position = Position(step=step, epoch=1, batches=step)
    return msgspec.json.encode(Manifest(position, 2, 8, names, "1", ()))


def save(folder: Path, step: int, *names: str) -> None:
    draft = Draft(folder, step, 1)
    draft.write_own(0, RANK_STATE)
    draft.write_own(1, RANK_STATE)
    draft.write_manifest(manifest(step, *names))
    draft.commit()


def test_cancelled_save_does_not_mix_with_next_attempt(
    tmp_path: Path,
) -> None:
    """The thread of the cancelled save may still wait for a rank that now saves the same step."""
    cancelled, retry = Draft(tmp_path, 14, 1), Draft(tmp_path, 14, 2)
    cancelled.write_own(0, RANK_STATE)
    cancelled.write_manifest(manifest(14))
    retry.write_own(1, RANK_STATE)
    sweep(tmp_path, 2)
    retry.write_own(0, RANK_STATE)
    assert cancelled.lacks(2)
    assert not retry.lacks(2)
    retry.write_manifest(manifest(14))
    retry.commit()
    assert Checkpoint(tmp_path, 14).manifest().position.step == 14
    assert Checkpoint(tmp_path, 14).own(1) == {"arrays": {}}


def test_draft_creates_missing_folders(tmp_path: Path) -> None:
    """Rank 1 may write before rank 0 has prepared the folder, or give up there."""
    Draft(tmp_path / "a" / "b", 7, 1).write_own(1, RANK_STATE)
    late = Draft(tmp_path / "c" / "d", 7, 1)
    late.give_up(1)
    assert late.given_up()


@pytest.mark.parametrize(
    "remove_drafts", [lambda folder: sweep(folder, 2), lambda folder: prune(folder, 1, 1)]
)
def test_removal_continues_if_another_process_writes_to_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove_drafts: Callable[[Path], None]
) -> None:
    for step in (7, 14):
        Draft(tmp_path, step, 1).write_own(0, RANK_STATE)
    save(tmp_path, 21)
    remove, left = shutil.rmtree, []

    def remove_while_another_process_writes(path: Path, *, ignore_errors: bool) -> None:
        if not left:
            left.append(path)
            monkeypatch.setattr(folders.os, "rmdir", not_empty)
        remove(path, ignore_errors=ignore_errors)

    def not_empty(*_: object, **__: object) -> None:
        raise OSError("Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", remove_while_another_process_writes)
    remove_drafts(tmp_path)
    assert all(not list(path.iterdir()) for path in tmp_path.glob(".step-*"))
    assert steps_in(tmp_path) == [21]


def test_existing_checkpoint_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 14)
    before = (tmp_path / "step-00000014").stat().st_ino
    save(tmp_path, 14)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000014"]
    assert (tmp_path / "step-00000014").stat().st_ino == before


def test_killed_prune_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (7, 14, 21):
        save(tmp_path, step)

    def exit_during_removal(path: Path, **_: object) -> None:
        (path / "manifest.json").unlink()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", exit_during_removal)
        with pytest.raises(SystemExit):
            prune(tmp_path, 2, 1)
    assert steps_in(tmp_path) == [14, 21]
    sweep(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000014", "step-00000021"]


def test_unfinished_save_is_removed_with_next_checkpoint(tmp_path: Path) -> None:
    """A late rank recreates the folder of a save that another rank gave up."""
    late, other = Draft(tmp_path, 7, 1), Draft(tmp_path, 7, 2)
    late.write_own(1, RANK_STATE)
    other.write_own(1, RANK_STATE)
    save(tmp_path, 14)
    prune(tmp_path, 3, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.path.name, "step-00000014"]


def test_rank_that_cannot_write_gives_up(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 7, 1)
    draft.write_own(0, RANK_STATE)
    assert not draft.given_up()
    draft.give_up(1)
    assert draft.given_up()
    assert draft.lacks(2)


def test_prune_continues_if_another_process_has_removed_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (14, 21, 28):
        save(tmp_path, step)
    monkeypatch.setattr(folders, "steps_in", lambda _: [7, 14, 21, 28])  # 7 is gone since
    prune(tmp_path, 2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000021", "step-00000028"]


def test_prune_keeps_the_draft_of_the_step_that_follows(tmp_path: Path) -> None:
    """Ranks write the files of the next step while rank 0 removes old ones."""
    save(tmp_path, 14)
    same, after = Draft(tmp_path, 14, 1), Draft(tmp_path, 15, 1)
    for draft in (same, after):
        draft.write_own(1, RANK_STATE)
    prune(tmp_path, 1, 1)
    assert same.path.exists()
    assert after.path.exists()


def test_a_failed_commit_is_no_checkpoint(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 7, 1)
    draft.write_own(0, RANK_STATE)
    draft.discard()
    with pytest.raises(FileNotFoundError):
        draft.commit()
    assert steps_in(tmp_path) == []


def test_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    draft = Draft(tmp_path, 7, 1)
    with pytest.raises(OSError, match="no space left"):
        draft.write_own(0, RANK_STATE)
    assert list(draft.path.iterdir()) == []


def test_steps_are_in_order_whatever_their_length(tmp_path: Path) -> None:
    for step in (123_456_789, 7, 20):
        save(tmp_path, step)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-00000008.part").mkdir()
    assert steps_in(tmp_path) == [7, 20, 123_456_789]
    assert steps_in(tmp_path / "missing") == []
    (tmp_path / "file").touch()
    assert steps_in(tmp_path / "file") == steps_in(tmp_path / "file" / "runs") == []


def test_names_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert names_in(tmp_path) == ()
    save(tmp_path, 7, "old")
    save(tmp_path, 14, "model", "step")
    assert names_in(tmp_path) == ("model", "step")
    (tmp_path / "step-00000014" / "manifest.json").write_text("{")
    assert names_in(tmp_path) == ()


def test_unreadable_files_of_a_checkpoint_are_step_errors(tmp_path: Path) -> None:
    save(tmp_path, 7)
    checkpoint = Checkpoint(tmp_path, 7)
    for read in (lambda: checkpoint.own(2), Checkpoint(tmp_path, 8).manifest):
        with pytest.raises(StepError, match="cannot be read"):
            read()
    (checkpoint.path / "rank-1.msgpack").write_bytes(b"\xc1")
    with pytest.raises(StepError, match="step-00000007 cannot be read"):
        checkpoint.own(1)


def test_folder_of_checkpoints_is_checked_before_the_run(tmp_path: Path) -> None:
    prepare(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match="nothing can be saved there"):
        prepare(tmp_path / "file")


def test_manifest_without_optional_fields_is_at_the_beginning_of_a_step_cell() -> None:
    text = b'{"step": 3, "epoch": 2, "batches": 1}'
    assert msgspec.json.decode(text, type=Position) == Position(3, 2, 1, 0, {}, 0, 0, 0)


def test_packed_arrays_keep_type_shape_and_values() -> None:
    arrays = {
        "a": np.arange(6, dtype="float16").reshape(2, 3).T,
        "empty": np.zeros((0, 4), "int8"),
        "scalar": np.array(7, ">i4"),
    }
    encoded = msgspec.msgpack.encode(pack(arrays))
    found = unpack(msgspec.msgpack.decode(encoded))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
        found[name][...] = 0  # a restored array can be written
