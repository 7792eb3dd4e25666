"""HTTP handlers: runs and clusters as JSON, and the placement of a cluster's arrays as HTML."""

from __future__ import annotations

import asyncio
import re
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado.web import HTTPError, authenticated

from nbdist.records import CLUSTER_ID, ClusterState, RunList
from nbdist.telemetry.annotations import renamed
from nbdist.telemetry.run_reader import search
from nbdist.utils.files import PLACEMENT_FILE, read_file
from nbdist.utils.processes import is_gone

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nbdist.records import RunState
    from nbdist.telemetry.run_reader import StoredRun

MOST_RUNS = 200
USUAL_RUNS = 50
PLACEMENT_BYTES = 16_000_000


class _ListHandler(APIHandler):
    auth_resource = "nbdist"
    _track_activity = False  # polls of a panel are no user activity


class RunsHandler(_ListHandler):
    """`GET runs?limit=50`: a `RunList` with at most this number of runs of each kind."""

    def initialize(self, root: Path) -> None:
        self._root = root

    @authenticated
    @authorized
    async def get(self) -> None:
        runs = await asyncio.to_thread(lambda: run_list(self._root, self._limit()))
        await self.finish(msgspec.json.encode(runs))

    def _limit(self) -> int:
        given = self.get_query_argument("limit", str(USUAL_RUNS))
        if not re.fullmatch("[0-9]{1,3}", given) or not 1 <= int(given) <= MOST_RUNS:
            raise HTTPError(400, f"limit must be 1 to {MOST_RUNS}, got {given[:20]!r}")
        return int(given)


class ClustersHandler(_ListHandler):
    """`GET clusters`: a `ClusterState` for each cluster whose notebook is running."""

    def initialize(self, folder: Path) -> None:
        self._folder = folder

    @authenticated
    @authorized
    async def get(self) -> None:
        states = await asyncio.to_thread(lambda: list(cluster_states(self._folder)))
        await self.finish(msgspec.json.encode(states))


class PlacementHandler(_ListHandler):
    """`GET clusters/<id>/placement`: the last picture of `%dist_show` on the cluster."""

    def initialize(self, folder: Path) -> None:
        self._folder = folder

    @property
    def content_security_policy(self) -> str:
        """The policy of the page: inline styles are allowed, and scripts do not run."""
        return f"{super().content_security_policy}; style-src 'unsafe-inline'; sandbox"

    @authenticated
    @authorized
    async def get(self, cluster: str) -> None:
        if not re.fullmatch(CLUSTER_ID, cluster):
            raise HTTPError(404, "no such cluster")
        path = self._folder / cluster / PLACEMENT_FILE
        try:
            content = await asyncio.to_thread(read_file, path, PLACEMENT_BYTES)
        except OSError:
            raise HTTPError(404, "no placement was shown: run %dist_show first") from None
        await self.finish(content, set_content_type="text/html; charset=utf-8")


def run_list(root: Path, limit: int) -> RunList:
    """Return the newest runs, and the newest runs that cannot be read with their reasons."""
    found = search(root)
    refused = dict(islice(found.refused.items(), limit))
    return RunList(runs=tuple(run_states(found.runs[:limit])), refused=refused)


def run_states(runs: Iterable[StoredRun]) -> Iterator[RunState]:
    """Yield the states of the runs, in order. Deleted runs are skipped."""
    for run in runs:
        try:
            yield renamed(run.state(), run.path)
        except (OSError, msgspec.DecodeError):
            continue


def cluster_states(folder: Path) -> Iterator[ClusterState]:
    """Yield the states of clusters whose notebook is running."""
    for path in sorted(folder.glob("*/cluster.json")):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError):
            continue
        if not is_gone(state.writer):
            yield state
