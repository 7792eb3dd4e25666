"""Objects for the API of Kubernetes, and the states of their pods."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster.schedulers import kubernetes
from nbdist.cluster.schedulers.jobs import SUBMITTED
from nbdist.cluster.schedulers.kubernetes import (
    PodsJob,
    job_object,
    secret_object,
    service_object,
)
from nbdist.errors import StartError
from nbdist.records import Batch, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BATCH = Batch(launcher="kubernetes", image="train:1")


# Objects.


def pod_spec(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


def test_a_job_has_one_indexed_pod_for_each_host() -> None:
    spec = job_object("nbdist-1", 3, BATCH, {})["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)


def test_options_that_were_not_given_are_absent() -> None:
    job = job_object("nbdist-1", 1, BATCH, {})
    (worker,) = pod_spec(job)["containers"]
    assert "resources" not in worker
    assert worker["command"][0] == "python"
    assert "activeDeadlineSeconds" not in job["spec"]


def test_given_options_are_in_the_job() -> None:
    batch = Batch(launcher="kubernetes", image="x", gpus=8, time="1:30", python="/opt/python")
    job = job_object("nbdist-1", 1, batch, {})
    (worker,) = pod_spec(job)["containers"]
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert worker["command"][0] == "/opt/python"
    assert job["spec"]["activeDeadlineSeconds"] == 90


def test_the_ticket_is_where_the_worker_reads_it() -> None:
    spec = pod_spec(job_object("nbdist-1", 1, BATCH, {}))
    (worker,) = spec["containers"]
    mount = next(m for m in worker["volumeMounts"] if m["name"] == "nbdist")
    (file,) = secret_object({"name": "nbdist-1"}, "ticket")["stringData"]
    assert worker["command"][-1] == f"{mount['mountPath']}/{file}"
    volume = next(v for v in spec["volumes"] if v["name"] == "nbdist")
    assert volume["secret"]["secretName"] == "nbdist-1"


def test_pods_have_the_label_that_the_service_selects() -> None:
    job = job_object("nbdist-1", 1, BATCH, {"metadata": {"labels": {"team": "vision"}}})
    labels = job["spec"]["template"]["metadata"]["labels"]
    selector = service_object({"name": "nbdist-1"})["spec"]["selector"]
    assert labels == {"team": "vision", **selector}
    assert pod_spec(job)["subdomain"] == "nbdist-1"


def test_fields_of_nbdist_have_precedence_over_those_of_the_user() -> None:
    user = {
        "spec": {
            "restartPolicy": "Always",
            "subdomain": "theirs",
            "priorityClassName": "high",
            "affinity": {"nodeAffinity": {"a": 1}, "podAntiAffinity": {"b": 2}},
            "volumes": [{"name": "data"}],
        }
    }
    spec = pod_spec(job_object("nbdist-1", 1, BATCH, user))
    assert (spec["restartPolicy"], spec["priorityClassName"]) == ("Never", "high")
    assert spec["subdomain"] == "nbdist-1"
    assert spec["affinity"]["nodeAffinity"] == {"a": 1}
    assert spec["affinity"]["podAntiAffinity"].keys() == {
        "b",
        "preferredDuringSchedulingIgnoredDuringExecution",
    }
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "nbdist", "shm"]
    assert [container["name"] for container in spec["containers"]] == ["worker"]


def test_only_the_first_container_of_the_user_becomes_the_worker() -> None:
    first = {"name": "theirs", "image": "theirs:2", "env": [{"name": "A", "value": "1"}]}
    second = {"name": "sidecar", "image": "logs"}
    spec = pod_spec(job_object("nbdist-1", 1, BATCH, {"spec": {"containers": [first, second]}}))
    worker, sidecar = spec["containers"]
    assert (worker["name"], worker["image"], worker["env"]) == ("worker", "train:1", first["env"])
    assert sidecar == second


# Calls of the API.


class ApiError(Exception):
    """Double of `ApiException`."""

    def __init__(self, status: int, message: str = "", body: str | None = None) -> None:
        self.status, self.reason = status, "Reason"
        self.body = json.dumps({"message": message}) if body is None else body


def pod(phase: str, **changes: Any) -> SimpleNamespace:
    """Return a pod of the API's client.

    Args:
        phase: phase of the pod.
        changes: `waiting` and `message` of its container, `unscheduled` for the message of its
            condition `kind`, `name`, and `deleted`.
    """
    waiting = changes.get("waiting")
    state = SimpleNamespace(reason=waiting, message=changes.get("message"))
    statuses = [SimpleNamespace(state=SimpleNamespace(waiting=state))] if waiting else None
    reason = changes.get("unscheduled")
    kind = changes.get("kind", "PodScheduled")
    condition = SimpleNamespace(type=kind, status="False", message=reason, reason="No")
    return SimpleNamespace(
        metadata=SimpleNamespace(
            deletion_timestamp=changes.get("deleted"), name=changes.get("name", "")
        ),
        status=SimpleNamespace(
            phase=phase, container_statuses=statuses, conditions=[condition] if reason else None
        ),
    )


class Client:
    """Double of the client of Kubernetes.

    Attributes:
        pods: pods of the job.
        conditions: conditions of the job, each a type, a status, a reason and a message.
        error: raised by the next call; None if it works.
        made: kinds and namespaces of the created objects, with the objects.
        logs_read: names of the pods whose logs were read.
    """

    ApiException = ApiError

    def __init__(self) -> None:
        self.pods: Sequence[SimpleNamespace] = ()
        self.conditions: Sequence[tuple[str, str, str | None, str | None]] = ()
        self.error: Exception | None = None
        self.made: list[tuple[str, str, dict[str, Any]]] = []
        self.logs_read: list[str] = []

    def BatchV1Api(self) -> Client:  # noqa: N802 - as the client
        return self

    CoreV1Api = BatchV1Api

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _make(self, kind: str, namespace: str, given: dict[str, Any]) -> SimpleNamespace:
        self._raise()
        self.made.append((kind, namespace, given))
        return SimpleNamespace(metadata=SimpleNamespace(uid="uid-1"))

    def create_namespaced_job(self, namespace: str, given: dict[str, Any], **_: Any) -> Any:
        return self._make("job", namespace, given)

    def create_namespaced_service(self, namespace: str, given: dict[str, Any], **_: Any) -> Any:
        return self._make("service", namespace, given)

    def create_namespaced_secret(self, namespace: str, given: dict[str, Any], **_: Any) -> Any:
        return self._make("secret", namespace, given)

    def read_namespaced_job(self, *_: str, **__: Any) -> Any:
        self._raise()
        names = ("type", "status", "reason", "message")
        conditions = [SimpleNamespace(**dict(zip(names, c, strict=True))) for c in self.conditions]
        return SimpleNamespace(status=SimpleNamespace(conditions=conditions or None))

    def list_namespaced_pod(self, *_: str, **__: Any) -> Any:
        return SimpleNamespace(items=self.pods)

    def read_namespaced_pod_log(self, name: str, *_: str, **__: Any) -> str:
        self._raise()
        self.logs_read.append(name)
        return f"log of {name}\n\n"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    double = Client()
    monkeypatch.setattr(kubernetes, "_api", lambda: (double, "research", "context-1"))
    return double


def new_job(folder: Path, **options: Any) -> PodsJob:
    return PodsJob(Batch(launcher="kubernetes", image="x", **options), 1, (0, 1), folder)


def submitted(folder: Path, **options: Any) -> PodsJob:
    (folder / "ticket").write_text("the ticket")
    job = new_job(folder, **options)
    job.submit(folder / "ticket")
    return job


@pytest.mark.parametrize(("given", "used"), [("", "research"), ("team", "team")])
def test_the_objects_are_created_in_one_namespace(
    tmp_path: Path, client: Client, given: str, used: str
) -> None:
    job = submitted(tmp_path, namespace=given)
    assert [(kind, where) for kind, where, _ in client.made] == [
        ("job", used),
        ("service", used),
        ("secret", used),
    ]
    name = f"nbdist-{tmp_path.name}-1"
    assert {made["metadata"]["name"] for _, _, made in client.made} == {name}
    for _, _, owned in client.made[1:]:
        (owner,) = owned["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", name, "uid-1")
    assert client.made[2][2]["stringData"] == {"calling": "the ticket"}
    module = [sys.executable, "-m", "nbdist.cluster.schedulers.kubernetes"]
    assert job.ending() == [*module, name, used, "context-1"]
    assert str(job) == f"Kubernetes job {name}"


def test_a_job_that_may_exist_after_an_error_is_deleted(tmp_path: Path, client: Client) -> None:
    job = new_job(tmp_path)
    assert job.ending() == []
    client.error = ApiError(500, "etcd is slow")
    with pytest.raises(StartError, match=r"^Kubernetes: etcd is slow$"):
        job.submit(tmp_path / "ticket")
    assert job.ending()[3] == f"nbdist-{tmp_path.name}-1"
    assert job.state() == SUBMITTED
    assert job.log_tail() == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ApiError(403, body="<html>"), "Kubernetes: 403 Reason"),
        (ApiError(403, body='["message"]'), "Kubernetes: 403 Reason"),
        (ApiError(403, body="{}"), "Kubernetes: 403 Reason"),
        (ConnectionError("refused"), "Kubernetes' API cannot be reached: refused"),
    ],
)
def test_an_error_of_the_api_is_reported(
    tmp_path: Path, client: Client, error: Exception, message: str
) -> None:
    client.error = error
    with pytest.raises(StartError, match=f"^{message}$"):
        new_job(tmp_path).submit(tmp_path / "ticket")


@pytest.mark.parametrize("content", ["- a", "words", "", "spec: {containers: ["])
def test_a_pod_file_without_a_mapping_is_refused(
    tmp_path: Path, client: Client, content: str
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(content)
    with pytest.raises(StartError, match=f"^--pod {file}: "):
        new_job(tmp_path, pod=str(file)).submit(tmp_path / "ticket")
    assert client.made == []


def test_the_fields_of_a_pod_file_are_in_the_job(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pod.yaml").write_text("spec: {priorityClassName: high}")
    submitted(tmp_path, pod="~/pod.yaml")
    assert pod_spec(client.made[0][2])["priorityClassName"] == "high"


# States.


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], JobState(word="without pods yet", waits=True)),
        ([pod("Running"), pod("Running")], JobState(word="2 of 2 pods running")),
        ([pod("Running"), pod("Failed")], JobState(word="1 of 2 pods running")),
        ([pod("Running"), pod("Pending")], JobState(word="1 of 2 pods running", waits=True)),
        (
            [pod("Pending", unscheduled="0/3 nodes are available")] * 2,
            JobState(word="0 of 2 pods running", detail="0/3 nodes are available", waits=True),
        ),
        (
            [pod("Pending", waiting="ErrImagePull", message="not found", unscheduled="ignored")],
            JobState(word="0 of 1 pods running", detail="ErrImagePull: not found", waits=True),
        ),
        (
            [pod("Pending", waiting="A"), pod("Pending", unscheduled="b")],
            JobState(word="0 of 2 pods running", detail="A; b", waits=True),
        ),
        (
            [pod("Pending", waiting="InvalidImageName", message="x y"), pod("Running")],
            JobState(word="1 of 2 pods running", detail="InvalidImageName: x y", over=True),
        ),
        (
            [pod("Pending", unscheduled="containers with unready status", kind="Ready")],
            JobState(word="0 of 1 pods running", waits=True),
        ),
        ([pod("Pending", deleted="now"), pod("Running")], JobState(word="1 of 1 pods running")),
    ],
)
def test_the_state_describes_the_pods(
    tmp_path: Path, client: Client, pods: list[SimpleNamespace], expected: JobState
) -> None:
    job = submitted(tmp_path)
    client.pods = pods
    assert job.state() == expected


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (
            [("Failed", "True", "DeadlineExceeded", "too long")],
            JobState(word="failed", detail="DeadlineExceeded: too long", over=True),
        ),
        ([("Complete", "True", None, None)], JobState(word="complete", over=True)),
        ([("Failed", "False", None, None)], JobState(word="1 of 1 pods running")),
        ([("Suspended", "True", None, None)], JobState(word="1 of 1 pods running")),
    ],
)
def test_a_job_is_over_by_its_conditions(
    tmp_path: Path, client: Client, conditions: list[Any], expected: JobState
) -> None:
    job = submitted(tmp_path)
    client.pods, client.conditions = [pod("Running")], conditions
    assert job.state() == expected


def test_a_job_that_was_deleted_is_over(tmp_path: Path, client: Client) -> None:
    job = submitted(tmp_path)
    client.error = ApiError(404, "not found")
    assert job.state() == JobState(word="", detail="Kubernetes: not found", over=True)
    client.error = ApiError(500, "slow")
    with pytest.raises(StartError, match=r"^Kubernetes: slow$"):
        job.state()


def test_the_log_of_a_failed_pod_is_preferred(tmp_path: Path, client: Client) -> None:
    job = submitted(tmp_path)
    assert job.log_tail() == ""
    client.pods = [pod("Running", name="a"), pod("Running", name="b")]
    assert job.log_tail() == "log of b"
    client.pods = [pod("Failed", name="a"), pod("Running", name="b")]
    assert job.log_tail() == "log of a"
    client.error = ApiError(400, "the container is starting")
    assert job.log_tail() == ""
