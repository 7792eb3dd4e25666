"""Hosts from typed text and from inventory files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.cluster import inventory
from nbdist.cluster.remote_host.ssh_connection import SshConnection
from nbdist.errors import UsageError
from nbdist.records import Host, Sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAB = """
[defaults]
python = "~/envs/train/bin/python"
env = {OMP_NUM_THREADS = "4"}

[hosts.gpu1]
devices = 8

[hosts.gpu2]
host = "me@10.0.0.2:2222"
address = "192.168.7.2"
python = "/opt/python"
folder = "/scratch/my runs"
env = {NCCL_SOCKET_IFNAME = "ib0"}

[hosts.gpu3]
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(LAB)
    return path


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["4", "hosts"], None),
        (["4"], None),
        (["04"], None),
        (["four", "hosts"], None),
        (["4", "workers"], None),
        (["4", "Machines"], None),
        (["four", "nodes"], None),
        ([], 4),
        (["hosts"], 4),
        (["workers"], 4),
    ],
)
def test_a_number_means_workers_on_this_machine(words: list[str], number: int | None) -> None:
    assert inventory.choose(words, number) == (Host(),) * 4
    assert inventory.of(4) == (Host(),) * 4


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("gpu1", Host(name="gpu1")),
        ("gpu2:8", Host(name="gpu2", devices=8)),
        ("me@gpu3:2222", Host(name="gpu3", user="me", port=2222)),
        ("me@gpu3:22:4", Host(name="gpu3", user="me", port=22, devices=4)),
        ("gpu3:22:4", Host(name="gpu3", port=22, devices=4)),
        ("a.b-c.example", Host(name="a.b-c.example")),
        ("10.0.0.7", Host(name="10.0.0.7")),
        ("[fe80::1]:2", Host(name="fe80::1", devices=2)),
        ("localhost", Host()),
        ("localhost:2", Host(devices=2)),
        ("me@localhost", Host(name="localhost", user="me")),
    ],
)
def test_a_typed_host_is_parsed(word: str, host: Host) -> None:
    assert inventory.parse_host(word) == host
    assert inventory.choose([word, "localhost"]) == (host, Host())


@pytest.mark.parametrize(
    ("words", "number", "message"),
    [
        ([], None, "no hosts requested"),
        (["hosts"], None, "number of hosts is missing"),
        (["4"], 3, "-n 3 and '4'"),
        (["gpu1"], 3, "-n 3 and 'gpu1'"),
        (["0"], None, "at least 1 host, got 0"),
        (["-3"], None, "at least 1 host, got -3"),
        (["4.5"], None, None),
        (["node"], None, None),
        (["four"], None, None),
        (["workers"], None, "number of hosts is missing"),
        (["4", "wrkers"], None, "'4 wrkers' is neither a number of hosts nor their names"),
        (["4", "5"], None, "'4 5' is neither"),
        (["gpu1", "4"], None, "'gpu1 4' is neither"),
        (["four", "hoosts"], None, "'four hoosts' is neither"),
        (["4hosts"], None, "'4hosts' is neither"),
        (["4:2"], None, "invalid host '4:2'"),
        (["gpu1:0"], None, "need at least 1 device"),
        (["me@gpu1:0"], None, "port 0 is invalid"),
        (["me@gpu1:70000"], None, "port 70000 is invalid"),
        (["me@gpu1:1:2:3"], None, "invalid host"),
        (["@gpu1"], None, "invalid host"),
    ],
)
def test_invalid_hosts_are_reported(
    words: list[str], number: int | None, message: str | None
) -> None:
    if message is None:  # a valid name of a host
        assert inventory.choose(words, number) == (Host(name=words[0]),)
        return
    with pytest.raises(UsageError, match=message):
        inventory.choose(words, number)


HOSTILE = [
    "$(reboot)",
    "`reboot`",
    "gpu1;reboot",
    "gpu1\nreboot",
    "gpu1 reboot",
    "-oProxyCommand=reboot",
    "-oProxyCommand=reboot@gpu1",
    "me@-oProxyCommand=reboot",
    "--",
    "gpu1|reboot",
    "gpu1&",
    "gpu1>f",
    "../gpu1",
    "gpu1\0",
    "'gpu1'",
    "gpü",
]


