"""Hosts from Kubernetes: the pods of one indexed Job, with a headless Service.

Kubernetes replaces a lost pod by a new one with the same index, which connects in its place. The
Service and the Secret belong to the Job, and Kubernetes removes them with it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster.schedulers.dialects import seconds
from nbdist.cluster.schedulers.jobs import COMMAND_S, LOG_LINES, SUBMITTED, Job
from nbdist.errors import StartError
from nbdist.records import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.records import Batch

_TICKET_FILE = "calling"
_MOUNT_PATH = "/var/run/nbdist"
_WORKER = "worker"
_LABEL = "nbdist/job"
_GPU = "nvidia.com/gpu"
_GRACE_S = 120
"""Time for engines to save a checkpoint when Kubernetes ends their pod."""

_TTL_S = 300
"""Time after which Kubernetes removes a Job that has ended, if nbdist does not."""

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_HOPELESS = {"InvalidImageName", "ErrImageNeverPull"}


class PodsJob(Job):
    """Indexed Job; see `Job`."""

    title = "Kubernetes job"
    has_successors = True

    def __init__(self, batch: Batch, number: int, places: tuple[int, ...], folder: Path) -> None:
        super().__init__(batch, number, places, folder)
        self._api: Any = None
        self._is_made = False
        self._where = "", ""  # namespace and context at the submission
        self._name = f"nbdist-{folder.name}-{number}"

    def submit(self, ticket: Path) -> None:
        self._api, namespace, context = _api()
        batch, core = self._api.BatchV1Api(), self._api.CoreV1Api()
        job = job_object(self._name, len(self.places), self._batch, self._pod_of_user())
        self._where = self._batch.namespace or namespace, context
        self._id = self._name  # set first: the Job may exist even if the call fails
        made = self._make(batch.create_namespaced_job, job)
        self._is_made = True
        owned = {
            "name": self._name,
            "labels": {_LABEL: self._name},
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": self._name,
                    "uid": made.metadata.uid,
                }
            ],
        }
        self._make(core.create_namespaced_service, service_object(owned))
        secret = secret_object(owned, ticket.read_text())
        self._make(core.create_namespaced_secret, secret)

    def state(self) -> JobState:
        if not self._is_made:
            return SUBMITTED
        try:
            job = self._ask(self._api.BatchV1Api().read_namespaced_job, self._name, self._namespace)
        except _GoneError as error:
            return JobState(word="", detail=str(error), over=True)
        for condition in job.status.conditions or ():
            if condition.type in ("Complete", "Failed") and condition.status == "True":
                detail = ": ".join(filter(None, (condition.reason, condition.message)))
                return JobState(word=condition.type.lower(), detail=detail, over=True)
        return _state_of(self._pods())

    def log_tail(self) -> str:
        if not self._is_made:
            return ""
        core = self._api.CoreV1Api()
        try:
            pods = self._pods()
            ended = [pod for pod in pods if pod.status.phase == "Failed"] or pods
            if not ended:
                return ""
            read, name = core.read_namespaced_pod_log, ended[-1].metadata.name
            return str(self._ask(read, name, self._namespace, tail_lines=LOG_LINES)).rstrip()
        except StartError:  # the container has not started
            return ""

    def _pods(self) -> list[Any]:
        """Return the pods that are not being deleted."""
        found = self._ask(
            self._api.CoreV1Api().list_namespaced_pod,
            self._namespace,
            label_selector=f"job-name={self._name}",
        )
        return [pod for pod in found.items if pod.metadata.deletion_timestamp is None]

    def ending(self) -> list[str]:
        """Return the command that deletes the Job: this process may end before a response."""
        if not self._id:
            return []
        return [
            sys.executable,
            "-m",
            "nbdist.cluster.schedulers.kubernetes",
            self._name,
            *self._where,
        ]

    @property
    def _namespace(self) -> str:
        return self._where[0]

    def _make(self, create: Any, given: dict[str, Any]) -> Any:
        """Create an object. The API refuses unknown fields instead of dropping them."""
        return self._ask(create, self._namespace, given, field_validation="Strict")

    def _ask(self, call: Any, *args: Any, **options: Any) -> Any:
        """Call the API. Raise StartError with its message, or with the connection error."""
        from pydantic import ValidationError
        from urllib3.exceptions import HTTPError

        try:
            return call(*args, _request_timeout=COMMAND_S, **options)
        except self._api.ApiException as error:
            kind = _GoneError if error.status == _NOT_FOUND else StartError
            raise kind(f"Kubernetes: {_message(error)}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StartError(f"Kubernetes: {where}: {first['msg']}") from None
        except (HTTPError, OSError) as error:
            raise StartError(f"Kubernetes' API cannot be reached: {error}") from None

    def _pod_of_user(self) -> dict[str, Any]:
        if not self._batch.pod:
            return {}
        import yaml

        try:
            content = yaml.safe_load(Path(self._batch.pod).expanduser().read_text())
        except (OSError, yaml.YAMLError) as error:
            raise StartError(f"--pod {self._batch.pod}: {error}") from None
        if not isinstance(content, dict):
            raise StartError(
                f"--pod {self._batch.pod}: use a YAML mapping with fields such as `spec:`"
            )
        return content


class _GoneError(StartError):
    """The object does not exist any more."""


_NOT_FOUND = 404


def _message(error: Any) -> str:
    """Return the message of the `Status` that the API returned."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(error.body)["message"])
    return f"{error.status} {error.reason}"


