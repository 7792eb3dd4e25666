"""Sockets of runs, opened at a real Jupyter server as by a browser."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import numpy as np
import psutil
import pytest
from tornado.httpclient import HTTPClientError
from tornado.websocket import WebSocketClosedError

from nbdist.records import (
    BAD_MESSAGE,
    NO_SUCH_RUN,
    RUN_IS_GONE,
    UNREADABLE_RUN,
    Columns,
    Output,
    RequestStack,
    StackMessage,
    StateMessage,
    StopRun,
    Table,
    TableMessage,
    TextMessage,
)
from nbdist.telemetry.output_logs import LOG_FOLDER, OutputLogs
from nbdist.telemetry.tail import FRAME_BYTES
from tests.runs import LOSS, loss, losses, new_run, rows, writing_process
from tests.server.jupyter import TOKEN, JupyterServer, RowsFrame
from tests.telemetry.test_stacks import position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.processes

TABS = 20
NOTICED_S = 30.0
STOP = msgspec.json.encode(StopRun()).decode()


# Workers of a cluster that a browser follows.


def test_text_of_all_cells_of_a_worker_is_sent(server: JupyterServer) -> None:
    folder = server.clusters / "0123456789ab"
    (folder / LOG_FOLDER).mkdir(parents=True)
    logs = OutputLogs(folder / LOG_FOLDER)
    logs.begin(1, "Cell 3, 20:27")

    async def watch() -> None:
        async with server.watch(f"{folder.name}/workers/1", of="clusters") as page:
            assert await page.history() == []
            logs.take(Output(rank=1, cell=1, stream="stdout", text="grün\n"))
            logs.flush()
            expected = "── Cell 3, 20:27 ──\ngrün\n"
            assert await page.text(len(expected)) == expected
            logs.close()
            shutil.rmtree(folder)
            assert await page.end() == RUN_IS_GONE
        async with server.watch(f"{folder.name}/workers/1", of="clusters") as page:
            assert await page.end() == NO_SUCH_RUN

    asyncio.run(watch())


def test_log_of_a_worker_accepts_no_messages_and_no_other_folder(server: JupyterServer) -> None:
    folder = server.clusters / "0123456789ac"
    (folder / LOG_FOLDER).mkdir(parents=True)
    (server.clusters / "0123456789ad").symlink_to(folder)

    async def watch() -> None:
        async with server.watch(f"{folder.name}/workers/1", of="clusters") as page:
            await page.send(STOP)
            assert await page.end() == BAD_MESSAGE
        for other in ("0123456789ad", "..", quote("../nbdist", safe="")):
            async with server.watch(f"{other}/workers/1", of="clusters") as page:
                assert await page.end() == NO_SUCH_RUN
        with pytest.raises(HTTPClientError, match="403"):
            async with server.watch(f"{folder.name}/workers/1", token="wrong", of="clusters"):
                pass

    asyncio.run(watch())


# Runs that a browser follows.


def test_a_run_is_sent_from_its_start_and_continues(server: JupyterServer) -> None:
    run = new_run(server.runs)
    run.take(losses(1, 3))
    run.flush()

    async def watch() -> None:
        async with server.watch(run.state.id) as tab:
            state, table, history = await tab.history()
            assert state == StateMessage(state=run.state)
            assert isinstance(table, TableMessage)
            assert table.table.columns == LOSS
            assert isinstance(history, RowsFrame)
            np.testing.assert_array_equal(history.values.reshape(3, 5)[:, 4], [1, 2, 3])
            run.take(losses(4, 5))
            run.flush()
            np.testing.assert_array_equal((await tab.rows(0, 5, 2))[:, 4], [4, 5])
            run.take(rows([[0, 1, 6, 0.6, 7, 8]], Columns(own=("loss", "late"))))
            run.flush()
            assert (await tab.table()).table.columns.own == ("loss", "late")
            np.testing.assert_array_equal(await tab.rows(1, 6, 1), [[0, 1, 6, 0.6, 7, 8]])
            run.update(status="finished", ended=run.state.began + 1)
            assert (await tab.status("finished")).state == run.state

    asyncio.run(watch())
    run.close()


def test_a_run_without_reports_is_caught_up(server: JupyterServer) -> None:
    run = new_run(server.runs)

    async def watch() -> None:
        async with server.watch(run.state.id) as tab:
            assert await tab.history() == [StateMessage(state=run.state)]

    asyncio.run(watch())
    run.close()


def test_a_long_history_is_sent_in_frames(server: JupyterServer) -> None:
    run = new_run(server.runs, status="finished")
    for first in range(1, 120_001, 10_000):
        run.take(losses(first, first + 9_999))
    run.close()

    async def watch() -> list[RowsFrame]:
        async with server.watch(run.state.id) as tab:
            return [message for message in await tab.history() if isinstance(message, RowsFrame)]

    frames = asyncio.run(watch())
    assert len(frames) > 1
    assert max(frame.size_bytes for frame in frames) <= FRAME_BYTES
    whole = np.concatenate([frame.values for frame in frames]).reshape(-1, 5)
    np.testing.assert_array_equal(whole[:, 2], np.arange(1, 120_001))


def test_text_is_sent_from_its_start_and_continues(server: JupyterServer) -> None:
    run = new_run(server.runs)
    run.take(losses(1, 3))
    run.show("größer\n")
    run.flush()

    async def watch() -> None:
        async with server.watch(run.state.id, query="text=1") as tab:
            assert await tab.history() == [
                StateMessage(state=run.state),
                TableMessage(table=Table(number=0, columns=LOSS)),
                TextMessage(text="größer\n"),
            ]
            run.show("and ")
            assert await tab.text(4) == "and "
            run.update(status="finished", ended=run.state.began + 1)
            await tab.status("finished")
            run.show("after the end\n")
            assert await tab.text(14) == "after the end\n"

    asyncio.run(watch())
    run.close()


def test_text_and_requested_stack_of_a_worker_are_sent(server: JupyterServer) -> None:
    run = new_run(server.runs)
    run.take(Output(rank=1, cell=1, stream="stdout", text="hello\n"))
    run.flush()

    async def watch() -> None:
        async with server.watch(run.state.id, query="rank=1") as tab:
            assert await tab.history() == [
                StateMessage(state=run.state),
                TextMessage(text="hello\n"),
            ]
            await tab.send(msgspec.json.encode(RequestStack(rank=1)))
            await until(lambda: run.stacks.take_requests() == {1})
            run.take(position())
            message = await tab.receive()
            assert isinstance(message, StackMessage)
            assert message.stack.place == position().place

    asyncio.run(watch())
    run.close()


def test_last_text_of_a_discarded_run_is_sent(server: JupyterServer) -> None:
    run = new_run(server.runs)

    async def watch() -> None:
        async with server.watch(run.state.id, query="text=1") as tab:
            await tab.history()
            run.show("bye\n")
            run.discard()
            assert await tab.text(4) == "bye\n"
            assert await tab.end() == RUN_IS_GONE

    asyncio.run(watch())


def test_a_stop_request_reaches_the_run(server: JupyterServer) -> None:
    run = new_run(server.runs)

    async def watch() -> None:
        async with server.watch(run.state.id) as tab:
            await tab.history()
            assert not run.stops_requested()
            await tab.send(STOP)
            await until(run.stops_requested)

    asyncio.run(watch())
    run.close()


def test_a_stop_request_does_not_reach_the_run_of_a_program(server: JupyterServer) -> None:
    run = new_run(server.runs, program="train.py")

    async def watch() -> None:
        async with server.watch(run.state.id) as tab:
            await tab.history()
            await tab.send(STOP)
            await tab.send(msgspec.json.encode(RequestStack(rank=1)))
            await until(lambda: run.stacks.take_requests() == {1})

    asyncio.run(watch())
    assert not run.stops_requested()
    run.close()


async def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + NOTICED_S
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_many_tabs_receive_the_same_rows(server: JupyterServer) -> None:
    run = new_run(server.runs)

    async def watch() -> list[np.ndarray]:
        async with contextlib.AsyncExitStack() as stack:
            tabs = [
                await stack.enter_async_context(server.watch(run.state.id)) for _ in range(TABS)
            ]
            await asyncio.gather(*(tab.history() for tab in tabs))
            for step in range(1, 101):
                run.take(loss(step))
                run.flush()
                await asyncio.sleep(0.001)
            return list(await asyncio.gather(*(tab.rows(0, 5, 100) for tab in tabs)))

    for received in asyncio.run(watch()):
        np.testing.assert_array_equal(received[:, 2], np.arange(1, 101))
    run.close()


def test_a_tab_that_does_not_read_blocks_no_other(server: JupyterServer) -> None:
    """The server neither waits for the tab nor keeps its messages in memory."""
    run = new_run(server.runs)
    for first in range(1, 400_001, 20_000):
        run.take(losses(first, first + 19_999))
    run.flush()
    history_bytes = 400_000 * 40
    process = psutil.Process(server.process.pid)

    async def watch() -> int:
        before: int = process.memory_info().rss
        async with contextlib.AsyncExitStack() as stack:
            tabs = [
                await stack.enter_async_context(server.watch(run.state.id)) for _ in range(TABS)
            ]
            received_bytes = sum(
                m.size_bytes for m in await tabs[0].history() if isinstance(m, RowsFrame)
            )
            grown: int = process.memory_info().rss - before
            later = sum(m.size_bytes for m in await tabs[1].history() if isinstance(m, RowsFrame))
        assert received_bytes == later > history_bytes
        return grown

    assert asyncio.run(watch()) < TABS * history_bytes / 4
    run.close()


# Runs that end without notice.


def test_a_run_deleted_while_it_is_followed_closes_its_socket(server: JupyterServer) -> None:
    run = new_run(server.runs)
    run.take(loss(1))
    run.flush()

    async def watch() -> int | None:
        async with server.watch(run.state.id) as tab:
            await tab.history()
            shutil.rmtree(run.path)
            return await tab.end()

    assert asyncio.run(watch()) == RUN_IS_GONE
    run.close()


BEGIN_AND_WAIT = """
run = new_run(root)
run.take(losses(1, 2))
run.flush()
print(run.state.id, flush=True)
time.sleep(600)
"""


def test_a_run_of_a_dead_kernel_is_lost(server: JupyterServer) -> None:
    with writing_process(BEGIN_AND_WAIT, server.runs) as process:
        assert process.stdout
        name = process.stdout.readline().strip()

        async def watch() -> float:
            async with server.watch(name) as tab:
                await tab.history()
                killed = time.monotonic()
                process.kill()
                state = (await tab.status("lost")).state
                assert state.ended >= state.began
                return time.monotonic() - killed

        assert asyncio.run(watch()) < NOTICED_S


# Refused requests.


def refusal(
    server: JupyterServer, run_id: str, token: str = TOKEN, headers: dict[str, str] | None = None
) -> int:
    """Return the HTTP status of a socket that the server refuses to open."""

    async def watch() -> None:
        async with server.watch(run_id, token, headers):
            pass

    with pytest.raises(HTTPClientError) as refused:
        asyncio.run(watch())
    return refused.value.code


def ending(server: JupyterServer, run_id: str, messages: Sequence[str | bytes] = ()) -> int | None:
    """Send messages and return the code with which the server closes the socket.

    The server may close it before the last message is sent.
    """

    async def watch() -> int | None:
        async with server.watch(run_id) as tab:
            with contextlib.suppress(WebSocketClosedError):
                for message in messages:
                    await tab.send(message)
            return await tab.end()

    return asyncio.run(watch())


def test_sockets_without_the_token_are_refused(server: JupyterServer) -> None:
    run = new_run(server.runs)
    assert refusal(server, run.state.id, token="wrong") == 403
    assert refusal(server, run.state.id, token="") == 403
    run.close()


def test_the_cookie_is_accepted_from_own_pages_only(server: JupyterServer) -> None:
    run = new_run(server.runs)
    cookie = server.login()
    ours = {"Cookie": cookie, "Origin": f"http://{server.at}"}
    theirs = {"Cookie": cookie, "Origin": "http://elsewhere.example"}

    async def watch() -> None:
        async with server.watch(run.state.id, headers=ours) as tab:
            assert await tab.history() == [StateMessage(state=run.state)]

    asyncio.run(watch())
    assert refusal(server, run.state.id, headers=theirs) == 403
    run.close()


@pytest.mark.parametrize(
    "name",
    ["20260101-000000-abcdef", "nothing", "..", quote("../../etc", safe=""), "%00", "x" * 500],
)
def test_a_missing_run_closes_the_socket(server: JupyterServer, name: str) -> None:
    assert ending(server, name) == NO_SUCH_RUN


def test_a_path_out_of_the_runs_folder_is_not_found(server: JupyterServer) -> None:
    assert refusal(server, "../../etc") == 404


def test_a_link_out_of_the_runs_folder_is_refused(server: JupyterServer, tmp_path: Path) -> None:
    outside = new_run(tmp_path)
    server.runs.mkdir(exist_ok=True)
    (server.runs / outside.state.id).symlink_to(outside.path)
    assert ending(server, outside.state.id) == NO_SUCH_RUN
    outside.close()


MOST_REASON_BYTES = 123  # RFC 6455, 5.5: a control frame has 125 bytes, of which the code takes 2


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"version": 99}', "nbdist wrote its run.json: it has version 99, and this nbdist reads"),
        (b'{"id": 3}', "another version of nbdist wrote its run.json: Expected `str`, got `int`"),
        (b'{"id": "\xff"}', "or the file is damaged: 'utf-8' codec can't decode byte 0xff"),
        (b"", "another version of nbdist wrote its run.json, or the file is damaged: Input data"),
        (b'{"status": "' + 200 * "ß".encode() + b'"}', "wrote its run.json: Invalid enum value"),
    ],
)
def test_a_run_that_cannot_be_read_closes_the_socket_with_the_reason(
    server: JupyterServer, content: bytes, reason: str, text: bool
) -> None:
    run = new_run(server.runs)
    (run.path / "run.json").write_bytes(content)

    async def watch() -> tuple[int | None, str]:
        async with server.watch(run.state.id, query="text=1" if text else "") as tab:
            return await tab.end(), tab._connection.close_reason or ""

    code, received = asyncio.run(watch())
    assert code == UNREADABLE_RUN != NO_SUCH_RUN
    assert reason in received
    assert len(received.encode()) <= MOST_REASON_BYTES
    run.close()
    run.discard()


@pytest.mark.parametrize("message", ["", "stop", '{"type": "Start"}', b"\x00\xff", '["StopRun"]'])
def test_an_invalid_message_closes_the_socket(server: JupyterServer, message: str | bytes) -> None:
    run = new_run(server.runs)
    assert ending(server, run.state.id, [message, STOP]) == BAD_MESSAGE
    assert not run.stops_requested()
    run.close()


def test_a_message_that_is_too_long_closes_the_socket(server: JupyterServer) -> None:
    run = new_run(server.runs)
    assert ending(server, run.state.id, [STOP[:-1] + " " * 1024 + "}"]) == 1009
    assert not run.stops_requested()
    run.close()
