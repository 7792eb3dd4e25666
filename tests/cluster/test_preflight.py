"""Preflight checks of real hosts, in network namespaces."""

from __future__ import annotations

import contextlib
import stat
import sysconfig
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbdist
from nbdist import cli
from nbdist.errors import StartError, UsageError
from nbdist.records import Host, Saving, StepOptions, Trouble
from nbdist.views.cluster.hosts import DoctorPicture
from tests.netns import Hosts, needs_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

BOUND_S = 30.0
INSTALLED_HERE = (sysconfig.get_path("purelib"), Path(nbdist.__file__).parents[1])


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with Hosts(3) as network:
        yield network


@pytest.fixture(scope="module")
def hosts(network: Hosts) -> Iterator[Hosts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBDIST_SSH_CONFIG", str(network.ssh_config))
        yield network


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[nbdist.Cluster]:
    with nbdist.Cluster(hosts=hosts.names, framework="jax") as running:
        yield running


def problems(cluster: nbdist.Cluster, **paths: str) -> tuple[Trouble, ...]:
    """Return the problems except slow links, because all links of a busy machine are slow."""
    examination = cluster.examine(**paths).examination
    assert examination.seconds < BOUND_S
    return tuple(trouble for trouble in examination.troubles if not is_slow(trouble))


def is_slow(trouble: Trouble) -> bool:
    return "an all-reduce of 100 MB" in trouble.what


@needs_hosts
def test_healthy_hosts_have_no_problems(
    cluster: nbdist.Cluster, hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "part-0").write_text("data")
    paths = {"data": str(tmp_path / "part-*"), "checkpoint": str(tmp_path / "new")}
    assert problems(cluster, **paths) == ()
    examination = cluster.examine(**paths).examination
    picture = DoctorPicture(msgspec.structs.replace(examination, troubles=()))
    assert [one.host for one in examination.facts] == hosts.names
    for rank, reached in examination.reaches.items():
        assert {reach.rank for reach in reached} == {0, 1, 2} - {rank}
        assert all(0 < reach.latency_s < 1 for reach in reached)
        assert sum(reach.bytes_per_s > 1e6 for reach in reached) == 1
    assert "✓ no problems" in picture.lines()
    assert "no problems" in picture.html()
    assert list(tmp_path.glob("new/.*")) == [], "the check left a file behind"
    lines = cluster.hosts().lines()
    assert all(host.address in line for host, line in zip(hosts.each, lines[3:], strict=True))
    assert "ssh, responds in" in lines[-1]


@needs_hosts
def test_sets_have_one_order_on_all_hosts(cluster: nbdist.Cluster) -> None:
    run = cluster.run("list({'momentum', 'decay', 'warmup', 'beta', 'steps', 'clip'})")
    assert len({*run.results.values()}) == 1


@needs_hosts
@pytest.mark.parametrize("framework", ["jax", pytest.param("tensorflow", marks=pytest.mark.full)])
def test_hosts_that_cannot_connect_are_reported(
    cluster: nbdist.Cluster, hosts: Hosts, framework: str
) -> None:
    """Without the check, TensorFlow's chief would wait for more than a minute."""
    for host in hosts.each[:2]:
        host.wall_off(on=True)
    try:
        first, second, *_ = problems(cluster)
        began = time.monotonic()
        with pytest.raises(StartError, match=rf"cannot connect to {hosts.names[1]} at .*timed out"):
            nbdist.Cluster(hosts=hosts.names[:2], framework=framework)
        assert time.monotonic() - began < 50
    finally:
        for host in hosts.each[:2]:
            host.wall_off(on=False)
    assert {first.where, second.where} == set(hosts.names[:2])
    assert first.is_fatal
    assert second.is_fatal
    assert "timed out" in first.what
    assert 'address = "..."' in first.advice


@needs_hosts
def test_a_slow_link_is_reported(cluster: nbdist.Cluster, hosts: Hosts) -> None:
    hosts.each[0].throttle_to(hosts.each[1], "80mbit")
    try:
        found = cluster.examine().examination.troubles
    finally:
        hosts.each[0].throttle_to(hosts.each[1], "")
    (trouble,) = (one for one in found if is_slow(one) and f"to {hosts.names[1]}," in one.what)
    assert (trouble.where, trouble.is_fatal) == (hosts.names[0], False)
    rate = float(trouble.what.split(" MB/s")[0])
    assert 2 <= rate <= 10.5, trouble.what  # the link has 10, a busy machine sends more slowly


@needs_hosts
@pytest.mark.full  # test_diagnosis.py names them
def test_bench_names_a_slow_host_and_a_slow_link(cluster: nbdist.Cluster, hosts: Hosts) -> None:
    """All links have 50 MB/s, because the speed of links without a limit depends on the load."""
    first, second, third = hosts.each
    with contextlib.ExitStack() as undo:
        for host in (first, third):
            host.throttle("400mbit")
            undo.callback(host.throttle, "")
        second.throttle("80mbit")
        try:
            picture = cluster.examine(bench=True)
        finally:
            second.throttle("")
        assert slower_than_others(picture) == [(second.name, "receives")]
        second.throttle("400mbit")
        undo.callback(second.throttle, "")
        first.throttle_to(third, "40mbit")
        undo.callback(first.throttle_to, third, "")
        picture = cluster.examine(bench=True)
    assert slower_than_others(picture) == [(first.name, f"sends to {third.name}")]
    (row,) = (line.split() for line in picture.lines() if line.startswith(f"{first.name} "))
    value, unit = row[-2:]
    assert unit == "MB/s"
    assert 3 <= float(value) <= 5.5, "the link has 5"


def slower_than_others(picture: DoctorPicture) -> list[tuple[str, str]]:
    found = (one for one in picture.examination.troubles if "other links reach" in one.what)
    return [(one.where, one.what.split(" at most")[0]) for one in found]


@needs_hosts
@pytest.mark.full
def test_files_and_folders_that_are_not_shared_are_reported(
    cluster: nbdist.Cluster, hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "part-0").write_text("data")
    hosts.each[2].own_disk(tmp_path)
    found = problems(cluster, data=str(tmp_path / "*"), checkpoint=str(tmp_path))
    assert all(trouble.is_fatal for trouble in found)
    files, folder = found
    assert f"{hosts.names[0]} has 1 file (4 B)" in files.what
    assert f"{hosts.names[2]} has 0 files" in files.what
    assert folder.where == hosts.names[2]
    assert folder.what == f"{tmp_path} is not the folder that {hosts.names[0]} writes to"
    cluster.run("import numpy as np, jax.numpy as jnp\nxs, w = np.ones((8, 2)), jnp.zeros(2)")
    with pytest.raises(UsageError, match=r"--checkpoint .* is not the folder.*all hosts share"):
        cluster.run(
            "w = w + batch.mean(0)\nloss = w.sum()",
            step=StepOptions(data="xs", batch=6),
            saving=Saving(folder=str(tmp_path / "saved"), every_steps=1),
        )


@needs_hosts
def test_a_folder_that_is_not_writable_is_reported(cluster: nbdist.Cluster) -> None:
    (trouble,) = problems(cluster, checkpoint="/proc/no")
    assert "is not writable" in trouble.what


@pytest.mark.processes
@needs_hosts
def test_gpus_are_read_from_nvidia_smi(hosts: Hosts, tmp_path: Path) -> None:
    """A program replaces nvidia-smi, because these hosts have no GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *driver*)\n'
        'echo "NVIDIA H100 80GB HBM3, 81559, 20000, 97, 580.65"\n'
        'echo "NVIDIA H100 80GB HBM3, 81559, 4, [N/A], 580.65";;\n*) exit 1;; esac\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    host = Host(name=hosts.names[0], env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    with nbdist.Cluster(hosts=[host], framework="none") as cluster:
        (trouble,) = problems(cluster)
        (facts,) = cluster.examine().examination.facts
    assert facts.driver == "580.65"
    assert [gpu.busy for gpu in facts.gpus] == [0.97, 0.0]
    assert trouble.what == "GPU 0 in use: 19.5 GiB of its memory are allocated"
    assert 'CUDA_VISIBLE_DEVICES = "1"' in trouble.advice


@pytest.mark.processes
@needs_hosts
def test_nccl_uses_the_interface_of_the_address(hosts: Hosts) -> None:
    """The variable of CUDA stands for a GPU, because these hosts have none."""
    first, second = hosts.names[:2]
    gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    chosen = Host(name=second, env={**gpu, "NCCL_SOCKET_IFNAME": "eth"})
    with nbdist.Cluster(hosts=[Host(name=first, env=gpu), chosen], framework="jax") as cluster:
        run = cluster.run("import os\nos.environ['NCCL_SOCKET_IFNAME']")
        assert run.results == {0: "'=eth0'", 1: "'eth'"}
        assert cluster.hosts().lines()[-1] == (
            f"[0@{first}] NCCL_SOCKET_IFNAME is =eth0, the interface that other hosts reach"
        )
        assert "NCCL_SOCKET_IFNAME is =eth0" in cluster.hosts().html()


@pytest.mark.processes
@needs_hosts
def test_the_doctor_command_returns_its_status(
    hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--bench", *hosts.names[:2]]) == 0
    assert "2 hosts checked" in capsys.readouterr().out
    assert cli.main(["doctor", "localhost", "--data", str(tmp_path / "*.none")]) == 1
    assert "no files match" in capsys.readouterr().out
    assert cli.main(["doctor", "-n", "0"]) == 2
    assert "need at least 1 host, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--no-such-option"])


def test_the_magics_need_a_cluster_or_hosts(shell: InteractiveShell) -> None:
    with pytest.raises(nbdist.NoClusterError, match="%dist_doctor needs"):
        shell.run_line_magic("dist_doctor", "--data x")
    with pytest.raises(nbdist.NoClusterError, match="%dist_hosts needs"):
        shell.run_line_magic("dist_hosts", "")


@pytest.mark.full  # the next test runs the magic on other hosts
def test_the_magic_checks_this_host(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_line_magic("dist_doctor", "2 hosts")
    assert "nbdist: 1 host checked in" in capsys.readouterr().out


@needs_hosts
@pytest.mark.processes
def test_packages_that_differ_from_the_notebook_are_reported(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here/site-packages", tmp_path / "there"
    install(here, "nb_direct", "1.0", requires="nb-behind>=1")
    install(here, "nb_behind", "2.0", requires="nb-behind>=1")
    monkeypatch.syspath_prepend(str(here))
    venv.create(there, symlinks=True)
    (packages,) = there.glob("lib/*/site-packages")
    (packages / "others.pth").write_text("\n".join(map(str, INSTALLED_HERE)))
    install(packages, "nb_direct", "1.0", requires="nb-behind>=1")
    origin = '{"url": "file:///there", "dir_info": {"editable": true}}'
    (packages / "nb_direct-1.0.dist-info" / "direct_url.json").write_text(origin)
    file = tmp_path / "hosts.toml"
    named_hosts = "".join(f"[hosts.{name}]\n" for name in hosts.names[:2])
    file.write_text(f"[defaults]\npython = '{there}/bin/python'\n{named_hosts}")
    shell = InteractiveShell()
    nbdist.load_ipython_extension(shell)
    try:
        assert named(shell, file) == []
        shell.run_cell("%%capture\nimport nb_direct", store_history=True)
        (found,) = named(shell, file)
    finally:
        nbdist.unload_ipython_extension(shell)
    assert found.where == ", ".join(hosts.names[:2])
    assert found.what == (
        "packages differ from the notebook's: nb-behind is missing (notebook: 2.0), "
        "nb-direct 1.0 (editable) (notebook: 1.0)"
    )
    assert found.advice.startswith("start hosts over ssh with --install, or run there: ")
    assert found.advice.endswith("-m pip install nb-behind==2.0 nb-direct==1.0")
    assert not found.is_fatal


def named(shell: InteractiveShell, file: Path) -> list[Trouble]:
    """Return the problems that `%dist_doctor` finds, except slow links."""
    picture: DoctorPicture = shell.run_line_magic("dist_doctor", f"--hosts {file}")
    return [trouble for trouble in picture.examination.troubles if not is_slow(trouble)]


def install(folder: Path, name: str, version: str, requires: str) -> None:
    """Write an installed package as pip does."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(f"version = {version!r}\n")
    requirement = f"Requires-Dist: {requires}\nRequires-Dist: nb-absent>=1; extra == 'more'\n"
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n{requirement}"
    )
    (info / "top_level.txt").write_text(f"{name}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
