from __future__ import annotations

import importlib.util
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.cluster import environment, resources
from nbdist.cluster.remote_host import environment_lock
from nbdist.errors import UsageError
from nbdist.records import ClusterRequest, Host
from nbdist.utils import gpus, installed
from nbdist.utils.installed import lacks_tensorflow

if TYPE_CHECKING:
    from pathlib import Path


def request(**changes: object) -> ClusterRequest:
    count = changes.pop("hosts", 2)
    given = {"hosts": (Host(),) * count, "frameworks": ("jax",), **changes}  # type: ignore[operator]
    return ClusterRequest(**given)  # type: ignore[arg-type]


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"10000 hosts .*use at most"):
        resources.check(request(hosts=10_000), 400_000_000)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as error:
        resources.check(request(min_hosts=9, cpus_per_worker=9999, devices_per_host=-1), 1)
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("communication", "message"),
    [("nccl", "needs NVIDIA GPUs, and none is visible"), ("mpi", "choose from auto, ring, nccl")],
)
def test_unavailable_communication_is_refused(
    communication: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "visible_gpus", tuple)
    with pytest.raises(UsageError, match=f"--communication {communication}.*{message}"):
        resources.check(request(hosts=2, communication=communication), 1)


def test_a_missing_framework_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.importlib.util, "find_spec", lambda name: name == "jax" or None)
    assert resources.choose_frameworks(None) == ("jax",)
    with pytest.raises(UsageError, match=r'tensorflow cannot.*%pip install "nbdist\[tensorflow\]"'):
        resources.choose_frameworks("both")


def test_an_unknown_framework_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="'torch': choose from tensorflow, jax, both"):
        resources.choose_frameworks("torch")


def test_environment_variables_are_parsed() -> None:
    assert resources.parse_env(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}
    with pytest.raises(UsageError, match=r"'C' '=d': use NAME=VALUE"):
        resources.parse_env(["A=1", "C", "=d"])


@given(st.integers(0, 16), st.integers(1, 16))
def test_gpus_are_divided_evenly_among_ranks(count: int, ranks: int) -> None:
    all_gpus = [str(i) for i in range(count)]
    shares = resources.divide_gpus(all_gpus, [0] * ranks)
    assert len(shares) == ranks
    if count >= ranks:
        assert sorted(g for share in shares for g in share) == sorted(all_gpus)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    elif count:
        assert all(len(share) == 1 for share in shares)


def test_each_rank_gets_the_requested_number_of_gpus() -> None:
    assert resources.divide_gpus(["0", "1", "2", "3"], [1, 1]) == [("0",), ("1",)]
    shares = resources.divide_gpus(["0", "1", "2", "3"], [2, 0, 1])
    assert shares == [("0", "1"), ("2",), ("3",)]


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a double of nvidia-smi on PATH, because test machines have no GPU.

    Args:
        folder: a folder for the program.
        monkeypatch: restores the environment.
        text: the answer to `nvidia-smi -L`.
    """
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$*" = -L ] || exit 2\ncat <<END\n{text}\nEND\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.processes
def test_gpus_are_found_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}b5f-1d)" for n in range(4)]
    install_nvidia_smi(tmp_path, monkeypatch, "\n".join(lines))
    assert gpus.visible_gpus() == ("0", "1", "2", "3")
    own = environment.of_places(request(), lambda _host: gpus.visible_gpus())
    assert [values["CUDA_VISIBLE_DEVICES"] for values in own] == ["0,1", "2,3"]
    with pytest.raises(UsageError, match="need 6 GPUs, and 4 are visible"):
        resources.check(request(devices_per_host=3), 1)


def test_only_gpus_that_the_user_allows_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert gpus.visible_gpus() == ("2", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a1,MIG-c6d4")
    assert gpus.visible_gpus() == ("GPU-8a1", "MIG-c6d4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,2")
    assert gpus.visible_gpus() == ("1",)


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_scheduler_can_allow_no_gpu(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus.visible_gpus() == ()


@pytest.mark.processes
def test_slices_take_the_place_of_their_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)\n"
        "  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-69cfa8fe)\n"
        "  MIG 7g.40gb     Device  0: (UUID: MIG-GPU-b8ea3855/1/0)"
    )
    install_nvidia_smi(tmp_path, monkeypatch, text)
    found = ("MIG-c6d4f1ef", "MIG-cba663e8", "MIG-GPU-b8ea3855/1/0")
    assert gpus.visible_gpus() == found
    own = environment.of_places(request(hosts=3), lambda _host: gpus.visible_gpus())
    assert tuple(values["CUDA_VISIBLE_DEVICES"] for values in own) == found


def test_environment_of_the_user_has_priority() -> None:
    assert environment.shared(request(env={"KERAS_BACKEND": "torch"}))["KERAS_BACKEND"] == "torch"
    assert environment.shared(request(cpus_per_worker=1))["OMP_NUM_THREADS"] == "1"
    ordered = request(env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    own = environment.of_places(ordered, lambda _host: ("0", "1"))
    assert own == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_cores_are_assigned_in_turn() -> None:
    shares = [resources.share_cores((0, 1, 2, 3), before, 2) for before in range(3)]
    assert shares == [(0, 1), (2, 3), (0, 1)]
    assert resources.share_cores((5, 7), 1, 4) == (5, 7)


def test_installation_needs_hosts_over_ssh_and_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--install: only for hosts over ssh"):
        resources.check(request(install=True), 1)
    remote = ClusterRequest(hosts=(Host(name="gpu1"),), frameworks=("jax",), install=True)
    monkeypatch.setattr(environment_lock.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r'needs uv: run %pip install "nbdist\[install\]"'):
        resources.check(remote, 1)
    (tmp_path / "uv").touch(mode=0o755)
    resources.check(remote, 1)


def test_frameworks_of_an_installation_must_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.importlib.util, "find_spec", lambda name: None)
    hosts = [Host(name="gpu1")]
    assert resources.choose_frameworks("jax", hosts) == ("jax",)
    with pytest.raises(UsageError, match="jax cannot be imported here"):
        resources.choose_frameworks("jax", hosts, here=True)


def test_tensorflow_is_refused_with_its_reason_if_python_is_too_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "_PYTHON", (3, 14))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "jax" else None
    )
    assert resources.choose_frameworks(None) == ("jax",)
    for choice in ("tensorflow", "both"):
        with pytest.raises(UsageError) as refused:
            resources.choose_frameworks(choice)
        assert str(refused.value) == f"tensorflow cannot be imported here: {lacks_tensorflow()}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r'JAX, run %pip install "nbdist\[jax\]"$'):
        resources.choose_frameworks(None)