def _api(context: str = "") -> tuple[Any, str, str]:
    """Load the official client with the available configuration.

    Args:
        context: the context of the configuration; empty for the current one. Inside a pod, the
            client uses the pod's own configuration.

    Returns:
        The client, the default namespace, and the context.

    Raises:
        StartError: the client is not installed, or there is no configuration.
    """
    try:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
    except ImportError:
        raise StartError(
            'the Kubernetes client is not installed: run %pip install "nbdist[kubernetes]"'
        ) from None
    try:
        if _OWN_NAMESPACE.exists():
            config.load_incluster_config()
            return client, _OWN_NAMESPACE.read_text().strip(), ""
        _, current = config.list_kube_config_contexts()
        context = context or str(current["name"])
        config.load_kube_config(context=context)
        return client, str(current["context"].get("namespace", "default")), context
    except (ConfigException, OSError) as error:
        raise StartError(f"Kubernetes is not configured: {error}") from None


def job_object(name: str, count: int, batch: Batch, pod: dict[str, Any]) -> dict[str, Any]:
    """Build the Job for the API of Kubernetes (batch/v1).

    Args:
        name: the name of the Job, its Service and its Secret.
        count: the number of pods.
        batch: the options of the pods.
        pod: additional fields of the pods from the user (`metadata`, `spec`).
    """
    theirs, ours = pod.get("metadata", {}), {"labels": {_LABEL: name}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {_LABEL: name}},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 1000,  # replace lost pods
            "ttlSecondsAfterFinished": _TTL_S,
            **({"activeDeadlineSeconds": seconds(batch.time)} if batch.time else {}),
            "template": {
                "metadata": _merged(theirs, ours),
                "spec": _merged(pod.get("spec", {}), _pod_spec(name, batch)),
            },
        },
    }


def _container(batch: Batch) -> dict[str, Any]:
    """Build the container in which a pod connects to the rendezvous."""
    resources = {"limits": {_GPU: str(batch.gpus)}} if batch.gpus else {}
    return {
        "name": _WORKER,
        "image": batch.image,
        "command": [
            batch.python or "python",
            "-m",
            "nbdist.cluster.schedulers.dial_in",
            f"{_MOUNT_PATH}/{_TICKET_FILE}",
        ],
        "volumeMounts": [
            {"name": "nbdist", "mountPath": _MOUNT_PATH, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's, larger than the default
        ],
        **({"resources": resources} if resources else {}),
    }


def _pod_spec(name: str, batch: Batch) -> dict[str, Any]:
    """Build the spec of a pod. Pods of a Job are on different hosts if possible."""
    apart = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": {_LABEL: name}},
            "topologyKey": "kubernetes.io/hostname",
        },
    }
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}
        },
        "containers": [_container(batch)],
        "volumes": [
            {"name": "nbdist", "secret": {"secretName": name, "defaultMode": 0o400}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def service_object(metadata: dict[str, Any]) -> dict[str, Any]:
    """Build the headless Service, which resolves the names of pods even before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: metadata["name"]},
        },
    }


def secret_object(metadata: dict[str, Any], ticket: str) -> dict[str, Any]:
    """Build the Secret with the ticket that the pods read to connect."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
        "stringData": {_TICKET_FILE: ticket},
    }


def _merged(theirs: Any, ours: Any) -> Any:
    """Merge two objects. `ours` takes precedence, and the first containers are merged."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        both = {key: _merged(theirs[key], ours[key]) for key in theirs.keys() & ours.keys()}
        merged = {**theirs, **ours, **both}
        first, own = theirs.get("containers"), ours.get("containers")
        if first and own:
            merged["containers"] = [_merged(first[0], own[0]), *first[1:]]
        return merged
    if isinstance(theirs, list) and isinstance(ours, list):
        return [*theirs, *ours]
    return ours


def _state_of(pods: Sequence[Any]) -> JobState:
    phases = [pod.status.phase for pod in pods]
    waiting = [pod for pod in pods if pod.status.phase == "Pending"]
    why = list(dict.fromkeys(filter(None, map(_why_waiting, waiting))))
    running = sum(phase == "Running" for phase in phases)
    word = f"{running} of {len(pods)} pods running" if pods else "without pods yet"
    is_over = any(reason.split(":")[0] in _HOPELESS for reason in why)
    return JobState(
        word=word,
        detail="; ".join(why),
        waits=not is_over and (bool(waiting) or not pods),
        over=is_over,
    )


def _why_waiting(pod: Any) -> str:
    for container in pod.status.container_statuses or ():
        state = container.state.waiting if container.state else None
        if state is not None and state.reason:
            return ": ".join(filter(None, (state.reason, state.message)))
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.message or condition.reason or "")
    return ""


def main() -> None:
    """Delete a Job with its objects: `... schedulers.kubernetes NAME NAMESPACE CONTEXT`."""
    name, namespace, context = sys.argv[1:]
    client, _, _ = _api(context)
    try:
        client.BatchV1Api().delete_namespaced_job(name, namespace, propagation_policy="Background")
    except client.ApiException as error:
        if error.status != _NOT_FOUND:
            raise


if __name__ == "__main__":
    main()