@pytest.mark.parametrize("word", HOSTILE)
def test_names_with_special_characters_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="invalid host"):
        inventory.parse_host(word)
    if word != "--":
        with pytest.raises(UsageError):
            inventory.choose(["gpu1"], python=word)


@given(st.text())
def test_any_accepted_host_is_one_safe_argument(tmp: str) -> None:
    try:
        host = inventory.parse_host(tmp)
    except UsageError:
        return
    for word in (host.name, host.user):
        assert not word.startswith("-")
        assert all(sign.isascii() and (sign.isalnum() or sign in "._-:") for sign in word)


def test_an_inventory_is_read(lab: Path) -> None:
    gpu1, gpu2, gpu3 = inventory.read(lab)
    assert gpu1 == Host(
        name="gpu1", devices=8, python="~/envs/train/bin/python", env={"OMP_NUM_THREADS": "4"}
    )
    assert (gpu2.key, gpu2.address) == ("me@10.0.0.2:2222", "192.168.7.2")
    assert (gpu2.python, gpu2.folder) == ("/opt/python", "/scratch/my runs")
    assert gpu2.env == {"OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "ib0"}
    assert gpu3.devices == 0


def test_hosts_are_chosen_from_an_inventory(lab: Path) -> None:
    assert [h.name for h in inventory.choose(["2", "hosts"], file=str(lab))] == ["gpu1", "10.0.0.2"]
    assert len(inventory.choose(file=str(lab))) == 3
    assert inventory.choose(["gpu1:2"], file=str(lab))[0].devices == 2
    assert inventory.choose(["gpu1:2"], file=str(lab))[0].python == "~/envs/train/bin/python"
    (gpu2,) = inventory.choose(["gpu2"], file=str(lab))
    assert gpu2.key == "me@10.0.0.2:2222"
    with pytest.raises(UsageError, match=r"host 'gpu9' is not in .* contains gpu1, gpu2, gpu3"):
        inventory.choose(["gpu9"], file=str(lab))
    with pytest.raises(UsageError, match="9 hosts requested, but only 3 are in"):
        inventory.choose(["9"], file=str(lab))


def test_an_inventory_is_chosen_by_name(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    (tmp_path / "nbdist").mkdir()
    (tmp_path / "nbdist" / "lab.toml").write_text(lab.read_text())
    assert len(inventory.choose(profile="lab")) == 3
    with pytest.raises(UsageError, match="use one of lab"):
        inventory.choose(profile="leb")
    with pytest.raises(UsageError, match="use one of lab"):
        inventory.choose(profile="../nbdist/lab")
    with pytest.raises(UsageError, match="exclude each other: use one"):
        inventory.choose(profile="lab", file="hosts.toml")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "no hosts"),
        ("hosts = 3", 1, "no hosts"),
        ("[hosts]\ngpu1 = 3", 2, r"section \[hosts.gpu1\]"),
        ("\n[hosts.gpu1]\ndevises = 3", 3, "unknown key 'devises': use user, port"),
        ("[hosts.gpu1]\ndevices = 0", 2, "whole number from 1"),
        ("[hosts.gpu1]\ndevices = true", 2, "whole number from 1"),
        ("[hosts.gpu1]\nport = 70000", 2, "whole number from 1 to 65535"),
        ("[hosts.gpu1]\npython = 'a b'", 2, "special characters of a shell"),
        ("[hosts.gpu1]\npython = '-c'", 2, "special characters of a shell"),
        ("[hosts.gpu1]\npython = '$(reboot)'", 2, "special characters of a shell"),
        ("[hosts.gpu1]\nuser = '-l'", 2, "special characters of a shell"),
        ("[hosts.gpu1]\naddress = 'a b'", 2, "special characters of a shell"),
        ('[hosts.gpu1]\nfolder = "a\\nb"', 2, "on one line"),
        ("[hosts.gpu1]\nfolder = 3", 2, "text in quotes"),
        ("[hosts.gpu1]\nenv = {A = 3}", 2, 'use {NAME = "value"}'),
        ("[hosts.gpu1]\nenv = {'A=B' = '3'}", 2, 'use {NAME = "value"}'),
        ("[hosts.gpu1]\nenv = 'A'", 2, 'use {NAME = "value"}'),
        ("[hosts.gpu1]\nhost = '-oProxyCommand=reboot'", 2, "invalid host"),
        ("[hosts.gpu1]\nhost = 3", 2, "use a name in quotes"),
        ("[hosts.'gpu1;reboot']", 1, "invalid host 'gpu1;reboot'"),
        ("[defaults]\nhost = 'gpu1'\n[hosts.gpu1]", 2, "unknown key 'host'"),
        ("defaults = 3\n[hosts.gpu1]", 1, r"section \[defaults\]"),
        ("[hosts.gpu1]\n[default]\n", 2, "unknown 'default'"),
        ("sync = 3\n[hosts.gpu1]", 1, r"section \[sync\]"),
        ("[hosts.gpu1]\n[sync]\nfolder = []", 3, "unknown key 'folder': use folders, exclude"),
        ("[hosts.gpu1]\n[sync]\nexclude = '*.bin'", 3, "use a list of texts"),
    ],
)
def test_each_error_of_an_inventory_has_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"hosts\.toml:{line}: .*{message}"):
        inventory.read(path)


