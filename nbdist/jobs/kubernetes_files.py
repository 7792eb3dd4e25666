"""Kubernetes objects that start an exported program: Job, JobSet, TrainJob.

Each of them has one Indexed Job, whose index is the rank. JobSet and Kubeflow Trainer restart all
ranks together when one fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from nbdist.cluster.schedulers.dialects import seconds
from nbdist.utils.processes import CONTINUES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.records import Batch

PORT = 29500
"""Port of rank 0, on which the ranks find each other."""

NOTICE_S = 120
"""Time between SIGTERM and the end of a process, in which it saves a checkpoint (seconds)."""

_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
_RESTARTS = 10
_GROUP = "node"
"""Name of the group of ranks, and of their container. Kubeflow Trainer requires it."""

_DOCKERFILE = """\
FROM python:{python}-slim
WORKDIR /train
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENTRYPOINT ["python", "train.py"]
"""
_NEEDS = {
    "job": "",
    "jobset": "# The cluster needs JobSet 0.8 or newer (jobset.sigs.k8s.io).\n",
    "trainjob": "# The cluster needs Kubeflow Trainer 2 (kubeflow.org).\n",
}


def kubernetes_files(batch: Batch, common: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of `job.yaml` and `Dockerfile`.

    Args:
        batch: the options.
        common: `name` of the objects, `count` of ranks, `checkpoint` option of the program, version
            of `python`.
    """
    objects = _OBJECTS[batch.kind](batch, common["name"], int(common["count"]), common)
    head = (
        f"# Start: docker build -t {batch.image} . && docker push {batch.image}\n"
        "#        kubectl apply -f job.yaml\n"
        f"{_NEEDS[batch.kind]}"
        "# Mount a shared volume on /train/checkpoints to continue from the newest checkpoint.\n"
    )
    return {
        "job.yaml": head + yaml.safe_dump_all(objects, sort_keys=False),
        "Dockerfile": _DOCKERFILE.format(python=common["python"]),
    }


def _job(batch: Batch, name: str, count: int, common: Mapping[str, str]) -> list[dict[str, Any]]:
    labels = {"app.kubernetes.io/name": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {**labels}},
    }
    spec = _job_spec(batch, count, common, address=f"{name}-0.{name}", container="train")
    spec["backoffLimit"] = _RESTARTS * count  # all ranks end when one fails, and start again
    spec["template"]["metadata"] = {"labels": {**labels}}
    spec["template"]["spec"]["subdomain"] = name
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**labels}},
        "spec": spec,
    }
    return [service, job]


def _jobset(batch: Batch, name: str, count: int, common: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": _jobset_spec(batch, name, count, common, {}),
        }
    ]


def _trainjob(
    batch: Batch, name: str, count: int, common: Mapping[str, str]
) -> list[dict[str, Any]]:
    version = "trainer.kubeflow.org/v1alpha1"
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {
            "mlPolicy": {"numNodes": count},
            "template": {"spec": _jobset_spec(batch, name, count, common, labels)},
        },
    }
    reference = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": name,
    }
    job = {
        "apiVersion": version,
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": count}},
    }
    return [runtime, job]


def _jobset_spec(
    batch: Batch, name: str, count: int, common: Mapping[str, str], labels: dict[str, str]
) -> dict[str, Any]:
    address = f"{name}-{_GROUP}-0-0.{name}"
    spec = _job_spec(batch, count, common, address=address, container=_GROUP)
    spec["backoffLimit"] = 0  # a failed rank fails the Job, and all ranks start again
    template = {"metadata": {"labels": labels}, "spec": spec} if labels else {"spec": spec}
    return {
        "failurePolicy": {"maxRestarts": _RESTARTS},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": template}],
    }


def _job_spec(
    batch: Batch, count: int, common: Mapping[str, str], *, address: str, container: str
) -> dict[str, Any]:
    """Return the specification of an Indexed Job without its number of restarts.

    Args:
        batch: the options.
        count: number of ranks.
        common: see `kubernetes_files`.
        address: host name of rank 0.
        container: name of the container.
    """
    variables = {"WORLD_SIZE": str(count), "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    rank = {
        "name": container,
        "image": batch.image,
        "command": ["python", "train.py"],
        "args": common["checkpoint"].split(),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - NCCL's
        **({"resources": {"limits": {"nvidia.com/gpu": str(batch.gpus)}}} if batch.gpus else {}),
    }
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [_DISRUPTED]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [CONTINUES]}},
            ]
        },
        **({"activeDeadlineSeconds": seconds(batch.time)} if batch.time else {}),
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": NOTICE_S,
                "containers": [rank],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            },
        },
    }


_OBJECTS: dict[str, Callable[[Batch, str, int, Mapping[str, str]], list[dict[str, Any]]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
}
