"""Saving the state of a run during training, and restoring it.

All ranks save at the same step. Each copies its state there, and a thread writes the copy. Rank 0
writes the state that all ranks share, and every rank writes its own state. Rank 0 publishes the
checkpoint when it is complete (`folder.py`). If a rank dies before that, the previous checkpoint is
the newest. If a save fails, for example on a full disk, nbdist reports it and the run continues.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import secrets
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import structs

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
from nbdist.worker.runtime.rank_reporter import RecentReports

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import Saving
    from nbdist.worker.checkpoint.digest import Digest
    from nbdist.worker.runtime.rank_reporter import RankReporter

    Gather = Callable[[np.ndarray], np.ndarray]

_Generators = tuple[object, dict[str, Any]]
"""States of Python's generator and of NumPy's."""

_VERSION = importlib.metadata.version("nbdist")

_FIRST_STEPS = 10
"""Steps until the first save if the interval is in seconds: the step time is unknown before."""

_NEVER = sys.maxsize
"""Next step to save if there is nothing to save."""

_POLL_S = 0.01
_OTHERS_S = 60.0
"""Seconds that rank 0 waits for the other ranks' files."""

_GIVEN_UP_S = 0.3
"""Seconds that rank 0 still waits after the cell failed: other ranks may be about to write."""

_ATTEMPTS = 2**31
"""Number of values of the random number of an attempt; int32 holds them."""

_MARGIN = 1.1
"""Size of a checkpoint relative to its arrays."""


class State(Protocol):
    """State of a run in one framework. Cheap to create: it may be used for its digests alone.

    Attributes:
        kind: name of the folder in a checkpoint that `copy` is written to.
        names: names of the cell whose values the state contains.
    """

    kind: str

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to save."""
        ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def size(self) -> int:
        """Return the bytes that `copy` writes."""
        ...

    def copy(self) -> Callable[[Path], None]:
        """Copy the state that all ranks share; return a function that writes it, on any thread."""
        ...

    def assist(self) -> None:
        """Take part in the collectives that rank 0 needs to copy the state."""
        ...

    def own(self) -> dict[str, np.ndarray]:
        """Return the state of this rank alone."""
        ...

    def digests(self) -> list[Digest]:
        """Return digests of the values that must be equal on all ranks, in a fixed order."""
        ...

    def restore(self, folder: Path, own: Own) -> None:
        """Restore the values of a checkpoint.

        Raises:
            StepError: the values do not match the run.
        """
        ...


class Checkpoints(Protocol):
    """Checkpoints of one run, on one rank."""

    def begin(self) -> Position | None:
        """Prepare the folder. All ranks must call it.

        Returns:
            Position from which the run resumes; None if it begins.

        Raises:
            StepError: the folder is not writable, contains checkpoints without a request to
                resume, or is not the same for all ranks.
        """
        ...

    def open(self, state: State, *, has_more: bool = False, keeps_generators: bool = False) -> None:
        """Save this state from now on; if the run resumes, restore the newest checkpoint first.

        Args:
            state: the state.
            has_more: True if `save` receives the rest of the state in `loop`.
            keeps_generators: True to leave the generators of Python and NumPy as they are.

        Raises:
            StepError: the checkpoint does not match the run, or a package is missing.
        """
        ...

    def due(self, step: int) -> bool:
        """Return True if to save the state after `step`; the same on all ranks."""
        ...

    def save(self, position: Position, loop: bytes = b"") -> None:
        """Copy the state and begin to write it. All ranks must call it at the same step.

        Waits for the previous save if it still runs. Does nothing if the step is saved already.

        Args:
            position: position of the run.
            loop: position of this rank in the user's loops, with their variables.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Finish the save under way; after a failure, do not wait long for other ranks."""
        ...


class Unsaved:
    """A run without checkpoints."""

    def begin(self) -> Position | None:
        return None

    def open(
        self, state: State, *, has_more: bool = False, keeps_generators: bool = False
    ) -> None: ...

    def due(self, step: int) -> bool:
        del step
        return False

    def save(self, position: Position, loop: bytes = b"") -> None: ...

    def close(self, *, failed: bool) -> None: ...


class _OwnState(NamedTuple):
    """Copy of a rank's own state.

    Attributes:
        arrays: its arrays.
        generators: its global random generators.
        sums: see `Position`. Under mirrored, each rank reports the values of its own samples.
        fits: see `Position`. Ranks that train models of their own have different histories.
        loop: its position in the user's loops.
    """

    arrays: dict[str, np.ndarray]
    generators: _Generators
    sums: dict[str, float]
    fits: bytes
    loop: bytes

    def encode(self, reports: RecentReports) -> bytes:
        """Return it with the rank's reports, which may be lost on their way to the notebook."""
        state = {
            "arrays": pack(self.arrays),
            "random": _packed(self.generators),
            "sums": self.sums,
            "fits": self.fits,
            "loop": self.loop,
            "reports": reports,
        }
        return msgspec.msgpack.encode(state)


