"""WebSockets for a browser to follow one run, and to stop it, or to follow a worker's text."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
from typing import TYPE_CHECKING

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado.web import HTTPError
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from nbdist.errors import UsageError
from nbdist.records import (
    BAD_MESSAGE,
    CLUSTER_ID,
    NO_SUCH_RUN,
    RUN_IS_GONE,
    UNREADABLE_RUN,
    CaughtUp,
    RequestStack,
    StopRun,
    TableMessage,
    TextMessage,
)
from nbdist.telemetry.run_reader import find, why_unreadable
from nbdist.telemetry.tail import FRAME_BYTES, LOOK_S, States, Tail, encoded
from nbdist.telemetry.worker_tail import ClusterLogTail, WorkerTail

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nbdist.telemetry.run_reader import StoredRun
    from nbdist.telemetry.tail import News


TAIL_S = 0.05
MESSAGE_BYTES = 1024
REASON_BYTES = 123
"""Limit for the reason of a close frame: RFC 6455, section 5.5."""


class _NewsHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Connection of one browser to a reader of news."""

    auth_resource = "nbdist"

    def initialize(self, root: Path) -> None:
        self._root = root
        self._following: asyncio.Task[None] | None = None

    def set_default_headers(self) -> None:
        """Set no headers: those of a page do not apply to a WebSocket."""

    @property
    def max_message_size(self) -> int:
        """The longest message in bytes. A longer one closes the socket."""
        return MESSAGE_BYTES

    @ws_authenticated
    async def get(self, *path: str, **_: str) -> None:
        allowed = self.authorizer.is_authorized(
            self, self.current_user, "execute", self.auth_resource
        )
        if not await ensure_async(allowed):
            raise HTTPError(403)
        await super().get(*path)

    def on_close(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, news: News) -> None:
        try:
            with contextlib.closing(news):
                await self._send_news(news)
        except WebSocketClosedError:
            return
        except OSError:
            self.close(RUN_IS_GONE, "the directory is gone")
        except msgspec.DecodeError as error:
            self.close(UNREADABLE_RUN, close_reason(why_unreadable(error)))

    async def _send_news(self, news: News) -> None:
        """Send news until the browser disconnects or the directory is deleted."""
        try:
            while True:
                await self._send(news.news())
                await asyncio.sleep(LOOK_S if news.is_over else TAIL_S)
        except OSError:
            await self._send(news.last())
            raise

    async def _send(self, messages: Iterable[str | bytes]) -> None:
        for message in messages:
            await self.write_message(message, binary=isinstance(message, bytes))


class WorkerLogHandler(_NewsHandler):
    """Connection of one browser to the text of all cells of one worker of a cluster."""

    def open(self, cluster: str, rank: str) -> None:
        super().open(cluster, rank)
        folder = self._root / cluster
        if not re.fullmatch(CLUSTER_ID, cluster) or folder.is_symlink() or not folder.is_dir():
            self.close(NO_SUCH_RUN, "no such cluster")
        else:
            tail = ClusterLogTail(folder, int(rank))
            self._following = asyncio.create_task(self._follow(tail))

    def on_message(self, message: str | bytes) -> None:
        del message
        self.close(BAD_MESSAGE, "the log of a worker accepts no messages")


class LiveRunHandler(_NewsHandler):
    """Connection of one browser to one run.

    It sends the state, the tables and their rows, then all changes. With `?text=1`, it sends the
    text of the cell's output instead of rows. With `?rank=3`, it sends the text of that worker and,
    after each `RequestStack`, its stack.
    """

    def initialize(self, root: Path) -> None:
        super().initialize(root)
        self._run: StoredRun | None = None

    def open(self, run_id: str) -> None:
        super().open(run_id)
        try:
            self._run = find(self._root, run_id)
        except UsageError:
            self.close(NO_SUCH_RUN, "no such run")
        else:
            self._following = asyncio.create_task(self._follow_run(self._run))

    def on_message(self, message: str | bytes) -> None:
        try:
            request = msgspec.json.decode(message, type=StopRun | RequestStack)
        except msgspec.DecodeError as error:
            self._run = None  # ignore messages that arrive before the socket is closed
            self.close(BAD_MESSAGE, str(error)[:100])
            return
        if self._run is not None:
            self._pass_on(self._run, request)

    def _pass_on(self, run: StoredRun, request: StopRun | RequestStack) -> None:
        """Pass a request on to the kernel."""
        try:
            if isinstance(request, RequestStack):
                run.ask_for_stack(request.rank)
            elif run.written_state().program:  # RunStopHandler cancels jobs
                self.log.warning("nbdist: run %s of a program cannot be stopped here", run.id)
            else:
                run.ask_to_stop()
        except (OSError, msgspec.DecodeError) as error:
            self.log.warning("nbdist: cannot pass on a request to run %s: %s", run.id, error)

    async def _follow_run(self, run: StoredRun) -> None:
        try:
            news = self._news(run)
        except OSError:
            self.close(RUN_IS_GONE, "the run's directory is gone")
        else:
            await self._follow(news)

    def _news(self, run: StoredRun) -> News:
        """Return the reader of the part of the run that the browser wants."""
        rank = self.get_query_argument("rank", "")
        if re.fullmatch("[0-9]{1,5}", rank):
            return WorkerTail(run, int(rank))
        return TextTail(run) if self.get_query_argument("text", "") == "1" else Tail(run)


def close_reason(text: str) -> str:
    """Return the text if it fits into a close frame, else its beginning and an ellipsis."""
    encoded_text = text.encode()
    if len(encoded_text) <= REASON_BYTES:
        return text
    return encoded_text[: REASON_BYTES - len("…".encode())].decode(errors="ignore") + "…"


class TextTail:
    """Messages of a run as text: its state, its tables without rows, and its whole output.

    The file stays open: its last lines can be read after the run has deleted its directory.

    Raises:
        OSError: the directory was deleted.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._states = States(run)
        self._file = run.open_shown()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tables = 0
        self._caught_up = False

    @property
    def is_over(self) -> bool:
        return self._states.is_over

    def news(self) -> Iterator[str]:
        yield from self._states.news()
        while (table := self._run.table(self._tables)) is not None:
            self._tables += 1
            yield encoded(TableMessage(table=table))
        yield from self.last()
        if not self._caught_up:
            self._caught_up = True
            yield encoded(CaughtUp())

    def last(self) -> Iterator[str]:
        while written := self._file.read(FRAME_BYTES):
            text = self._decoder.decode(written)
            if text:
                yield encoded(TextMessage(text=text))

    def close(self) -> None:
        self._file.close()
