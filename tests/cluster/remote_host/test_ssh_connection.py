"""Connections over ssh: a host that does not respond."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.remote_host import ssh_connection
from nbdist.cluster.remote_host.ssh_connection import SshConnection
from nbdist.errors import StartError
from nbdist.records import Host

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("host", "config", "command"),
    [
        (Host(name="gpu1"), "", "ssh gpu1"),
        (Host(name="gpu3", user="me", port=2222), "", "ssh -l me -p 2222 gpu3"),
        (Host(name="gpu1"), "/etc/a b", "ssh -F '/etc/a b' gpu1"),
    ],
)
def test_an_unresponsive_host_is_named_with_the_command_to_check_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host, config: str, command: str
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    ssh.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(ssh_connection, "CONNECT_S", -0.9)  # the limit is a second more
    monkeypatch.setattr(ssh_connection, "_END_S", 0.1)
    (tmp_path / "log").mkdir()
    with pytest.raises(StartError) as refused:
        SshConnection(host, tmp_path, "h0", config).open()
    assert str(refused.value).endswith(f" s: check `{command}` in a terminal")
