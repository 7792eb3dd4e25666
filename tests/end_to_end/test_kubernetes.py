"""Clusters on Kubernetes pods, tested with a double of the API server."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from typing import TYPE_CHECKING

import kubernetes_validate
import msgspec
import numpy as np
import pytest

import nbdist
from nbdist.cluster.schedulers.kubernetes import job_object, secret_object, service_object
from nbdist.errors import StartError
from nbdist.utils.polling import repeat_until
from tests import exact
from tests.exact import losses
from tests.kubernetes_double import VERSION, Server
from tests.schedulers import cancelling, output_reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_folders")

STEPS = 600
END_S = 30.0
CANCEL_S = 60.0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server
        assert repeat_until(lambda: not cancelling(), CANCEL_S)


@pytest.fixture
def server(api: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """API server that must hold no objects and no processes after the test."""
    api.is_full, api.image_fault, api.denies = False, "", ""
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig("research")))
    yield api
    assert repeat_until(lambda: not api.running(), END_S), api.running()
    assert repeat_until(lambda: not api.objects, END_S), "the Job owns all other objects"
    assert not api.refused


BATCH = nbdist.Batch(
    launcher="kubernetes",
    image="registry/train:1",
    listen="127.0.0.1",
    python=sys.executable,
    time="2:00:00",
)


@pytest.mark.parametrize(
    ("pods", "number"),
    [(2, signal.SIGTERM), pytest.param(3, signal.SIGKILL, marks=pytest.mark.full)],
)
def test_pods_restart_and_a_lost_one_is_replaced(
    server: Server, tmp_path: Path, pods: int, number: signal.Signals
) -> None:
    """After a node failure or an eviction, the run ends with the same losses."""
    with nbdist.Cluster(pods, batch=BATCH, framework="jax") as cluster:
        indices = cluster.run("import os\nos.environ['JOB_COMPLETION_INDEX']").results
        assert indices == {rank: f"'{rank}'" for rank in range(pods)}
        assert sorted(kind for kind, _ in server.objects) == ["Job", "Secret", "Service"]
        assert all(o["metadata"]["namespace"] == "research" for o in server.objects.values())
        before = server.running()
        cluster.restart()
        assert server.running() == before, "the restart keeps the pods"
        victim = server.running()[1]
        run = exact.train(cluster, tmp_path, STEPS, meanwhile=lambda: server.kill(victim, number))
        np.testing.assert_array_equal(run.loss, losses(STEPS))
        assert len(run.recoveries) == 1
        assert len([key for key in server.objects if key[0] == "Job"]) == 1


@pytest.mark.full
def test_pending_pods_are_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.is_full = True
    read_output = output_reader(capsys)

    def make_room() -> None:
        assert repeat_until(lambda: "Insufficient nvidia.com/gpu" in read_output(), END_S)
        server.is_full = False

    thread = threading.Thread(target=make_room)
    thread.start()
    with nbdist.Cluster(2, batch=BATCH, framework="none") as cluster:
        thread.join()
        assert cluster.world_size == 2
    assert "is 0 of 2 pods running (0/4 nodes are available" in read_output()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"denies": "jobs"}, r"Kubernetes: jobs is forbidden"),
        pytest.param(
            {"denies": "secrets"}, r"Kubernetes: secrets is forbidden", marks=pytest.mark.full
        ),
        pytest.param(
            {"image_fault": "InvalidImageName"},
            r"provides no hosts: .*InvalidImageName: no such image",
            marks=pytest.mark.full,
        ),
    ],
)
def test_refused_request_is_reported(server: Server, changes: dict[str, str], message: str) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(StartError, match=message):
        nbdist.Cluster(2, batch=BATCH, framework="none")
    assert cancelling(), "the cancelling process outlives the cluster until two attempts succeed"


@pytest.mark.full
def test_pod_with_a_failing_program_is_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbdist.cluster.schedulers import reverse_connection

    monkeypatch.setattr(reverse_connection, "CONNECT_TIMEOUT_S", 1.0)
    faulty = msgspec.structs.replace(BATCH, python=shutil.which("false") or "")
    with pytest.raises(
        StartError, match=r"none of its hosts has connected to 127\.0\.0\.1:\d+ within 1 s"
    ):
        nbdist.Cluster(1, batch=faulty, framework="none")


def test_missing_configuration_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StartError, match="Kubernetes is not configured"):
        nbdist.Cluster(1, batch=BATCH, framework="none")


@pytest.mark.full
def test_unreachable_api_server_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    file = server.kubeconfig("default")
    server._http.server_close()
    monkeypatch.setenv("KUBECONFIG", str(file))
    before = cancelling()
    with pytest.raises(StartError, match="Kubernetes' API cannot be reached"):
        nbdist.Cluster(1, batch=BATCH, framework="none")
    (retrying,) = (process for process in cancelling() if process not in before)
    retrying.kill()  # it would retry for two minutes, because the server may have accepted the job


POD = """
metadata:
  annotations: {team: vision}
spec:
  serviceAccountName: trainer
  nodeSelector: {gpu: h100}
  restartPolicy: Always
  containers:
  - name: theirs
    env: [{name: NCCL_SOCKET_IFNAME, value: eth0}]
    resources: {requests: {memory: 64Gi}, limits: {"rdma/ib": 1}}
    volumeMounts: [{name: data, mountPath: /data}]
  - {name: sidecar, image: logs}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""


def test_job_keeps_the_fields_of_the_pod_file() -> None:
    import yaml

    batch = msgspec.structs.replace(BATCH, gpus=8)
    job = job_object("nbdist-1", 4, batch, yaml.safe_load(POD))
    kubernetes_validate.validate(job, VERSION, strict=True)
    assert job["spec"]["activeDeadlineSeconds"] == 7200
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {"team": "vision"}
    spec = template["spec"]
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("trainer", "Never")
    worker, sidecar = spec["containers"]
    assert sidecar["name"] == "sidecar"
    assert (worker["name"], worker["image"]) == ("worker", "registry/train:1")
    assert worker["env"] == [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}]
    assert worker["resources"] == {
        "requests": {"memory": "64Gi"},
        "limits": {"rdma/ib": 1, "nvidia.com/gpu": "8"},
    }
    assert [m["name"] for m in worker["volumeMounts"]] == ["data", "nbdist", "shm"]
    assert [v["name"] for v in spec["volumes"]] == ["data", "nbdist", "shm"]
    owned = {"name": "nbdist-1", "labels": {"nbdist/job": "nbdist-1"}}
    for other in (service_object(owned), secret_object(owned, "{}")):
        kubernetes_validate.validate(other, VERSION, strict=True)


@pytest.mark.parametrize(
    "content",
    ["- a", *(pytest.param(c, marks=pytest.mark.full) for c in ("spec: {containers: [", "words"))],
)
def test_invalid_pod_file_is_refused(server: Server, tmp_path: Path, content: str) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(content)
    with pytest.raises(StartError, match=r"--pod .*pod\.yaml: "):
        nbdist.Cluster(1, batch=msgspec.structs.replace(BATCH, pod=str(file)), framework="none")


@pytest.mark.full
def test_unknown_pod_field_is_refused(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("spec: {nodeSelektor: {gpu: h100}}")
    with pytest.raises(
        StartError, match=r"Kubernetes: .*spec\.template\.spec\.nodeSelektor: Extra inputs"
    ):
        nbdist.Cluster(1, batch=msgspec.structs.replace(BATCH, pod=str(file)), framework="none")
