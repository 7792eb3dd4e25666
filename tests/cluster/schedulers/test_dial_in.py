"""Hosts that dial in: which connections and orders host and notebook accept."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import asyncssh
import msgspec
import pytest

import nbdist
from nbdist.cluster.schedulers.dial_in import END, WHO, task_of
from nbdist.records import DialedHost, DialInTicket
from nbdist.utils.polling import repeat_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.processes

LOOPBACK = "127.0.0.1"
BOUND_S = 20.0
FOREIGN = (
    "/run/docker.sock",
    "/tmp/x",
    "/tmp/nbdist-abc-1/../x",
    "/tmp/nbdist-abc-1/a/b",
    "/tmp/nbdist-abd-1/x",
)
"""Paths of sockets outside the folders of the cluster."""


@pytest.fixture
def keys() -> tuple[asyncssh.SSHKey, asyncssh.SSHKey]:
    """Return the keys of the host and of the owner that may send it commands."""
    return asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key(
        "ssh-ed25519"
    )


def dial_in_with_command(
    folder: Path,
    keys: tuple[asyncssh.SSHKey, asyncssh.SSHKey],
    command: Callable[[asyncssh.SSHClientConnection], Awaitable[None]],
    key: asyncssh.SSHKey | None = None,
) -> list[BaseException]:
    """Let a host dial in and send it a command. Returns the errors of failed connections."""
    host, owner = keys
    faults: list[BaseException] = []

    async def listen() -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def accept(connection: asyncssh.SSHClientConnection) -> None:
            try:
                try:
                    await command(connection)
                finally:
                    connection.abort()
                    await connection.wait_closed()  # before the event loop ends
                over.set_result(None)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                over.set_exception(error)

        def fail(_connection: object, error: BaseException) -> None:
            faults.append(error)
            if not over.done():
                over.set_result(None)

        acceptor = await asyncssh.listen_reverse(
            LOOPBACK,
            0,
            config=None,
            acceptor=accept,
            error_handler=fail,
            known_hosts=([host.convert_to_public()], [], []),
            client_keys=[key or owner],
            agent_path=None,
            username="nbdist",
        )
        calling = DialInTicket(
            address=LOOPBACK,
            port=acceptor.get_port(),
            key=host.export_private_key("openssh").decode(),
            trusted=owner.export_public_key("openssh").decode(),
            cluster="abc",
            job=7,
        )
        (folder / "calling").write_bytes(msgspec.json.encode(calling))
        program = [
            sys.executable,
            "-m",
            "nbdist.cluster.schedulers.dial_in",
            str(folder / "calling"),
            "3",
        ]
        process = await asyncio.create_subprocess_exec(*program)
        try:
            await asyncio.wait_for(over, BOUND_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            acceptor.close()

    asyncio.run(listen())
    return faults


def test_a_host_identifies_itself_and_refuses_other_requests(
    tmp_path: Path, keys: tuple[asyncssh.SSHKey, asyncssh.SSHKey]
) -> None:
    listener = tmp_path / "theirs"

    async def run_commands(connection: asyncssh.SSHClientConnection) -> None:
        reply = await connection.run(WHO, encoding=None)
        host = msgspec.json.decode(reply.stdout or b"", type=DialedHost)
        assert (host.job, host.task) == (7, 3)
        for command in ("id", "who; id", "", f"{WHO} ", "python -c pass", f"touch {listener}"):
            done = await connection.run(command)
            assert (done.exit_status, done.stdout) == (1, ""), command
        for path in (
            "/run/docker.sock",
            "/tmp/x",
            "/tmp/nbdist-abc-1/../x",
            "/tmp/nbdist-abc-1/a/b",
            "/tmp/nbdist-abd-1/x",
        ):
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_unix_connection(path)
            with pytest.raises(asyncssh.ChannelListenError):
                await connection.forward_remote_path_to_port(path, LOOPBACK, 1)
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.open_connection(LOOPBACK, 22)
        with pytest.raises(asyncssh.ChannelListenError):
            await connection.forward_remote_port("", 0, LOOPBACK, 22)
        with pytest.raises(asyncssh.Error):
            await connection.start_sftp_client()

    assert dial_in_with_command(tmp_path, keys, run_commands) == []
    assert not listener.exists()


def test_a_host_refuses_an_unknown_key(
    tmp_path: Path, keys: tuple[asyncssh.SSHKey, asyncssh.SSHKey]
) -> None:
    async def command(connection: asyncssh.SSHClientConnection) -> None:
        raise AssertionError("the host accepted an unknown key")

    (fault,) = dial_in_with_command(
        tmp_path, keys, command, asyncssh.generate_private_key("ssh-ed25519")
    )
    assert isinstance(fault, asyncssh.PermissionDenied)


def test_a_host_ends_on_request(
    tmp_path: Path, keys: tuple[asyncssh.SSHKey, asyncssh.SSHKey]
) -> None:
    async def command(connection: asyncssh.SSHClientConnection) -> None:
        assert (await connection.run(END)).exit_status == 0
        await asyncio.wait_for(connection.wait_closed(), 5)

    assert dial_in_with_command(tmp_path, keys, command) == []


def test_a_host_gives_up_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbdist.cluster.schedulers import dial_in

    monkeypatch.setattr(dial_in, "PATIENCE_S", 0.5)
    key = asyncssh.generate_private_key("ssh-ed25519")
    calling = DialInTicket(
        address=LOOPBACK,
        port=9,
        key=key.export_private_key("openssh").decode(),
        trusted=key.export_public_key("openssh").decode(),
        cluster="abc",
        job=1,
    )

    async def serve() -> str:
        return await dial_in._Host(calling, 0).serve()

    reason = asyncio.run(serve())
    assert reason.startswith("127.0.0.1:9 cannot be reached: [Errno 111]")


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"PMI_RANK": "5", "SLURM_PROCID": "5"}, 5),
        ({"JOB_COMPLETION_INDEX": "4"}, 4),
        ({"SGE_TASK_ID": "1"}, 0),
        ({"SGE_TASK_ID": "undefined"}, 0),
        ({"PBS_ARRAY_INDEX": "8"}, 7),
        ({"LSB_JOBINDEX": "2"}, 1),
    ],
)
def test_task_number_is_read_from_the_environment(environment: dict[str, str], task: int) -> None:
    assert task_of(environment) == task


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[nbdist.Cluster]:
    if shutil.which("mpiexec") is None:
        pytest.skip("mpiexec not installed (openmpi-bin)")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    batch = nbdist.Batch(launcher="mpi", listen=LOOPBACK, options=("--oversubscribe",))
    with nbdist.Cluster(1, batch=batch, framework="none") as cluster:
        yield cluster


@pytest.mark.usefixtures("own_folders")
@pytest.mark.parametrize("has_key", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_process_without_key_or_job_is_not_accepted(
    tmp_path: Path, cluster: nbdist.Cluster, *, has_key: bool
) -> None:
    """A stranger without the hosts' key receives no response.

    One with the key must belong to a job.
    """
    (file,) = cluster._folder.glob("job-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    calling = msgspec.json.decode(file.read_bytes(), type=DialInTicket)
    own = asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh").decode()
    changes = {"job": 99} if has_key else {"key": own}
    stranger = tmp_path / "stranger"
    stranger.write_bytes(msgspec.json.encode(msgspec.structs.replace(calling, **changes)))
    program = [sys.executable, "-m", "nbdist.cluster.schedulers.dial_in", str(stranger)]
    process = subprocess.Popen(program, stderr=subprocess.PIPE)
    try:
        if has_key:
            assert process.wait(BOUND_S) == 0, "the notebook did not dismiss it"
        else:
            assert not repeat_until(lambda: process.poll() is not None, 3), (
                "the notebook responded to it"
            )
        assert cluster.run("rank").results == {0: "0"}
    finally:
        process.kill()
        process.communicate()
