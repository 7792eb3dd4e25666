"""Double of the controllers of JobSet and of Kubeflow Trainer, on the double of Kubernetes.

The objects are validated by the models that Kubeflow publishes for the schemas of both projects
(kubeflow-trainer-api). The controllers do what exported programs need: a TrainJob becomes a JobSet
with the template of its runtime, a JobSet a headless Service and a Job for each replica, and a Job
that failed makes the JobSet create all its Jobs again.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, ClassVar

from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)

from tests.kubernetes_double import Server, has_failed

if TYPE_CHECKING:
    from pathlib import Path

_MODELS: dict[str, Any] = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}
_LABEL = "jobset.sigs.k8s.io/jobset-name"


class JobSetServer(Server):
    """API server of a cluster with JobSet and Kubeflow Trainer.

    Attributes:
        restarts: number of times that each JobSet has created its Jobs again.
    """

    kinds: ClassVar = {
        **Server.kinds,
        "jobsets": "JobSet",
        "trainjobs": "TrainJob",
        "trainingruntimes": "TrainingRuntime",
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.restarts: dict[str, int] = {}

    def validate(self, given: dict[str, Any]) -> None:
        model = _MODELS.get(given["kind"])
        if model is None:
            super().validate(given)
        else:
            assert model.from_dict(given).to_dict() == given, "unknown or invalid field"

    def reconcile(self) -> None:
        for (kind, name), given in list(self.objects.items()):
            if kind == "TrainJob" and ("JobSet", name) not in self.objects:
                self._create_jobset(name, given)
            elif kind == "JobSet":
                self._tend_jobset(name, given)

    def _create_jobset(self, name: str, trainjob: dict[str, Any]) -> None:
        reference = trainjob["spec"]["runtimeRef"]
        runtime = self.objects[reference["kind"], reference["name"]]["spec"]
        spec = runtime["template"]["spec"]
        for group in spec["replicatedJobs"]:
            labels = group["template"]["metadata"]["labels"]
            if labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer":
                nodes = trainjob["spec"]["trainer"]["numNodes"]
                group["template"]["spec"] |= {"completions": nodes, "parallelism": nodes}
        jobset = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": spec,
        }
        self.create(trainjob["metadata"]["namespace"], "JobSet", jobset)

    def _tend_jobset(self, name: str, jobset: dict[str, Any]) -> None:
        namespace, spec = jobset["metadata"]["namespace"], jobset["spec"]
        if ("Service", name) not in self.objects and spec["network"]["enableDNSHostnames"]:
            network = {"clusterIP": "None", "selector": {_LABEL: name}}
            network["publishNotReadyAddresses"] = spec["network"]["publishNotReadyAddresses"]
            service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
            self.create(namespace, "Service", {**service, "spec": network})
        jobs = {
            f"{name}-{group['name']}-{replica}": group["template"]
            for group in spec["replicatedJobs"]
            for replica in range(group["replicas"])
        }
        for job, template in jobs.items():
            if ("Job", job) not in self.objects:
                self._create_job(namespace, name, job, template)
        failed = [job for job in jobs if has_failed(self.objects["Job", job], self.pods(job))]
        made = self.restarts.setdefault(name, 0)
        if failed and made < spec["failurePolicy"]["maxRestarts"]:
            self.restarts[name] += 1
            for job in jobs:
                for pod in self.pods(job):
                    self._end(pod["metadata"]["name"], signal.SIGKILL)
                del self.objects["Job", job]

    def _create_job(self, namespace: str, owner: str, name: str, template: dict[str, Any]) -> None:
        spec = {**template["spec"]}
        pods = {"labels": {_LABEL: owner}}
        spec["template"] = {
            "metadata": pods,
            "spec": {**spec["template"]["spec"], "subdomain": owner},
        }
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        self.create(namespace, "Job", job)
