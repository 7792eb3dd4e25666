"""A run's state is saved while it goes on, and restored where it stopped.

All ranks save at the same step. What they have is copied there, and written by a thread: rank 0
writes what all have in common, every rank what is its own, and rank 0 makes a checkpoint of it once
all is there (`folder.py`). A rank that dies meanwhile leaves the one before as the
newest. A save that fails, as on a full disk, is said, and the run goes on.
"""

from __future__ import annotations

import importlib.metadata
import random
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from nbdist.errors import AnotherRankError, StepError
from nbdist.records import Opened
from nbdist.worker.checkpoint.folder import (
    Checkpoint,
    Draft,
    Manifest,
    Own,
    Position,
    pack,
    prepare,
    prune,
    steps_in,
    sweep,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Saving
    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.runtime.rank_reporter import RankReporter

    Gather = Callable[[np.ndarray], np.ndarray]

_Generators = tuple[object, dict[str, Any]]
"""The states of Python's generator, then of NumPy's."""

_VERSION = importlib.metadata.version("nbdist")

_FIRST_STEPS = 10
"""Steps before anything is known of how long one takes, where seconds count."""

_POLL_S = 0.01
_OTHERS_S = 60.0
"""How long rank 0 waits for the other ranks' files."""

_GIVEN_UP_S = 0.3
"""The same, once the cell has failed: they may have saved, and are about to say so, or be dead."""

_ATTEMPTS = 2**31
"""The numbers that drafts of one run are told apart by; int32 holds them."""

_MARGIN = 1.1
"""A checkpoint takes a little more than its arrays."""


class State(Protocol):
    """What a framework has of a run; made cheaply, as it may be asked for its digests alone.

    Attributes:
        kind: the folder that `copy` is written to, within a checkpoint.
        names: of the cell's names, those whose values are in it.
    """

    kind: str

    @property
    def names(self) -> tuple[str, ...]: ...

    def size(self) -> int:
        """In bytes, of what `copy` writes."""
        ...

    def copy(self) -> Callable[[Path], None]:
        """Copy what all ranks have in common; what is returned writes it, on any thread."""
        ...

    def assist(self) -> None:
        """Have a part in what another rank needs to copy it."""
        ...

    def own(self) -> dict[str, np.ndarray]:
        """What is this rank's own."""
        ...

    def digests(self) -> list[Digest]:
        """Of what all ranks are to have alike; of the same things in the same order on all."""
        ...

    def restore(self, folder: Path, own: Own) -> None:
        """Take the values of a checkpoint.

        Raises:
            StepError: they do not fit.
        """
        ...


class Checkpoints(Protocol):
    """The checkpoints of one run, on one rank."""

    def begin(self) -> Position | None:
        """Make the folder ready; all ranks have to.

        Returns:
            How far the run is that goes on; None where one begins.

        Raises:
            StepError: the folder cannot be written, has checkpoints that nobody asked to go on
                from, or not the same ones for all ranks.
        """
        ...

    def open(self, state: State) -> None:
        """Save this state from here on; before, the newest checkpoint's goes into it.

        Raises:
            StepError: it does not fit.
        """
        ...

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be saved; the same on all ranks."""
        ...

    def save(self, position: Position) -> None:
        """Copy the state, and begin to write it; all ranks have to, at the same step.

        Waits for the save of before, if that is still under way. What has been saved is not again.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Finish what is under way; after a failure, only where no other rank is needed."""
        ...


class Unsaved:
    """A run whose state is not saved."""

    def begin(self) -> Position | None:
        return None

    def open(self, state: State) -> None: ...

    def due(self, step: int) -> bool:
        del step
        return False

    def save(self, position: Position) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Saved:
    """A run whose state is saved.

    Args:
        saving: where, and how often.
        reporter: of this rank.
        ranks: number of ranks.
        batch: samples of a global batch, or 0.
        common: all ranks have all data.
        gather: of int32 numbers, every rank's; all have to call it.
    """

    def __init__(
        self,
        saving: Saving,
        reporter: RankReporter,
        *,
        ranks: int,
        batch: int,
        common: bool,
        gather: Gather,
    ) -> None:
        self._saving = saving
        self._folder = Path(saving.folder)
        self._reporter = reporter
        self._ranks = ranks
        self._batch = batch
        self._common = common
        self._gather = gather
        self._state: State
        self._attempt = 0
        self._next = 0
        self._resumed: tuple[Checkpoint, Manifest] | None = None
        self._planned: tuple[int, float] | None = None
        self._saved = -1
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> Position | None:
        newest = self._agree_on_newest()
        if newest >= 0 and not self._saving.resume:
            raise StepError(
                f"--checkpoint {self._folder} has checkpoints, the newest of step {newest}: go on "
                "from there with --resume, or name another folder"
            )
        if self._reporter.rank == 0:
            sweep(self._folder, self._attempt)
        if newest < 0:
            return None
        checkpoint = Checkpoint(self._folder, newest)
        manifest = checkpoint.manifest()
        self._check(manifest)
        self._resumed = checkpoint, manifest
        return manifest.position

    def open(self, state: State) -> None:
        self._state = state
        if self._resumed is not None:
            checkpoint, manifest = self._resumed
            self._restore(checkpoint, manifest)
            self._saved = checkpoint.step
            self._plan(self._saved)
            self._resumed = None
            self._reporter.note("checkpoint", f"goes on after step {self._saved}, as saved")
        opened = Opened(names=state.names, step=self._saved, **self._reporter.said())
        self._reporter.say(opened)

    def _agree_on_newest(self) -> int:
        trouble = ""
        if self._reporter.rank == 0:
            try:
                prepare(self._folder)
            except StepError as error:
                trouble = str(error)
        newest = max(steps_in(self._folder), default=-1)
        drawn = [-2 if trouble else newest, secrets.randbelow(_ATTEMPTS)]
        chiefs, self._attempt = map(int, self._gather(np.array(drawn, np.int32))[0])
        if trouble:
            raise StepError(trouble)
        if chiefs == -2:
            raise AnotherRankError(f"--checkpoint {self._folder}: rank 0 cannot write there")
        if newest != chiefs and chiefs not in steps_in(self._folder) and chiefs >= 0:
            raise StepError(
                f"--checkpoint {self._folder}: rank 0 sees a checkpoint of step {chiefs}, and this "
                "rank does not: name a folder that all hosts share"
            )
        return chiefs

    def _check(self, manifest: Manifest) -> None:
        if manifest.batch != self._batch:
            raise StepError(
                f"the checkpoint in {self._folder} was made with --batch {manifest.batch}, and "
                f"this run has {self._batch}: its data would not go on where they stopped"
            )
        if manifest.world_size != self._ranks and not self._common:
            raise StepError(
                f"the checkpoint in {self._folder} was made by {manifest.world_size} workers, each "
                f"with data of its own, and there are {self._ranks}: their data would "
                "not go on where they stopped"
            )

    def _restore(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        rank, before = self._reporter.rank, manifest.world_size
        former = checkpoint.own(min(rank, before - 1))
        gone = range(self._ranks, before) if rank == 0 else ()
        own = Own(
            values=unpack(former["arrays"]),
            is_new=rank >= before,
            orphans=tuple(unpack(checkpoint.own(other)["arrays"]) for other in gone),
        )
        self._state.restore(checkpoint.path / self._state.kind, own)
        _restore_generators(former["random"])

    def due(self, step: int) -> bool:
        return step >= self._next and step != self._saved

    def save(self, position: Position) -> None:
        if position.step == self._saved:
            return
        self._finish()
        self._saved = position.step
        draft = Draft(self._folder, position.step, self._attempt)
        own = self._state.own(), _generators()
        write = self._state.copy() if self._reporter.rank == 0 else self._assist()
        manifest = Manifest(
            position=position,
            world_size=self._ranks,
            batch=self._batch,
            names=self._state.names,
            nbdist=_VERSION,
            parts=(self._state.kind,),
        )
        arguments = (draft, manifest, own, write)
        self._thread = threading.Thread(
            target=self._write, args=arguments, name="nbdist-checkpoint", daemon=True
        )
        self._thread.start()
        self._plan(position.step)

    def _assist(self) -> Callable[[Path], None]:
        """What ranks have in common is rank 0's to write."""
        self._state.assist()
        return lambda folder: None

    def close(self, *, failed: bool) -> None:
        if failed:
            self._given_up.set()
        self._finish()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _plan(self, step: int) -> None:
        every = self._saving.every_steps or self._steps_of_seconds(step)
        self._next = (step // every + 1) * every if self._saving.every_steps else step + every

    def _steps_of_seconds(self, step: int) -> int:
        """How many steps take as long as was asked for, by rank 0's clock."""
        now = time.monotonic()
        before, self._planned = self._planned, (step, now)
        steps = _FIRST_STEPS
        if before is not None and step > before[0]:
            steps = max(1, round(self._saving.every_s * (step - before[0]) / (now - before[1])))
        return int(self._gather(np.array([min(steps, 2**30)], np.int32))[0, 0])

    def _write(
        self,
        draft: Draft,
        manifest: Manifest,
        own: tuple[dict[str, np.ndarray], _Generators],
        write: Callable[[Path], None],
    ) -> None:
        """On the thread; whatever the framework raises is said, as the run has no use for it."""
        try:
            self._refuse_full()
            self._reporter.flush()  # whoever goes on from here does not report these steps again
            arrays, random_state = own
            packed = {"arrays": pack(arrays), "random": _packed(random_state)}
            draft.write_own(self._reporter.rank, msgspec.msgpack.encode(packed))
            if self._reporter.rank == 0:
                write(draft.path / self._state.kind)
                draft.write_manifest(msgspec.json.format(msgspec.json.encode(manifest)))
                if self._await_others(draft):
                    draft.commit()
                    prune(self._folder, self._saving.keep, self._attempt)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the notebook shows it
            if self._reporter.rank == 0:
                draft.discard()
            else:
                draft.give_up(self._reporter.rank)
            words = str(error).splitlines() or [type(error).__name__]
            text = f"step {draft.step} was not saved: {words[0]}"
            self._reporter.note("checkpoint", text, warning=True)

    def _refuse_full(self) -> None:
        needed = int(_MARGIN * self._state.size()) if self._reporter.rank == 0 else 0
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed, and {free:,} are free in {self._folder}")

    def _await_others(self, draft: Draft) -> bool:
        deadline = time.monotonic() + _OTHERS_S
        while draft.lacks(self._ranks):
            if draft.given_up():
                raise OSError("another rank could not write what is its own")
            if self._given_up.wait(_POLL_S):
                deadline = min(deadline, time.monotonic() + _GIVEN_UP_S)
                time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                if self._given_up.is_set():
                    return False
                raise TimeoutError(f"a rank has not written its part within {_OTHERS_S:g} s")
        return True


def checkpoints(
    saving: Saving | None,
    reporter: RankReporter,
    *,
    ranks: int,
    batch: int,
    common: bool,
    gather: Gather,
) -> Checkpoints:
    """Those of a run, as `Saved` says; none where nothing is to be saved."""
    if saving is None:
        return Unsaved()
    return Saved(saving, reporter, ranks=ranks, batch=batch, common=common, gather=gather)


def _generators() -> _Generators:
    """Return the states of the global generators."""
    own: Any = np.random.get_state(legacy=False)
    return random.getstate(), own


def _packed(states: _Generators) -> dict[str, Any]:
    """Convert them to types that MessagePack can encode."""
    python, own = states
    words = {**own["state"], "key": own["state"]["key"].tolist()}
    return {"python": python, "numpy": {**own, "state": words}}


def _restore_generators(saved: dict[str, Any]) -> None:
    """Restore the states that `_packed` converted."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    own = dict(saved["numpy"])
    key = np.asarray(own["state"]["key"], np.uint32)
    own["state"] = {**own["state"], "key": key}
    np.random.set_state(own)
