"""Requests for hosts of a scheduler: their placeholders, and invalid options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist.cluster import host_request
from nbdist.errors import UsageError
from nbdist.records import Batch, ClusterRequest, Host

if TYPE_CHECKING:
    from pathlib import Path

SLURM = Batch(launcher="slurm")


def refusal(batch: Batch) -> list[str]:
    """Return the lines of the error for a request of one host; empty if it is valid."""
    try:
        host_request.hosts_of(1, batch)
    except UsageError as error:
        return str(error).splitlines()
    return []


def batch(launcher: str, **options: object) -> Batch:
    return Batch(launcher=launcher, **options)  # type: ignore[arg-type]


def test_a_scheduler_provides_numbered_placeholders() -> None:
    hosts = host_request.hosts_of(3, batch("pbs", python="/opt/python"))
    assert hosts == tuple(Host(name=f"pbs-{n}", python="/opt/python") for n in range(3))


@pytest.mark.parametrize("count", [True, 2.0, "2", ["gpu1"], None])
def test_only_a_number_of_scheduled_hosts_is_accepted(count: object) -> None:
    with pytest.raises(UsageError, match=r"^slurm chooses the hosts: use a number"):
        host_request.hosts_of(count, SLURM)


@pytest.mark.parametrize("count", [0, -3])
def test_a_scheduler_provides_at_least_one_host(count: int) -> None:
    with pytest.raises(UsageError, match=f"^need at least 1 host, got {count}$"):
        host_request.hosts_of(count, SLURM)


def test_hosts_without_a_scheduler_come_from_the_inventory() -> None:
    assert host_request.chosen(2, None) == (Host(), Host())
    assert host_request.chosen(["gpu1"], None) == (Host(name="gpu1"),)
    assert host_request.chosen(1, SLURM) == (Host(name="slurm-0"),)


def test_a_resized_request_keeps_its_other_fields() -> None:
    local = ClusterRequest(hosts=(Host(),), frameworks=("jax",), seed=7)
    assert host_request.resized(local, 2) == ClusterRequest(
        hosts=(Host(), Host()), frameworks=("jax",), seed=7
    )
    scheduled = ClusterRequest(hosts=(Host(name="slurm-0"),), frameworks=(), batch=SLURM)
    larger = host_request.resized(scheduled, 2)
    assert [host.name for host in larger.hosts] == ["slurm-0", "slurm-1"]
    assert larger.batch == SLURM
    with pytest.raises(UsageError, match="slurm chooses the hosts"):
        host_request.resized(scheduled, ["gpu1"])


def test_valid_options_of_each_launcher_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pod.yaml").write_text("spec: {}")
    kubernetes = batch(
        "kubernetes",
        image="registry.example:5000/team/train:1@sha256:0f",
        namespace="team-1",
        pod="~/pod.yaml",
        time="1-2:30",
        gpus=8,
        python="/opt/bin/python3",
    )
    slurm = batch(
        "slurm",
        queue="gpu,long@host.example",
        time="2:00:00",
        gpus=1024,
        options=("--constraint='a|b'", "--exclusive"),
        listen="fe80::1",
        python="~/env/bin/python",
    )
    accepted = (
        kubernetes,
        slurm,
        batch("pbs", queue="long", time="60", gpus=2),
        batch("sge", queue="all.q", time="60", gpus=2),
        batch("lsf", queue="normal", time="1:30", gpus=2),
        batch("htcondor", gpus=2, options=("+Group = x",)),
        batch("mpi", options=("--host 'a b'", "-x NAME=value")),
    )
    for one in accepted:
        assert refusal(one) == [], one


def test_an_unknown_launcher_hides_other_faults() -> None:
    assert refusal(batch("banana", queue="a b")) == [
        "--launcher banana: choose from slurm, pbs, sge, lsf, htcondor, mpi, kubernetes"
    ]


def test_all_faults_are_reported_at_once() -> None:
    faults = batch(
        "mpi", queue="a b", time="60", gpus=1025, listen="::", options=(" ", "a 'b"), image="x"
    )
    assert refusal(faults) == [
        "--partition 'a b': invalid characters",
        "--listen ::: use one address of this machine that hosts can reach",
        "--gpus-per-host 1025: use a whole number from 0 to 1024",
        "--submit ' ': use options of the scheduler, on one line",
        '--submit "a \'b": close the quote',
        "--partition: not supported by mpi",
        "--time: not supported by mpi",
        "--gpus-per-host: not supported by mpi",
        "--image: not supported by mpi",
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "-x"},
        {"queue": "a b"},
        {"queue": "größe"},
        {"queue": "x\n"},
        {"time": "soon"},
        {"time": "1;2"},
        {"time": "٣"},
        {"listen": "-oProxyCommand=x"},
        {"python": "python; x"},
        {"python": "-c"},
    ],
)
def test_values_with_special_characters_are_refused(options: dict[str, object]) -> None:
    (fault,) = refusal(batch("slurm", **options))
    ((name, value),) = options.items()
    reason = "use the format 2:00:00" if name == "time" else "invalid characters"
    assert fault.endswith(f"{value!r}: {reason}")


@pytest.mark.parametrize("namespace", ["Team", "-a", "a-", "a.b", "a_b"])
def test_namespaces_are_labels_of_dns(namespace: str) -> None:
    (fault,) = refusal(batch("kubernetes", image="x", namespace=namespace))
    assert fault == f"--namespace {namespace!r}: invalid characters"


@pytest.mark.parametrize("launcher", ["lsf", "kubernetes"])
def test_times_that_nbdist_converts_are_parsed(launcher: str) -> None:
    image = "x" if launcher == "kubernetes" else ""
    assert refusal(batch(launcher, time="1:2:3:4", image=image)) == [
        "--time 1:2:3:4: use the format 2:00:00"
    ]
    assert refusal(batch("slurm", time="1:2:3:4")) == []  # Slurm itself reports it


@pytest.mark.parametrize("line", ["", "  ", "--a\n--b", "a\tb", "a\0"])
def test_further_options_are_one_line_each(line: str) -> None:
    assert refusal(batch("slurm", options=("--fine", line))) == [
        f"--submit {line!r}: use options of the scheduler, on one line"
    ]


def test_quotes_are_checked_only_if_nbdist_splits_the_line() -> None:
    assert refusal(batch("slurm", options=("--comment=it's",))) == []
    assert refusal(batch("mpi", options=("it's",))) == ['--submit "it\'s": close the quote']


def test_kubernetes_needs_an_image_and_an_existing_pod_file() -> None:
    assert refusal(batch("kubernetes", pod="/no/such.yaml", queue="x", options=("y",))) == [
        "--partition: not supported by kubernetes",
        "--submit: not supported by kubernetes",
        "--launcher kubernetes needs --image with Python, nbdist and the framework",
        "--pod /no/such.yaml: file not found",
    ]


@pytest.mark.parametrize("launcher", ["slurm", "pbs", "sge", "lsf", "htcondor", "mpi"])
def test_options_of_kubernetes_are_refused_elsewhere(launcher: str, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.touch()
    assert refusal(batch(launcher, image="x", namespace="a", pod=str(file))) == [
        f"{flag}: not supported by {launcher}" for flag in ("--image", "--namespace", "--pod")
    ]


def test_htcondor_has_neither_queues_nor_times() -> None:
    assert refusal(batch("htcondor", queue="long", time="60")) == [
        "--partition: not supported by htcondor",
        "--time: not supported by htcondor",
    ]


def test_jobsets_are_only_for_programs() -> None:
    found = refusal(batch("kubernetes", image="x", kind="jobset"))
    assert found[-1].endswith("kind jobset: only for exported programs")
