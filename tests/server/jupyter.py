"""Real Jupyter server with the extension of nbdist, and the browser's end of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from nbdist.records import AnyServerMessage, CaughtUp, StateMessage, TableMessage, TextMessage
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
TOKEN = "of-the-tests"
TIMEOUT_S = 60
BASE = "user/somebody"  # same form as under JupyterHub


def response(request: urllib.request.Request) -> tuple[int, bytes]:
    """Send a request and return the status and body of the response."""
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class JupyterServer:
    """A Jupyter server in its own process, on loopback.

    Args:
        folder: folder of all its files.
        app: module to run: `jupyter_server`, `jupyterlab` or `notebook`.
        extra: further command-line arguments.

    Attributes:
        at: host and port.
        runs: folder of the runs.
        clusters: folder of the clusters' files.
        home: folder of the notebooks.
        process: process of the server.
        log: file with the output of the server.
    """

    def __init__(
        self, folder: Path, app: str = "jupyter_server", extra: tuple[str, ...] = ()
    ) -> None:
        self.home = folder / "home"
        self.runs = folder / "runs"
        self.clusters = folder / "runtime" / "nbdist"
        self.at = f"127.0.0.1:{free_port()}"
        self.home.mkdir(parents=True)
        self.log = folder / "server.log"
        arguments = {
            "ip": "127.0.0.1",
            "port": self.at.split(":")[1],
            "port_retries": "0",
            "base_url": f"/{BASE}/",
            "open_browser": "False",
            "allow_root": "True",
            "root_dir": str(self.home),
            "jpserver_extensions": "{'nbdist': True}",
        }
        extensions = folder / "share" / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / "nbdist").symlink_to(ROOT / "nbdist" / "labextension")
        path = filter(None, (os.environ.get("JUPYTER_PATH"), str(extensions.parent)))
        self._environment = {
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_PATH": os.pathsep.join(path),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "NBDIST_RUNS_FOLDER": str(self.runs),
            "PYTHONPATH": str(ROOT),
        }
        self._command = [
            *(sys.executable, "-m", app),
            *(f"--ServerApp.{name}={value}" for name, value in arguments.items()),
            f"--IdentityProvider.token={TOKEN}",
            *extra,
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server at its address and wait until it responds."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env={**os.environ, **self._environment}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                assert self.get("api/status")[0] == 200
            except urllib.error.URLError:
                time.sleep(0.05)
            else:
                return
        self.stop()
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        """Stop the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str, token: str = TOKEN, method: str = "GET") -> tuple[int, bytes]:
        """Send a request and return the status and body of the response."""
        request = urllib.request.Request(
            f"http://{self.at}/{BASE}/{path}",
            headers={"Authorization": f"token {token}"},
            method=method,
        )
        return response(request)

    def login(self) -> str:
        """Return the cookies of a browser that has opened the URL with the token."""
        with urllib.request.urlopen(f"http://{self.at}/{BASE}/api/status?token={TOKEN}") as answer:
            cookies = answer.headers.get_all("Set-Cookie")
        return "; ".join(cookie.split(";")[0] for cookie in cookies)

    @contextlib.asynccontextmanager
    async def watch(
        self,
        run_id: str,
        token: str = TOKEN,
        headers: dict[str, str] | None = None,
        *,
        query: str = "",
        of: str = "runs",
    ) -> AsyncIterator[Watcher]:
        """Open the socket of a run, or with `of="clusters"` of a worker: `CLUSTER/workers/1`.

        `query` selects a part of a run: `text=1` its text, `rank=1` one worker.

        `headers` replace the header with the token.

        Raises:
            tornado.httpclient.HTTPClientError: the server refused the socket.
        """
        headers = headers or {"Authorization": f"token {token}"}
        url = f"ws://{self.at}/{BASE}/nbdist/{of}/{run_id}/live?{query}"
        watcher = Watcher(await websocket_connect(HTTPRequest(url, headers=headers)))
        try:
            yield watcher
        finally:
            await watcher.close()


@dataclass(frozen=True)
class RowsFrame:
    """A binary message with consecutive rows of table `number`."""

    number: int
    values: np.ndarray
    size_bytes: int


@dataclass(frozen=True)
class Closed:
    code: int | None


Received = AnyServerMessage | RowsFrame | Closed


class Watcher:
    """Receiver of the messages for a browser that follows a run."""

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self._closed: Closed | None = None

    async def receive(self) -> Received:
        if self._closed:
            return self._closed
        message = await asyncio.wait_for(self._connection.read_message(), TIMEOUT_S)
        if message is None:
            self._closed = Closed(self._connection.close_code)
            return self._closed
        if isinstance(message, str):
            text: AnyServerMessage = msgspec.json.decode(message, type=AnyServerMessage)
            return text
        values = np.frombuffer(message, "<f8")
        return RowsFrame(int(values[0]), values[1:], len(message))

    async def history(self) -> list[Received]:
        """Return all messages before `CaughtUp`."""
        received: list[Received] = []
        while not isinstance(message := await self.receive(), CaughtUp):
            assert not isinstance(message, Closed), message
            received.append(message)
        return received

    async def rows(self, number: int, width: int, count: int) -> np.ndarray:
        """Return at least `count` further rows of a table, with shape (rows, width).

        Rows of other tables are skipped.
        """
        values = np.empty(0)
        while len(values) < count * width:
            message = await self.receive()
            if isinstance(message, RowsFrame) and message.number == number:
                values = np.append(values, message.values)
        return values.reshape(-1, width)

    async def text(self, length: int) -> str:
        """Return at least `length` further characters of text."""
        text = ""
        while len(text) < length:
            message = await self.receive()
            assert not isinstance(message, Closed), message
            if isinstance(message, TextMessage):
                text += message.text
        return text

    async def status(self, wanted: str) -> StateMessage:
        """Return the next state with this status."""
        while True:
            message = await self.receive()
            assert not isinstance(message, Closed), message
            if isinstance(message, StateMessage) and message.state.status == wanted:
                return message

    async def table(self) -> TableMessage:
        """Return the next table."""
        while not isinstance(message := await self.receive(), TableMessage):
            assert not isinstance(message, Closed), message
        return message

    async def send(self, message: str | bytes) -> None:
        await self._connection.write_message(message, binary=isinstance(message, bytes))

    async def end(self) -> int | None:
        """Return the code with which the server closes the socket."""
        while not isinstance(message := await self.receive(), Closed):
            pass
        return message.code

    async def close(self) -> None:
        self._connection.close()
        await self.end()