def _missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def _not_toml(path: Path) -> None:
    path.write_text("[hosts.gpu1\n")


def _not_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe[hosts]")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_missing, "cannot be read"),
        (_not_toml, "not valid TOML.*line 1"),
        (_not_text, "not valid TOML"),
    ],
)
def test_an_unreadable_inventory_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "hosts.toml"
    make(path)
    with pytest.raises(UsageError, match=message):
        inventory.read(path)


def test_all_errors_of_an_inventory_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("[hosts.gpu1]\ndevices = 0\nport = 0\n[hosts.'-x']\n")
    with pytest.raises(UsageError) as error:
        inventory.read(path)
    assert len(str(error.value).splitlines()) == 3


def test_own_modules_are_chosen_in_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inventory.sync_of() == Sync()
    path = tmp_path / "hosts.toml"
    path.write_text("[hosts.gpu1]\n[sync]\nfolders = ['library']\nexclude = ['*.bin']\n")
    with pytest.raises(UsageError, match=rf"no such folder in \[sync\]: {tmp_path}/library"):
        inventory.sync_of(str(path))
    (tmp_path / "library").mkdir()
    chosen = Sync(folders=(str(tmp_path / "library"),), exclude=("*.bin",))
    monkeypatch.chdir(tmp_path)
    assert inventory.sync_of("hosts.toml") == chosen


def test_an_inventory_may_contain_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(
        "[defaults]\nuser = 'me'\n[hosts.localhost]\naddress = '10.0.0.1'\n[hosts.gpu1]"
    )
    localhost, gpu1 = inventory.read(path)
    assert (localhost.key, localhost.address, gpu1.key) == ("", "10.0.0.1", "me@gpu1")
    assert inventory.choose(["localhost", "gpu1"], file=str(path)) == (localhost, gpu1)


def test_python_callers_give_names_or_records_of_hosts() -> None:
    assert inventory.of(["gpu1", Host(name="gpu2", devices=3)]) == (
        Host(name="gpu1"),
        Host(name="gpu2", devices=3),
    )
    for wrong in ("gpu1", 2.0, None, True):
        with pytest.raises(UsageError, match="use a whole number, or a list of names"):
            inventory.of(wrong)


@pytest.mark.parametrize(
    "host",
    [
        Host(name="-oProxyCommand=reboot"),
        Host(name="gpu1;reboot"),
        Host(name="gpu1", user="-l"),
        Host(name="gpu1", python="$(reboot)"),
        Host(name="gpu1", python="-c"),
        Host(name="gpu1", folder="a\nb"),
        Host(name="gpu1", port=70000),
        Host(name="gpu1", devices=-1),
        Host(name="gpu1", env={"A B": "c"}),
    ],
)
def test_records_of_hosts_are_checked_like_text(host: Host) -> None:
    with pytest.raises(UsageError, match=" = "):
        inventory.of([host])
    with pytest.raises(UsageError, match="invalid host 3"):
        inventory.of([3])


def test_the_ssh_command_of_a_host(tmp_path: Path) -> None:
    host = Host(name="gpu3", user="me", port=2222)
    words = SshConnection(host, tmp_path, "h0")._command("-M")
    assert words == ["ssh", "-S", "h0.ctl", "-l", "me", "-p", "2222", "-M", "--", "gpu3"]
