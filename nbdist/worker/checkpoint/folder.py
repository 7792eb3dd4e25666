"""Folder of a run's checkpoints: its contents, and the way to write a complete checkpoint.

    FOLDER/step-00000050/
        manifest.json      the position of the run, its ranks and its batch
        tensorflow/ or orbax/   the state that all ranks share, written by rank 0
        rank-0.msgpack     the state of rank 0 alone; one file for each rank

A checkpoint is written as `.step-00000050.part-1a2b3c4d` and renamed when it is complete. It is
renamed again before it is removed. A folder with the final name is therefore complete, whenever a
process died. Files of one rank are written the same way. The ranks draw a new number at the end
when a run begins or resumes. An earlier save may still write while the same step is saved again.
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
    """Position of a run.

    Attributes:
        step: last completed step; 0 if none.
        epoch: current epoch, from 1.
        batches: number of its completed batches.
        rows: number of samples in those batches.
        sums: sum of each reported value times the rows of its batch.
        fit: number of the current `fit` in the cell, from 1; 0 for a step cell.
        earlier: epochs of the cell's fits before that one.
        order: seed of the shuffles of that fit, if the user has set none.
        fits: records of the cell's fits until that one (`fit_records.py`).
    """

    step: int
    epoch: int
    batches: int
    rows: int = 0
    sums: dict[str, float] = {}
    fit: int = 0
    earlier: int = 0
    order: int = 0
    fits: bytes = b""


class Manifest(msgspec.Struct, frozen=True):
    """Description of a checkpoint, stored in it.

    Attributes:
        position: position of the run.
        world_size: number of ranks.
        batch: samples of a global batch; 0 if the elements of the data are batches.
        names: names of the cell whose values the checkpoint contains.
        nbdist: version that wrote it.
        parts: folders of the state that the ranks share.
    """

    position: Position
    world_size: int
    batch: int
    names: tuple[str, ...]
    nbdist: str
    parts: tuple[str, ...]


class Own(NamedTuple):
    """State of single ranks, as a rank restores it. The number of ranks may have changed.

    Attributes:
        values: state of the former rank with this number; of the last former rank if none had it.
        is_new: True if no former rank had this number.
        orphans: states of former ranks whose numbers no longer exist; rank 0 restores them.
    """

    values: dict[str, np.ndarray]
    is_new: bool
    orphans: tuple[dict[str, np.ndarray], ...]


class Checkpoint:
    """A complete checkpoint.

    Args:
        folder: folder of the run's checkpoints.
        step: last completed step in it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.path = folder / f"step-{step:08d}"

    def own(self, rank: int) -> dict[str, Any]:
        """Return the state of one rank.

        Raises:
            StepError: the file cannot be read or decoded.
        """
        try:
            data = (self.path / _own_name(rank)).read_bytes()
            own: dict[str, Any] = msgspec.msgpack.decode(data, type=dict)
        except (OSError, msgspec.DecodeError) as error:
            raise StepError(f"the checkpoint {self.path} cannot be read: {error}") from None
        return own

    def manifest(self) -> Manifest:
        """Return the description of the checkpoint.

        Raises:
            StepError: the file cannot be read or decoded.
        """
        try:
            text = (self.path / "manifest.json").read_bytes()
            return msgspec.json.decode(text, type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise StepError(f"the checkpoint {self.path} cannot be read: {error}") from None


class Draft:
    """A checkpoint that is being written.

    Args:
        folder: folder of the run's checkpoints.
        step: last completed step in it.
        attempt: random number that all ranks share.
    """

    def __init__(self, folder: Path, step: int, attempt: int) -> None:
        self.step = step
        self.path = _part(folder, step, f"{attempt:x}")
        self._whole = Checkpoint(folder, step).path

    def write_own(self, rank: int, data: bytes) -> None:
        """Write the state of one rank."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / _own_name(rank), data)

    def give_up(self, rank: int) -> None:
        """Mark that this rank could not write its state; rank 0 then stops waiting for it."""
        with contextlib.suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            (
                self.path / f"{_own_name(rank)}{_GIVEN_UP}"
            ).touch()  # an empty file fits on a full disk

    def given_up(self) -> bool:
        """Return True if a rank has given up."""
        return any(self.path.glob(f"*{_GIVEN_UP}"))

    def write_manifest(self, text: bytes) -> None:
        _write(self.path / "manifest.json", text)

    def lacks(self, ranks: int) -> bool:
        """Return True if the state of a rank is still missing."""
        return not all((self.path / _own_name(rank)).exists() for rank in range(ranks))

    def commit(self) -> None:
        """Publish the checkpoint. If one of the same step exists, keep that one."""
        for path in self.path.rglob("*"):
            _sync(path)  # the contents must survive a crash of the machine before the rename
        try:
            self.path.rename(self._whole)
        except OSError:
            if not self._whole.exists():
                raise
            self.discard()
        _sync(self.path.parent)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first; empty without a folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
    return []


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the cell's names in the newest checkpoint; empty if none can be read."""
    with contextlib.suppress(OSError, StepError):
        for step in steps_in(folder)[-1:]:
            return Checkpoint(folder, step).manifest().names
    return ()


def prepare(folder: Path) -> None:
    """Create the folder, and check that it is writable.

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
    """Remove the drafts of earlier attempts; other ranks may already write drafts of this one."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name) and not path.name.endswith(f"-{attempt:x}"):
            shutil.rmtree(path, ignore_errors=True)  # another process may still write to it


def prune(folder: Path, keep: int, attempt: int) -> None:
    """Keep the newest checkpoints; remove older ones, and older drafts of this attempt."""
    newest = max(steps_in(folder), default=0)
    for path in folder.glob(f".step-*.part-{attempt:x}"):
        if int(path.name[len(".step-") :].partition(".")[0]) < newest:
            shutil.rmtree(path, ignore_errors=True)
    for step in steps_in(folder)[:-keep]:
        nameless = _part(folder, step, _REMOVED)
        with contextlib.suppress(OSError):  # another process removes it
            Checkpoint(folder, step).path.rename(nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def pack(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Convert arrays to types that MessagePack can encode."""
    return {
        name: {"type": array.dtype.str, "shape": array.shape, "data": array.tobytes()}
        for name, array in arrays.items()
    }


def unpack(packed: Mapping[str, dict[str, object]]) -> dict[str, np.ndarray]:
    """Convert the result of `pack` back to arrays."""
    return {
        name: np.frombuffer(item["data"], item["type"]).reshape(item["shape"]).copy()  # type: ignore[call-overload]
        for name, item in packed.items()
    }


def _part(folder: Path, step: int, attempt: str) -> Path:
    return folder / f".step-{step:08d}.part-{attempt}"


def _own_name(rank: int) -> str:
    return f"rank-{rank}.msgpack"


def _write(path: Path, data: bytes) -> None:
    """Write the file completely, or not at all."""
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


def _sync(path: Path) -> None:
    """Flush a file or a folder's list of names to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
