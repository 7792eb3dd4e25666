"""The folder of a run's checkpoints: what is in it, and how one comes to be there whole.

    FOLDER/step-00000050/
        manifest.json      how far the run was, and how it was cut
        tensorflow/ or orbax/   what all ranks have in common, written by rank 0
        rank-0.msgpack     what is rank 0's own; one for each rank

A checkpoint is made as `.step-00000050.part-1a2b3c4d` and renamed once all of it is there, and
renamed again before it is removed: what has the name is whole, whenever a process died. Files that
a rank writes by itself come to be the same way. The number at the end is drawn anew each time that
a run begins or goes on: a save that was broken off may still be written while the same step is
saved again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from nbdist.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"\.step-\d+\.part-[0-9a-f]+")
_REMOVED = "0"
_GIVEN_UP = ".missing"


class Position(msgspec.Struct, frozen=True):
    """How far a run is.

    Attributes:
        step: the last step that is done; 0 is none.
        epoch: the one that goes on; they count from 1.
        batches: how many of its batches are done.
        rows: the samples in those batches.
        sums: of each reported value times the rows of its batch.
        fit: which `fit` of the cell it is, counting from 1; 0 for a step.
        earlier: epochs of the cell's fits before that one.
        order: seed of the shuffles of that fit, if the user has set none.
    """

    step: int
    epoch: int
    batches: int
    rows: int = 0
    sums: dict[str, float] = {}
    fit: int = 0
    earlier: int = 0
    order: int = 0


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself.

    Attributes:
        position: how far the run was.
        world_size: of how many ranks.
        batch: samples of a global batch; 0 where the data's elements are batches.
        names: what of the cell's names is in it.
        nbdist: the version that wrote it.
        parts: folders of what the ranks have in common.
    """

    position: Position
    world_size: int
    batch: int
    names: tuple[str, ...]
    nbdist: str
    parts: tuple[str, ...]


class Own(NamedTuple):
    """What was each rank's own, as a rank takes it up; there may be more or fewer than there were.

    Attributes:
        values: of the rank that had its place; of the last one where none had.
        is_new: none had.
        orphans: of ranks whose places are no more, which rank 0 takes up.
    """

    values: dict[str, np.ndarray]
    is_new: bool
    orphans: tuple[dict[str, np.ndarray], ...]


class Checkpoint:
    """One checkpoint that is there.

    Args:
        folder: of the run's checkpoints.
        step: the last step that is done in it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.path = folder / f"step-{step:08d}"

    def own(self, rank: int) -> dict[str, Any]:
        """What is a rank's own.

        Raises:
            StepError: it is not readable as such.
        """
        try:
            data = (self.path / _own_name(rank)).read_bytes()
            own: dict[str, Any] = msgspec.msgpack.decode(data, type=dict)
        except (OSError, msgspec.DecodeError) as error:
            raise StepError(f"the checkpoint {self.path} cannot be read: {error}") from None
        return own

    def manifest(self) -> Manifest:
        """What it says of itself.

        Raises:
            StepError: it is not readable as such.
        """
        try:
            text = (self.path / "manifest.json").read_bytes()
            return msgspec.json.decode(text, type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise StepError(f"the checkpoint {self.path} cannot be read: {error}") from None


class Draft:
    """One that is being written.

    Args:
        folder: of the run's checkpoints.
        step: the last step that is done in it.
        attempt: the number that all ranks have drawn.
    """

    def __init__(self, folder: Path, step: int, attempt: int) -> None:
        self.step = step
        self.path = _part(folder, step, f"{attempt:x}")
        self._whole = Checkpoint(folder, step).path

    def write_own(self, rank: int, data: bytes) -> None:
        """Write what is a rank's own."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / _own_name(rank), data)

    def give_up(self, rank: int) -> None:
        """What is this rank's own cannot be written: nobody is to wait for it."""
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / f"{_own_name(rank)}{_GIVEN_UP}").touch()  # takes no room

    def given_up(self) -> bool:
        """Whether a rank has."""
        return any(self.path.glob(f"*{_GIVEN_UP}"))

    def write_manifest(self, text: bytes) -> None:
        _write(self.path / "manifest.json", text)

    def lacks(self, ranks: int) -> bool:
        """Whether some rank has not written what is its own yet."""
        return not all((self.path / _own_name(rank)).exists() for rank in range(ranks))

    def commit(self) -> None:
        """From here on it is there; where one of the same step is, that one stays."""
        for path in self.path.rglob("*"):
            _settle(path)  # what has the name is there after a crash of the machine, too
        try:
            self.path.rename(self._whole)
        except OSError:
            if not self._whole.exists():
                raise
            self.discard()
        _settle(self.path.parent)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, the oldest first; none where there is no folder."""
    with contextlib.suppress(FileNotFoundError):
        found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
    return []


def names_in(folder: Path) -> tuple[str, ...]:
    """What of a cell's names the newest checkpoint has; none where there is none to be read."""
    with contextlib.suppress(OSError, StepError):
        for step in steps_in(folder)[-1:]:
            return Checkpoint(folder, step).manifest().names
    return ()


def prepare(folder: Path) -> None:
    """Make the folder.

    Raises:
        StepError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / ".probe", b"")
        (folder / ".probe").unlink()
    except OSError as error:
        raise StepError(f"--checkpoint {folder}: nothing can be saved there ({error})") from None


def sweep(folder: Path, attempt: int) -> None:
    """Remove what a run of before has begun to write; other ranks may have begun with this one."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name) and not path.name.endswith(f"-{attempt:x}"):
            shutil.rmtree(path, ignore_errors=True)  # it may still grow


def prune(folder: Path, keep: int, attempt: int) -> None:
    """Remove all checkpoints but the newest, and what this attempt has not finished before."""
    newest = max(steps_in(folder), default=0)
    for path in folder.glob(f".step-*.part-{attempt:x}"):
        if int(path.name[len(".step-") :].partition(".")[0]) < newest:
            shutil.rmtree(path, ignore_errors=True)
    for step in steps_in(folder)[:-keep]:
        nameless = _part(folder, step, _REMOVED)
        with contextlib.suppress(OSError):  # somebody else removes it
            Checkpoint(folder, step).path.rename(nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Arrays as what MessagePack can hold."""
    return {
        name: {"type": array.dtype.str, "shape": array.shape, "data": array.tobytes()}
        for name, array in arrays.items()
    }


def unpack(packed: Mapping[str, dict[str, object]]) -> dict[str, np.ndarray]:
    """What `pack` was given."""
    return {
        name: np.frombuffer(item["data"], item["type"]).reshape(item["shape"]).copy()  # type: ignore[call-overload]
        for name, item in packed.items()
    }


def _part(folder: Path, step: int, attempt: str) -> Path:
    return folder / f".step-{step:08d}.part-{attempt}"


def _own_name(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _write(path: Path, data: bytes) -> None:
    """All of it, or nothing."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _settle(path: Path) -> None:
    """What is in a file, or the names in a folder, survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
