"""HTTP handlers of the table of runs: rows, edits, deletion, cells and curves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado.web import HTTPError, authenticated

from nbdist.errors import NbdistError, UsageError
from nbdist.telemetry.annotations import MOST_BYTES, annotate
from nbdist.telemetry.run_reader import delete, find
from nbdist.telemetry.run_table import RunRows, curve

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.telemetry.run_reader import StoredRun


class RunTableHandler(APIHandler):
    """`GET runs/table`: a `RunTable` with all runs."""

    auth_resource = "nbdist"
    _track_activity = False  # polls of a tab are no user activity

    def initialize(self, rows: RunRows) -> None:
        self._rows = rows

    @authenticated
    @authorized
    async def get(self) -> None:
        table = await asyncio.to_thread(self._rows.table)
        await self.finish(msgspec.json.encode(table))


class _RunHandler(APIHandler):
    """A request for one stored run. Its id is checked before its folder is read."""

    auth_resource = "nbdist"

    def initialize(self, root: Path) -> None:
        self._root = root

    def _find(self, run_id: str) -> StoredRun:
        try:
            return find(self._root, run_id)
        except UsageError:
            raise HTTPError(404, "no such run") from None


class RunHandler(_RunHandler):
    """`PATCH runs/<id>` changes its `Annotations`, `DELETE runs/<id>` deletes an ended run."""

    @authenticated
    @authorized
    async def patch(self, run_id: str) -> None:
        run, changes = self._find(run_id), self._changes()
        try:
            annotations = await asyncio.to_thread(annotate, run.path, changes)
        except msgspec.ValidationError as error:
            raise HTTPError(400, str(error)) from None
        except OSError as error:
            raise HTTPError(500, f"the edit could not be stored: {error.strerror}") from None
        await self.finish(msgspec.json.encode(annotations))

    @authenticated
    @authorized
    async def delete(self, run_id: str) -> None:
        run = self._find(run_id)
        if not await asyncio.to_thread(delete, run):
            raise HTTPError(409, "the run has not ended, or its files cannot be deleted")
        self.set_status(204)
        await self.finish()

    def _changes(self) -> dict[str, object]:
        body = self.request.body
        if len(body) > MOST_BYTES:
            raise HTTPError(413, f"an edit has at most {MOST_BYTES} bytes")
        try:
            return msgspec.json.decode(body, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HTTPError(400, f"an edit must be a JSON object: {error}") from None


class RunStopHandler(_RunHandler):
    """`POST runs/<id>/stop`: cancel the submitted job of a run, as `job.cancel()` does."""

    @authenticated
    @authorized(action="execute")  # type: ignore[untyped-decorator]
    async def post(self, run_id: str) -> None:
        run = self._find(run_id)
        try:
            await asyncio.to_thread(_cancel_job_of, run)
        except (NbdistError, OSError, msgspec.DecodeError) as error:
            raise HTTPError(409, str(error)) from None
        self.set_status(204)
        await self.finish()


def _cancel_job_of(run: StoredRun) -> None:
    from nbdist.jobs.submission import cancellation_of  # its import takes half a second

    cancel = cancellation_of(run.state())
    with contextlib.suppress(OSError):  # the job is cancelled without its run, too
        run.ask_to_stop()  # first: the program may end at once, and its run is then stopped
    try:
        cancel()
    except BaseException:
        run.withdraw_stop()
        raise


class RunCellsHandler(_RunHandler):
    """`GET runs/<id>/cells`: the cells of the cluster up to the run, in percent format."""

    @authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        run = self._find(run_id)
        try:
            cells = await asyncio.to_thread(lambda: run.cells)
        except OSError:
            raise HTTPError(404, "the cells of the run are gone") from None
        await self.finish(cells, set_content_type="text/plain; charset=utf-8")


class RunCurveHandler(_RunHandler):
    """`GET runs/<id>/curve?metric=loss`: a `RunCurve`."""

    _track_activity = False  # polls of a tab are no user activity

    @authenticated
    @authorized
    async def get(self, run_id: str) -> None:
        run, metric = self._find(run_id), self.get_query_argument("metric")
        try:
            found = await asyncio.to_thread(curve, run, metric)
        except KeyError:
            raise HTTPError(404, "the run has no such metric") from None
        except (OSError, msgspec.DecodeError):
            raise HTTPError(404, "the run is gone or cannot be read") from None
        await self.finish(msgspec.json.encode(found))


class RunMediaHandler(_RunHandler):
    """`GET runs/<id>/media/<number>`: a content of the index of media, as JSON."""

    _track_activity = False  # a view requests new contents by itself

    @authenticated
    @authorized
    async def get(self, run_id: str, number: str) -> None:
        run = self._find(run_id)
        try:
            content = await asyncio.to_thread(run.media_content, int(number))
        except (OSError, msgspec.DecodeError):
            content = None
        if content is None:
            raise HTTPError(404, "the run has no such content")
        await self.finish(content)
