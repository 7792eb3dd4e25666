"""Table of runs, edits and deletion, requested from a real Jupyter server as by a browser."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import pytest
from tornado.httpclient import HTTPClientError

import nbdist
from nbdist.jobs import submission
from nbdist.records import (
    Annotations,
    Media,
    ProgramJob,
    RunCurve,
    RunList,
    RunTable,
    Text,
    Writer,
)
from nbdist.telemetry.annotations import MOST_BYTES, annotate, read_annotations
from nbdist.telemetry.run_reader import find
from nbdist.telemetry.run_writer import STOP_FILE
from nbdist.telemetry.tail import States
from nbdist.utils.files import replace_file
from nbdist.utils.polling import repeat_until
from tests.runs import losses, new_run
from tests.server.jupyter import BASE, TOKEN, JupyterServer, response

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.telemetry.run_writer import RunDirectory

pytestmark = pytest.mark.processes

LIMIT_S = 30
OUTSIDE = ("..", quote("../../etc", safe=""), "%00", "20260101-000000-abcdef%0a", "other")


@pytest.fixture
def run(server: JupyterServer) -> Iterator[RunDirectory]:
    """Provide an ended run of three steps."""
    created = new_run(server.runs, status="finished")
    created.take(losses(1, 3))
    created.close()
    yield created
    created.discard()


def ask(
    server: JupyterServer,
    path: str,
    method: str = "GET",
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """Send a request, with the token unless there are other headers."""
    request = urllib.request.Request(
        f"http://{server.at}/{BASE}/nbdist/runs/{path}",
        data=body,
        headers=headers or {"Authorization": f"token {TOKEN}"},
        method=method,
    )
    return response(request)


def edit(server: JupyterServer, run: RunDirectory, changes: object) -> tuple[int, bytes]:
    return ask(server, run.state.id, "PATCH", json.dumps(changes).encode())


def test_all_runs_are_rows(server: JupyterServer, run: RunDirectory) -> None:
    status, body = ask(server, "table")
    assert status == 200
    (row,) = msgspec.json.decode(body, type=RunTable).rows
    assert (row.state.id, row.metrics, row.step) == (run.state.id, {"loss": 3.0}, 3)


def test_edits_are_stored_and_returned(server: JupyterServer, run: RunDirectory) -> None:
    status, body = edit(server, run, {"name": "best", "tags": ["a"], "pinned": True})
    assert status == 200
    expected = Annotations(name="best", tags=("a",), pinned=True)
    assert msgspec.json.decode(body, type=Annotations) == expected
    assert read_annotations(run.path) == expected


def test_a_new_name_is_that_of_the_panel_and_of_the_run_view(
    server: JupyterServer, run: RunDirectory
) -> None:
    edit(server, run, {"name": "best"})
    (listed,) = msgspec.json.decode(ask(server, "")[1], type=RunList).runs
    assert listed.name == "best"
    (first, *_) = States(find(server.runs, run.state.id)).news()
    assert json.loads(first)["state"]["name"] == "best"


@pytest.mark.parametrize("changes", [{"path": "x"}, {"tags": "a"}, ["a"], 1, {"note": 3}])
def test_invalid_edits_are_refused(
    server: JupyterServer, run: RunDirectory, changes: object
) -> None:
    assert edit(server, run, changes)[0] == 400
    assert ask(server, run.state.id, "PATCH", b'{"name": "\xff"}')[0] == 400
    assert ask(server, run.state.id, "PATCH", b" " * (MOST_BYTES + 1))[0] == 413
    assert read_annotations(run.path) == Annotations()


def test_an_ended_run_is_deleted(server: JupyterServer, run: RunDirectory) -> None:
    assert ask(server, run.state.id, "DELETE") == (204, b"")
    assert not run.path.exists()
    assert ask(server, run.state.id, "DELETE")[0] == 404


def test_an_active_run_is_not_deleted(server: JupyterServer) -> None:
    active = new_run(server.runs)
    assert ask(server, active.state.id, "DELETE")[0] == 409
    assert active.path.exists()
    active.discard()


def test_cells_and_curves_are_read(server: JupyterServer, run: RunDirectory) -> None:
    status, cells = ask(server, f"{run.state.id}/cells")
    assert (status, cells) == (200, b"# %% [3] %%dist_run --data train\n")
    status, body = ask(server, f"{run.state.id}/curve?metric=loss")
    assert (status, msgspec.json.decode(body, type=RunCurve).y) == (200, (1, 2, 3))
    assert ask(server, f"{run.state.id}/curve?metric=accuracy")[0] == 404
    assert ask(server, f"{run.state.id}/curve")[0] == 400


@pytest.mark.parametrize("name", OUTSIDE)
def test_ids_that_leave_the_folder_are_not_found(
    server: JupyterServer, run: RunDirectory, name: str
) -> None:
    assert ask(server, name, "PATCH", b'{"name": "x"}')[0] in (404, 405)
    assert ask(server, name, "DELETE")[0] in (404, 405)
    for path in ("cells", "curve?metric=loss"):
        assert ask(server, f"{name}/{path}")[0] == 404
    assert run.path.exists()


def test_a_link_out_of_the_folder_is_refused(
    server: JupyterServer, run: RunDirectory, tmp_path: Path
) -> None:
    outside = new_run(tmp_path, status="finished")
    outside.close()
    (server.runs / outside.state.id).symlink_to(outside.path)
    assert ask(server, outside.state.id, "DELETE")[0] == 404
    assert ask(server, outside.state.id, "PATCH", b'{"name": "x"}')[0] == 404
    assert read_annotations(outside.path) == Annotations()
    assert run.state.id in ask(server, "table")[1].decode()
    assert outside.state.id not in ask(server, "table")[1].decode()
    (server.runs / outside.state.id).unlink()


def test_requests_need_the_token_and_writes_an_xsrf_token(
    server: JupyterServer, run: RunDirectory
) -> None:
    wrong = {"Authorization": "token wrong"}
    for path in ("table", f"{run.state.id}/cells", f"{run.state.id}/curve?metric=loss"):
        assert ask(server, path, headers=wrong)[0] == 403
    cookies = {"Cookie": server.login()}
    assert ask(server, "table", headers=cookies)[0] == 200
    for headers in (wrong, cookies):
        assert ask(server, run.state.id, "PATCH", b'{"name": "x"}', headers)[0] == 403
        assert ask(server, run.state.id, "DELETE", headers=headers)[0] == 403
        assert ask(server, f"{run.state.id}/stop", "POST", b"", headers)[0] == 403
    assert read_annotations(run.path) == Annotations()
    token = "0123456789abcdef" * 2
    with_token = {"Cookie": f"{server.login()}; _xsrf={token}", "X-XSRFToken": token}
    assert ask(server, run.state.id, "PATCH", b'{"name": "x"}', with_token)[0] == 200
    assert ask(server, f"{run.state.id}/stop", "POST", b"", with_token)[0] == 409  # it has no job
    annotate(run.path, {"name": ""})


def test_a_content_of_media_is_sent_by_its_number(server: JupyterServer, run: RunDirectory) -> None:
    reported = new_run(server.runs)
    reported.take(
        Media(rank=0, cell=1, name="note", epoch=-1, step=1, time_s=0.1, content=Text(text="hello"))
    )
    assert ask(server, f"{reported.state.id}/media/0") == (200, b'{"type":"text","text":"hello"}')
    assert ask(server, f"{reported.state.id}/media/1")[0] == 404
    assert ask(server, f"{run.state.id}/media/0")[0] == 404
    for outside in OUTSIDE:
        assert ask(server, f"{outside}/media/0")[0] == 404
    assert ask(server, f"{reported.state.id}/media/0", headers={"Accept": "*/*"})[0] == 403
    reported.discard()


READER = """
from jupyter_server.auth import Authorizer
class Reader(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return action == "read"
c.ServerApp.authorizer_class = Reader
"""
"""Configuration of a server whose users may only read."""


def test_stop_needs_the_permission_to_execute(tmp_path: Path) -> None:
    config = tmp_path / "config" / "jupyter_server_config.py"
    config.parent.mkdir()
    config.write_text(READER)
    with JupyterServer(tmp_path) as server:
        run = new_run(server.runs, program="train.py")
        path = run.state.id
        assert ask(server, "table")[0] == 200
        assert ask(server, f"{path}/stop", "POST", b"")[0] == 403
        assert ask(server, path, "DELETE")[0] == 403

        async def watch() -> None:
            async with server.watch(path):
                raise AssertionError("the socket accepts requests to stop")

        with pytest.raises(HTTPClientError, match="403"):
            asyncio.run(watch())
        run.discard()


WAITING = """
trap 'echo asked; exit 75' TERM
echo begun
while :; do sleep 0.05; done
"""
"""Program that waits for SIGTERM."""


def test_stop_cancels_the_job_of_a_run(server: JupyterServer, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(WAITING)
    run = new_run(server.runs, program="train.py", job_folder=str(tmp_path))
    job = submission.start(tmp_path, "local", (), {}, server.runs)
    assert repeat_until(lambda: submission.output(job, tmp_path) == "begun\n", LIMIT_S)
    stop = f"{run.state.id}/stop"
    assert ask(server, stop, "POST", b"", headers={"Authorization": "token x"})[0] == 403
    run.update(job="another")
    status, body = ask(server, stop, "POST", b"")
    assert (status, json.loads(body)["message"]) == (409, f"{tmp_path} contains another job")
    assert submission.state_of(job, tmp_path).status == "running"
    run.update(job=job.id)
    assert ask(server, stop, "POST", b"")[0] == 204
    assert run.stops_requested() == 1
    assert repeat_until(lambda: submission.state_of(job, tmp_path).is_over, LIMIT_S)
    assert submission.state_of(job, tmp_path).status == "stopped"
    assert submission.output(job, tmp_path) == "begun\nasked\n"
    assert ask(server, stop, "POST", b"")[0] == 204  # it has ended
    run.discard()


SCANCEL = '#!/bin/sh\nwc -c <"{stop}" >"{folder}/seen"\n'
"""Double of `scancel`: it stores the number of stop requests of the run."""


@pytest.mark.full  # rare
def test_stop_is_stored_before_the_job_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    job = ProgramJob(id="a", launcher="slurm", number="7", process=None, submitted=0.0, runs="")
    replace_file(tmp_path / "job.json", msgspec.json.encode(job), 0o644)
    with JupyterServer(tmp_path) as server:
        run = new_run(server.runs, program="train.py", job="a", job_folder=str(tmp_path))
        text = SCANCEL.format(stop=run.path / STOP_FILE, folder=tmp_path)
        (tmp_path / "scancel").write_text(text)
        (tmp_path / "scancel").chmod(0o755)
        assert ask(server, f"{run.state.id}/stop", "POST", b"")[0] == 204
        assert (tmp_path / "seen").read_text() == "1\n"
        run.discard()


def test_stop_cancels_a_job_if_it_cannot_be_stored_in_the_run(
    server: JupyterServer, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(WAITING)
    run = new_run(server.runs, program="train.py", job_folder=str(tmp_path))
    job = submission.start(tmp_path, "local", (), {}, server.runs)
    run.update(job=job.id)
    (run.path / STOP_FILE).mkdir()
    assert ask(server, f"{run.state.id}/stop", "POST", b"")[0] == 204
    assert nbdist.job(tmp_path).wait(LIMIT_S) == "stopped"
    run.discard()


def test_stop_is_withdrawn_if_slurm_does_not_cancel_the_job(
    server: JupyterServer, tmp_path: Path
) -> None:
    job = ProgramJob(
        id="a", launcher="slurm", number="none", process=None, submitted=0.0, runs=str(server.runs)
    )
    replace_file(tmp_path / "job.json", msgspec.json.encode(job), 0o644)
    run = new_run(server.runs, program="train.py", job="a", job_folder=str(tmp_path))
    status, body = ask(server, f"{run.state.id}/stop", "POST", b"")
    assert status == 409, body
    assert run.stops_requested() == 0
    run.discard()


def test_stop_of_a_run_without_a_reachable_job_is_refused(
    server: JupyterServer, tmp_path: Path
) -> None:
    other = Writer(host="gpu1", pid=1, started=1.0)
    job = ProgramJob(
        id="a", launcher="local", number="", process=other, submitted=0.0, runs=str(server.runs)
    )
    replace_file(tmp_path / "job.json", msgspec.json.encode(job), 0o644)
    run = new_run(server.runs, program="train.py")
    for folder, reason in (
        ("", "the program is no submitted job: stop it where it was started"),
        (str(tmp_path), "the job was started on gpu1: cancel it there"),
        (str(tmp_path / "gone"), "contains no submitted job"),
    ):
        run.update(job="a", job_folder=folder)
        status, body = ask(server, f"{run.state.id}/stop", "POST", b"")
        assert status == 409
        assert reason in json.loads(body)["message"]
    assert run.stops_requested() == 0
    for name in OUTSIDE:
        assert ask(server, f"{name}/stop", "POST", b"")[0] == 404
    run.discard()
