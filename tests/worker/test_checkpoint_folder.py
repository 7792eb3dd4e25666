"""What has a checkpoint's name is whole, whatever else writes or dies meanwhile."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from nbdist.worker.checkpoint_folder import (
    Checkpoint,
    Draft,
    Manifest,
    Position,
    prepare,
    prune,
    steps_in,
)

if TYPE_CHECKING:
    from pathlib import Path

OWN = msgspec.msgpack.encode({"arrays": {}})


def manifest(step: int) -> bytes:
    position = Position(step=step, epoch=1, batches=step)
    return msgspec.json.encode(Manifest(position, 2, 8, (), "1", ()))


def save(folder: Path, step: int) -> None:
    draft = Draft(folder, step, 1)
    draft.write_own(0, OWN)
    draft.write_own(1, OWN)
    draft.write_manifest(manifest(step))
    draft.commit()


def test_a_save_that_was_broken_off_does_not_mix_with_the_next_of_the_same_step(
    tmp_path: Path,
) -> None:
    """Its thread may wait for a rank yet, which writes the same step for the next attempt."""
    broken_off, again = Draft(tmp_path, 14, 1), Draft(tmp_path, 14, 2)
    broken_off.write_own(0, OWN)
    broken_off.write_manifest(manifest(14))
    prepare(tmp_path)
    again.write_own(0, OWN)
    again.write_own(1, OWN)
    assert broken_off.lacks(2)
    assert not again.lacks(2)
    again.write_manifest(manifest(14))
    again.commit()
    assert Checkpoint(tmp_path, 14).manifest().position.step == 14
    assert Checkpoint(tmp_path, 14).own(1) == {"arrays": {}}


def test_one_that_is_there_stays(tmp_path: Path) -> None:
    save(tmp_path, 14)
    before = (tmp_path / "step-00000014").stat().st_ino
    save(tmp_path, 14)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000014"]
    assert (tmp_path / "step-00000014").stat().st_ino == before


def test_who_dies_while_it_removes_one_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (7, 14, 21):
        save(tmp_path, step)

    def die(path: Path, **_: object) -> None:
        (path / "manifest.json").unlink()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(SystemExit):
            prune(tmp_path, 2)
    assert steps_in(tmp_path) == [14, 21]
    prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000014", "step-00000021"]
