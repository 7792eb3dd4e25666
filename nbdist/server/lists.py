"""The runs and the clusters there are, as JSON."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado.web import HTTPError, authenticated

from nbdist.records import ClusterState
from nbdist.telemetry.kept import kept
from nbdist.telemetry.processes import is_gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.records import RunState

MOST_RUNS = 200
USUAL_RUNS = 50


class _ListHandler(APIHandler):
    auth_resource = "nbdist"
    _track_activity = False  # a panel that asks again and again is nobody at work


class RunsHandler(_ListHandler):
    """`GET runs?limit=50`: `RunState`s, newest first."""

    def initialize(self, root: Path) -> None:
        self._root = root

    @authenticated
    @authorized
    async def get(self) -> None:
        states = await asyncio.to_thread(lambda: list(run_states(self._root, self._limit())))
        await self.finish(msgspec.json.encode(states))

    def _limit(self) -> int:
        given = self.get_query_argument("limit", str(USUAL_RUNS))
        if not given.isdecimal() or not 1 <= int(given) <= MOST_RUNS:
            raise HTTPError(400, f"limit is 1 to {MOST_RUNS}, not {given[:20]!r}")
        return int(given)


class ClustersHandler(_ListHandler):
    """`GET clusters`: a `ClusterState` for each whose notebook is there."""

    def initialize(self, folder: Path) -> None:
        self._folder = folder

    @authenticated
    @authorized
    async def get(self) -> None:
        states = await asyncio.to_thread(lambda: list(cluster_states(self._folder)))
        await self.finish(msgspec.json.encode(states))


def run_states(root: Path, limit: int) -> Iterator[RunState]:
    """The newest runs; those that are deleted meanwhile are left out."""
    for run in kept(root)[:limit]:
        try:
            yield run.state()
        except (OSError, msgspec.DecodeError):
            continue


def cluster_states(folder: Path) -> Iterator[ClusterState]:
    """The clusters whose writer is there."""
    for path in sorted(folder.glob("*/cluster.json")):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError):
            continue
        if not is_gone(state.writer):
            yield state
