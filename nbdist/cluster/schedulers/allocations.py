"""Assignment of jobs to the places of ranks, from submission to cancellation."""

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

RENDEZVOUS_SOCKET = "rendezvous.sock"
"""Socket of the rendezvous process, in the cluster's folder."""

LOOK_S = 2.0
"""Interval between two queries of a job's state."""

_KINDS: dict[str, type[Job]] = {"mpi": MpiJob, "kubernetes": PodsJob}
_LEDGER = "jobs.json"
_SETTLE_S = 45.0
"""Time for an ending job to settle. It exceeds the default of Slurm's `KillWait` (30 s)."""

_ENDING = ("COMPLETING",)
_BEGIN_AGAIN_S = 15.0
_SUBMIT_END_S = 2.0


class Allocations:
    """Jobs of one cluster.

    Args:
        batch: the options for the scheduler.
        folder: the cluster's folder. It may contain the ledger of an ended rendezvous process.
        is_connected: returns whether the host of a place is connected.
        write: returns the ticket that the hosts of a job read, given the number of the job.
    """

    def __init__(
        self,
        batch: Batch,
        folder: Path,
        is_connected: Callable[[int], bool],
        write: Callable[[int], DialInTicket],
    ) -> None:
        self._batch = batch
        self._folder = folder
        self._is_connected = is_connected
        self._write = write
        self._jobs: dict[int, Job] = {}
        self._owners: dict[int, int] = {}  # the number of each place's job
        self._states: dict[int, tuple[float, JobState]] = {}
        self._query_locks: dict[int, asyncio.Lock] = {}
        self._restarts: dict[int, int] = {}  # how often each job had been requeued
        self._submitting = asyncio.Lock()
        self._last = self._end_previous()

    def place(self, job: int, task: int) -> int | None:
        """Return the place of a task of a job; None if the job does not provide it any more."""
        places = self._jobs[job].places[task : task + 1] if job in self._jobs else ()
        return places[0] if places and self._owners.get(places[0]) == job else None

    def of(self, places: Iterable[int]) -> dict[int, list[int]]:
        """Group places by the number of the job that provides them."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place in self._owners:
                found.setdefault(self._owners[place], []).append(place)
        return found

    def named(self, number: int) -> str:
        """Return the display name of a job."""
        return str(self._jobs[number]) if number in self._jobs else "a job that was cancelled"

    async def reserve(self, places: Collection[int]) -> str:
        """Submit a job for the places that have no host and no job that will provide one.

        Returns:
            The name of the submitted job; empty if none was necessary.

        Raises:
            StartError: the scheduler refuses the job, or is not available.
        """
        async with self._submitting:
            absent = [place for place in places if not self._is_connected(place)]
            lacking = [place for place in absent if place not in self._owners]
            jobs = [(self._jobs[number], own) for number, own in self.of(absent).items()]
            continuing = await asyncio.gather(*(self._continues(job, own) for job, own in jobs))
            lost = [
                own for (_, own), continues in zip(jobs, continuing, strict=True) if not continues
            ]
            lacking += [place for own in lost for place in own if not self._is_connected(place)]
            return await self._submit(tuple(sorted(lacking))) if lacking else ""

    async def _submit(self, places: tuple[int, ...]) -> str:
        self._last = number = self._last + 1
        kind = _KINDS.get(self._batch.launcher, BatchJob)
        job = self._jobs[number] = kind(self._batch, number, places, self._folder)
        before = {place: self._owners.get(place) for place in places}
        self._owners |= dict.fromkeys(places, number)  # hosts may connect before `submit` returns
        self._save()
        try:
            await asyncio.to_thread(job.submit, self._file(number))
        except BaseException:
            for place, owner in before.items():
                self._owners.pop(place, None)
                if owner in self._jobs:
                    self._owners[place] = owner
            self._end_unowned()
            raise
        self._save()
        self._end_unowned()
        return str(job)

    async def release(self, places: Iterable[int]) -> None:
        """Give places up, and cancel the jobs that provide no other places."""
        async with self._submitting:
            for place in places:
                self._owners.pop(place, None)
            self._end_unowned()

    async def end(self) -> None:
        """Cancel all jobs without waiting, except briefly for a submission in progress."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._submitting.acquire(), _SUBMIT_END_S)
        self._owners.clear()
        self._end_unowned()

    def _end_unowned(self) -> None:
        idle = [job for n, job in self._jobs.items() if n not in self._owners.values()]
        cancel([command for job in idle if (command := job.end())])
        for job in idle:
            del self._jobs[job.number]

    # States of jobs.

    async def query(self, number: int, *, afresh: bool = False) -> JobState:
        """Query the state of a job. Return the last known state if the scheduler fails to respond.

        Args:
            number: the number of the job.
            afresh: True to query even if the last query is recent.
        """
        async with self._query_locks.setdefault(number, asyncio.Lock()):
            loop = asyncio.get_running_loop()
            at, state = self._states.get(number, (-LOOK_S, SUBMITTED))
            if loop.time() < at + LOOK_S and not afresh:
                return state
            job = self._jobs.get(number)
            if job is None:
                return JobState(word="cancelled", over=True)
            try:
                state = await asyncio.to_thread(job.state)
            except StartError as error:
                state = msgspec.structs.replace(state, detail=str(error))
            self._states[number] = loop.time(), state
            return state

    def known(self, number: int) -> JobState:
        """Return the last known state of a job."""
        return self._states.get(number, (0.0, SUBMITTED))[1]

    async def will_be_requeued(self, places: Collection[int]) -> bool:
        """Return True if the scheduler replaces lost hosts of these places."""
        jobs = [self._jobs[number] for number in self.of(places)]
        states = await asyncio.gather(*map(self._settled, jobs))
        return any(map(self._is_requeued, jobs, states))

    def _is_requeued(self, job: Job, state: JobState) -> bool:
        """Return True if a job waits again, or has restarted since the last call."""
        before = self._restarts.get(job.number, 0)
        self._restarts[job.number] = state.restarts
        return not state.over and (state.waits or job.has_successors or state.restarts > before)

    async def _continues(self, job: Job, places: Collection[int]) -> bool:
        """Return True if a requeued or restarted job will provide hosts for these places."""
        state = await self._settled(job)
        if state.over or state.waits or job.has_successors:
            return not state.over
        loop = asyncio.get_running_loop()
        until = loop.time() + _BEGIN_AGAIN_S
        others = set(job.places) - set(places)
        while not any(map(self._is_connected, places)):
            if loop.time() > until or any(map(self._is_connected, others)):
                return False  # the job continues without the lost hosts
            await asyncio.sleep(LOOK_S / 4)
        return True

    async def _settled(self, job: Job) -> JobState:
        """Wait until the scheduler has noticed a loss of hosts, and return the job's state."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            state = await self.query(job.number, afresh=True)
            bound_s = _SETTLE_S if state.word in _ENDING else LOOK_S
            is_settled = state.over or state.waits or job.has_successors
            if is_settled or loop.time() > began + bound_s:
                return state
            await asyncio.sleep(LOOK_S / 4)

    def log_tail(self, number: int) -> str:
        """Return the last output of a job's hosts; empty if unknown."""
        return self._jobs[number].log_tail() if number in self._jobs else ""

    # Files.

    def _file(self, job: int) -> Path:
        """Write the ticket of a job to a file that only this user can read."""
        file = self._folder / f"job-{job}.json"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(msgspec.json.encode(self._write(job)))
        return file

    def _save(self) -> None:
        """Save the commands that cancel all jobs, for a successor of this process."""
        commands = [command for job in self._jobs.values() if (command := job.ending())]
        draft = self._folder / f"{_LEDGER}.new"
        draft.write_text(json.dumps({"last": self._last, "commands": commands}))
        draft.replace(self._folder / _LEDGER)

    def _end_previous(self) -> int:
        """Cancel the jobs of the previous process, and return the number of its last job."""
        try:
            ledger = json.loads((self._folder / _LEDGER).read_text())
        except FileNotFoundError:
            return 0
        cancel(ledger["commands"])
        return int(ledger["last"])
