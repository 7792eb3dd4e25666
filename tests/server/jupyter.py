"""A real Jupyter server with our extension, and a browser's end of its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "of-the-tests"
TIMEOUT_S = 60
BASE = "user/somebody"  # as under JupyterHub


class JupyterServer:
    """In a process of its own, on loopback.

    Args:
        folder: for all its files.
        app: the module that is run: `jupyter_server`, `jupyterlab` or `notebook`.
        extra: further arguments of it.

    Attributes:
        at: host and port.
        runs: the folder of the runs.
        clusters: where clusters keep their files.
        home: the folder of the notebooks.
        process: the server's.
        log: file with the output of the server.
    """

    def __init__(
        self, folder: Path, app: str = "jupyter_server", extra: tuple[str, ...] = ()
    ) -> None:
        self.home = folder / "home"
        self.runs = folder / "runs"
        self.clusters = folder / "runtime" / "nbdist"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.at = f"127.0.0.1:{free.getsockname()[1]}"
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
        self._environment = {
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "NBDIST_RUNS_FOLDER": str(self.runs),
            "PYTHONPATH": str(Path(__file__).parents[2]),
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
        """Start it, again at the same address, and wait until it answers."""
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
        """End it, and with it the kernels."""
        self.process.terminate()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str, token: str = TOKEN, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of the answer."""
        request = urllib.request.Request(
            f"http://{self.at}/{BASE}/{path}",
            headers={"Authorization": f"token {token}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def login(self) -> str:
        """The cookies of a browser that came with the token."""
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
        text: bool = False,
    ) -> AsyncIterator[Watcher]:
        """A socket on the run, or on its text; with `headers`, these say who asks.

        Raises:
            tornado.httpclient.HTTPClientError: it was refused.
        """
        headers = headers or {"Authorization": f"token {token}"}
        url = f"ws://{self.at}/{BASE}/nbdist/runs/{run_id}/live{'?text=1' if text else ''}"
        watcher = Watcher(await websocket_connect(HTTPRequest(url, headers=headers)))
        try:
            yield watcher
        finally:
            await watcher.close()


@dataclass(frozen=True)
class RowsFrame:
    """A binary message: rows of table `number`, one after the other."""

    number: int
    values: np.ndarray
    size_bytes: int


@dataclass(frozen=True)
class Closed:
    code: int | None


Heard = AnyServerMessage | RowsFrame | Closed


class Watcher:
    """What a browser that watches a run hears."""

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self._closed: Closed | None = None

    async def hear(self) -> Heard:
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

    async def past(self) -> list[Heard]:
        """All up to `CaughtUp`, without it."""
        heard: list[Heard] = []
        while not isinstance(message := await self.hear(), CaughtUp):
            assert not isinstance(message, Closed), message
            heard.append(message)
        return heard

    async def rows(self, number: int, width: int, count: int) -> np.ndarray:
        """The next `count` rows of a table or more: shape (rows, width)."""
        values = np.empty(0)
        while len(values) < count * width:
            message = await self.hear()
            if isinstance(message, RowsFrame):
                assert message.number == number
                values = np.append(values, message.values)
        return values.reshape(-1, width)

    async def text(self, length: int) -> str:
        """The next `length` characters of text or more."""
        text = ""
        while len(text) < length:
            message = await self.hear()
            assert not isinstance(message, Closed), message
            if isinstance(message, TextMessage):
                text += message.text
        return text

    async def status(self, wanted: str) -> StateMessage:
        """The next state of that status."""
        while True:
            message = await self.hear()
            assert not isinstance(message, Closed), message
            if isinstance(message, StateMessage) and message.state.status == wanted:
                return message

    async def table(self) -> TableMessage:
        """The next table."""
        while not isinstance(message := await self.hear(), TableMessage):
            assert not isinstance(message, Closed), message
        return message

    async def say(self, message: str | bytes) -> None:
        await self._connection.write_message(message, binary=isinstance(message, bytes))

    async def end(self) -> int | None:
        """The code with which the server closes the socket."""
        while not isinstance(message := await self.hear(), Closed):
            pass
        return message.code

    async def close(self) -> None:
        self._connection.close()
        await self.end()
