"""Which job is to give which rank its host, from before it is submitted until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING

import msgspec

from nbdist.cluster.schedulers.cancel import cancel
from nbdist.cluster.schedulers.jobs import SUBMITTED, BatchJob, Job, MpiJob
from nbdist.cluster.schedulers.kubernetes import PodsJob
from nbdist.errors import StartError
from nbdist.records import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from nbdist.records import Batch, DialInTicket

RENDEZVOUS_SOCKET = "switch.sock"
"""On which the switchboard is asked, in the cluster's folder."""

LOOK_S = 2.0
"""Between two looks at a job."""

_KINDS: dict[str, type[Job]] = {"mpi": MpiJob, "kubernetes": PodsJob}
_LEDGER = "jobs.json"
_SETTLE_S = 45.0
"""Longer than Slurm waits by default before it kills what was told to end (`KillWait`)."""

_ENDING = ("COMPLETING",)
_BEGIN_AGAIN_S = 15.0
_SUBMIT_END_S = 2.0


class Allocations:
    """The jobs of one cluster.

    Args:
        batch: how hosts are asked for.
        folder: the cluster's, in which a switchboard of before may have left what it had.
        called: whether the host of a place is connected.
        write: what hosts of a job read, by its number; to be put into a file.
    """

    def __init__(
        self,
        batch: Batch,
        folder: Path,
        called: Callable[[int], bool],
        write: Callable[[int], DialInTicket],
    ) -> None:
        self._batch = batch
        self._folder = folder
        self._called = called
        self._write = write
        self._jobs: dict[int, Job] = {}
        self._owners: dict[int, int] = {}  # of each place, the number of its job
        self._looks: dict[int, tuple[float, JobState]] = {}
        self._looking: dict[int, asyncio.Lock] = {}
        self._restarts: dict[int, int] = {}  # of jobs, how often they had been queued again
        self._submitting = asyncio.Lock()
        self._last = self._end_former()

    def place(self, job: int, task: int) -> int | None:
        """That of a part of a job; None where another job has it, or none."""
        places = self._jobs[job].places[task : task + 1] if job in self._jobs else ()
        return places[0] if places and self._owners.get(places[0]) == job else None

    def of(self, places: Iterable[int]) -> dict[int, list[int]]:
        """The numbers of their jobs, and which places each of them has."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place in self._owners:
                found.setdefault(self._owners[place], []).append(place)
        return found

    def named(self, number: int) -> str:
        """A job, as people call it."""
        return str(self._jobs[number]) if number in self._jobs else "a job that was cancelled"

    async def book(self, places: Collection[int]) -> str:
        """Ask for hosts for those of these places that are not about to have one.

        Returns:
            The job that was submitted for that, in words; empty where none had to be.

        Raises:
            StartError: the scheduler refuses, or is not there.
        """
        async with self._submitting:
            absent = [place for place in places if not self._called(place)]
            lacking = [place for place in absent if place not in self._owners]
            jobs = [(self._jobs[number], own) for number, own in self.of(absent).items()]
            go_on = await asyncio.gather(*(self._goes_on(job, own) for job, own in jobs))
            lost = [own for (_, own), goes_on in zip(jobs, go_on, strict=True) if not goes_on]
            lacking += [place for own in lost for place in own if not self._called(place)]
            return await self._submit(tuple(sorted(lacking))) if lacking else ""

    async def _submit(self, places: tuple[int, ...]) -> str:
        self._last = number = self._last + 1
        kind = _KINDS.get(self._batch.launcher, BatchJob)
        job = self._jobs[number] = kind(self._batch, number, places, self._folder)
        before = {place: self._owners.get(place) for place in places}
        self._owners |= dict.fromkeys(places, number)  # its hosts may call before it is known
        self._keep()
        try:
            await asyncio.to_thread(job.submit, self._file(number))
        except BaseException:
            for place, owner in before.items():
                self._owners.pop(place, None)
                if owner in self._jobs:
                    self._owners[place] = owner
            self._end_unowned()
            raise
        self._keep()
        self._end_unowned()
        return str(job)

    async def release(self, places: Iterable[int]) -> None:
        """Nobody wants hosts for these any more: jobs that have no others are cancelled."""
        async with self._submitting:
            for place in places:
                self._owners.pop(place, None)
            self._end_unowned()

    async def end(self) -> None:
        """Cancel all; nothing is waited for but a job that is being submitted, for a moment."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._submitting.acquire(), _SUBMIT_END_S)
        self._owners.clear()
        self._end_unowned()

    def _end_unowned(self) -> None:
        idle = [job for n, job in self._jobs.items() if n not in self._owners.values()]
        cancel([command for job in idle if (command := job.end())])
        for job in idle:
            del self._jobs[job.number]

    # What becomes of them.

    async def look(self, number: int, *, afresh: bool = False) -> JobState:
        """What the scheduler says; what it said last, where it does not answer just now."""
        async with self._looking.setdefault(number, asyncio.Lock()):
            loop = asyncio.get_running_loop()
            at, state = self._looks.get(number, (-LOOK_S, SUBMITTED))
            if loop.time() < at + LOOK_S and not afresh:
                return state
            job = self._jobs.get(number)
            if job is None:
                return JobState(word="cancelled", over=True)
            try:
                state = await asyncio.to_thread(job.state)
            except StartError as error:
                state = msgspec.structs.replace(state, detail=str(error))
            self._looks[number] = loop.time(), state
            return state

    def known(self, number: int) -> JobState:
        """What the scheduler said last."""
        return self._looks.get(number, (0.0, SUBMITTED))[1]

    async def comes_again(self, places: Collection[int]) -> bool:
        """Whether hosts that were taken away for some of these places are asked for again."""
        jobs = [self._jobs[number] for number in self.of(places)]
        states = await asyncio.gather(*map(self._settled, jobs))
        return any(map(self._is_again, jobs, states))

    def _is_again(self, job: Job, state: JobState) -> bool:
        """Whether it waits once more, or has even begun once more since that was asked last."""
        before = self._restarts.get(job.number, 0)
        self._restarts[job.number] = state.restarts
        return not state.over and (state.waits or job.has_successors or state.restarts > before)

    async def _goes_on(self, job: Job, places: Collection[int]) -> bool:
        """Whether it was queued again, or has even begun again, with hosts for these places."""
        state = await self._settled(job)
        if state.over or state.waits or job.has_successors:
            return not state.over
        loop = asyncio.get_running_loop()
        until = loop.time() + _BEGIN_AGAIN_S
        others = set(job.places) - set(places)
        while not any(map(self._called, places)):
            if loop.time() > until or any(map(self._called, others)):
                return False  # they are gone, and it goes on without
            await asyncio.sleep(LOOK_S / 4)
        return True

    async def _settled(self, job: Job) -> JobState:
        """What becomes of a job whose hosts are gone; a scheduler may not know it at once."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            state = await self.look(job.number, afresh=True)
            bound_s = _SETTLE_S if state.word in _ENDING else LOOK_S
            is_settled = state.over or state.waits or job.has_successors
            if is_settled or loop.time() > began + bound_s:
                return state
            await asyncio.sleep(LOOK_S / 4)

    def words(self, number: int) -> str:
        """What hosts of a job wrote last."""
        return self._jobs[number].words() if number in self._jobs else ""

    # Files.

    def _file(self, job: int) -> Path:
        """What hosts of this job read; nobody else can."""
        file = self._folder / f"job-{job}.json"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(msgspec.json.encode(self._write(job)))
        return file

    def _keep(self) -> None:
        """What a successor of this process has to know: how all jobs are ended."""
        commands = [command for job in self._jobs.values() if (command := job.ending())]
        draft = self._folder / f"{_LEDGER}.new"
        draft.write_text(json.dumps({"last": self._last, "commands": commands}))
        draft.replace(self._folder / _LEDGER)

    def _end_former(self) -> int:
        """Cancel what a process before this one had; returns the number of its last job."""
        try:
            former = json.loads((self._folder / _LEDGER).read_text())
        except FileNotFoundError:
            return 0
        cancel(former["commands"])
        return int(former["last"])