class Saved:
    """A run with checkpoints.

    Args:
        saving: folder and interval.
        reporter: reporter of this rank.
        ranks: number of ranks.
        batch: samples of a global batch; 0 if the elements of the data are batches.
        common: True if every rank has all data.
        gather: gathers int32 numbers from all ranks; all ranks must call it.
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
                f"--checkpoint {self._folder} contains checkpoints, the newest of step {newest}: "
                "use --resume to continue from it, or use another folder"
            )
        if self._reporter.rank == 0:
            sweep(self._folder, self._attempt)
        if newest < 0:
            return None
        checkpoint = Checkpoint(self._folder, newest)
        manifest = checkpoint.manifest()
        self._check(manifest)
        self._resumed = checkpoint, manifest
        if manifest.world_size != self._ranks:
            return manifest.position
        position, own = manifest.position, checkpoint.own(self._reporter.rank)
        known = {name: own[name] for name in ("sums", "fits") if name in own}
        return structs.replace(position, **known)

    def open(self, state: State, *, has_more: bool = False, keeps_generators: bool = False) -> None:
        self._state = state
        if state.kind == "orbax" and importlib.util.find_spec("orbax") is None:
            raise StepError(
                "--checkpoint needs the package orbax-checkpoint on the workers for arrays of JAX: "
                'install "nbdist[jax]" there, then start them again (%dist_stop, %dist_start)'
            )
        if self._resumed is not None:
            checkpoint, manifest = self._resumed
            self._restore(checkpoint, manifest, keeps_generators)
            self._saved = checkpoint.step
            self._plan(self._saved)
            self._resumed = None
            self._reporter.note("checkpoint", f"resumed from the checkpoint of step {self._saved}")
        if state.is_empty and not has_more:
            self._next = _NEVER
            text = "no checkpoint is saved, because the steps carry no arrays"
            self._reporter.note("checkpoint", text, warning=True)
        opened = Opened(names=state.names, step=self._saved, **self._reporter.record_fields())
        self._reporter.send(opened)

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
                f"--checkpoint {self._folder}: rank 0 sees a checkpoint of step {chiefs}, but this "
                "rank does not: use a folder that all hosts share"
            )
        return chiefs

    def _check(self, manifest: Manifest) -> None:
        if manifest.batch != self._batch:
            raise StepError(
                f"the checkpoint in {self._folder} was made with --batch {manifest.batch}, but "
                f"this run has {self._batch}: use the same batch size to continue in the data"
            )
        if manifest.world_size != self._ranks and not self._common:
            raise StepError(
                f"the checkpoint in {self._folder} was made by {manifest.world_size} workers, each "
                f"with its own data, but this cluster has {self._ranks}: use the same number of "
                "workers to continue in the data"
            )

    def _restore(self, checkpoint: Checkpoint, manifest: Manifest, keeps_generators: bool) -> None:
        rank, before = self._reporter.rank, manifest.world_size
        state = checkpoint.own(min(rank, before - 1))
        gone = range(self._ranks, before) if rank == 0 else ()
        orphans = [checkpoint.own(other) for other in gone]
        own = Own(
            values=unpack(state["arrays"]),
            is_new=rank >= before,
            orphans=tuple(unpack(orphan["arrays"]) for orphan in orphans),
        )
        for one in (state, *orphans):
            if "reports" in one:  # not in checkpoints of nbdist before 2026-11-29
                self._reporter.repeat(msgspec.convert(one["reports"], RecentReports))
        self._state.restore(checkpoint.path / self._state.kind, own)
        # A loop restores them at the begin of its pass.
        if not state.get("loop") and not keeps_generators:
            _restore_generators(state["random"])

    def due(self, step: int) -> bool:
        return step >= self._next and step != self._saved

    def save(self, position: Position, loop: bytes = b"") -> None:
        if position.step == self._saved or self._next == _NEVER:
            return
        self._finish()
        self._saved = position.step
        draft = Draft(self._folder, position.step, self._attempt)
        own = _OwnState(self._state.own(), _generators(), position.sums, position.fits, loop)
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
        """Help rank 0 to copy the shared state; this rank writes none of it."""
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
        """Return the number of steps in the requested seconds, by rank 0's clock."""
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
        own: _OwnState,
        write: Callable[[Path], None],
    ) -> None:
        """Write the checkpoint, on the thread. Report an error instead of raising it."""
        try:
            self._refuse_full()
            reports = self._reporter.recent()  # a run that resumes here does not compute them again
            draft.write_own(self._reporter.rank, own.encode(reports))
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
            raise OSError(f"{needed:,} bytes are needed, but {free:,} are free in {self._folder}")

    def _await_others(self, draft: Draft) -> bool:
        deadline = time.monotonic() + _OTHERS_S
        while draft.lacks(self._ranks):
            if draft.given_up():
                raise OSError("another rank could not write its state")
            if self._given_up.wait(_POLL_S):
                deadline = min(deadline, time.monotonic() + _GIVEN_UP_S)
                time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                if self._given_up.is_set():
                    return False
                raise TimeoutError(f"a rank has not written its state within {_OTHERS_S:g} s")
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
    """Return the checkpoints of a run; an `Unsaved` if `saving` is None."""
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
