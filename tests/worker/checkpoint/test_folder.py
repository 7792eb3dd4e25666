"""Checkpoint folders are complete, despite concurrent writers and killed processes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.worker.checkpoint.folder import (
    Checkpoint,
    Draft,
    Manifest,
    Position,
    prune,
    steps_in,
    sweep,
)

if TYPE_CHECKING:
    from pathlib import Path

RANK_STATE = msgspec.msgpack.encode({"arrays": {}})


def manifest(step: int) -> bytes:
    position = Position(step=step, epoch=1, batches=step)
    return msgspec.json.encode(Manifest(position, 2, 8, (), "1", ()))


def save(folder: Path, step: int) -> None:
    draft = Draft(folder, step, 1)
    draft.write_own(0, RANK_STATE)
    draft.write_own(1, RANK_STATE)
    draft.write_manifest(manifest(step))
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
