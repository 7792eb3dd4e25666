"""Double of the Kubernetes API server, without a cluster. It runs pods on this machine.

It stores objects and validates them against the schemas of the real API. kubernetes-validate runs
in strict mode: it rejects unknown fields, as `fieldValidation=Strict` does. The official client
connects over HTTP.

A pod is a process on this machine that runs its container's command. Its environment contains the
Job's index, and the Secret's volume has its own path. Host names of pods behind a headless Service
become the loopback address. The double replaces failed pods, as the Job controller does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "1.37"
TOKEN = "the-users-own-token"
_WHERE = "/var/run/nbdist"
_POLL_S = 0.05


class Server:
    """API server that runs from `__enter__` on.

    Attributes:
        kinds: the kinds of objects, by their names in paths.
        objects: stored objects by kind and name.
        refused: rejected requests.
        is_full: True if there are no nodes for pods, so that they wait.
        image_fault: reason why containers do not start. Empty if they start.
        images: working folder of the containers of an image, by its name.
    """

    kinds: ClassVar = {"jobs": "Job", "services": "Service", "secrets": "Secret"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.refused: list[str] = []
        self.is_full = False
        self.image_fault = ""
        self.denies = ""
        self.images: dict[str, Path] = {}
        self._pods: dict[str, tuple[dict[str, Any], subprocess.Popen[bytes] | None]] = {}
        self._begun: Counter[tuple[str, int]] = Counter()
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._http = _Http(self)
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(_POLL_S,)),
            threading.Thread(target=self._tend),
        ]

    def __enter__(self) -> Server:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
        for name in list(self._pods):
            self._end(name, signal.SIGKILL)

    def kubeconfig(self, namespace: str) -> Path:
        """Write a file for `KUBECONFIG` and return its path."""
        file = self.folder / "kubeconfig"
        own = {"name": "double"}
        host, port = self._http.server_address[:2]
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{**own, "cluster": {"server": f"http://{host!s}:{port}"}}],
            "users": [{**own, "user": {"token": TOKEN}}],
            "contexts": [
                {
                    **own,
                    "context": {"cluster": "double", "user": "double", "namespace": namespace},
                }
            ],
            "current-context": "double",
        }
        file.write_text(json.dumps(content))
        return file

    def running(self) -> list[str]:
        """Return the names of pods with a running process."""
        with self._lock:
            return [n for n, (_, p) in self._pods.items() if p is not None and p.poll() is None]

    def kill(self, name: str, number: signal.Signals) -> None:
        """End a pod as when its node dies (SIGKILL) or it is evicted (SIGTERM)."""
        with self._lock:
            process = self._pods[name][1]
            assert process is not None
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.terminate()

    # Requests.

    def create(self, namespace: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        self.validate(given)
        assert given["kind"] == kind
        return self.store(namespace, kind, given)

    def validate(self, given: dict[str, Any]) -> None:
        """Raise ValidationError if an object has not the form of its kind."""
        kubernetes_validate.validate(given, VERSION, strict=True)

    def store(self, namespace: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        name = given["metadata"]["name"]
        given = json.loads(json.dumps(given))
        given["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": namespace}
        with self._lock:
            self.objects[kind, name] = given
        return given

    def delete(self, kind: str, name: str) -> None:
        with self._lock:
            del self.objects[kind, name]
            owners = [o for o in self.objects.items() if _owned_by(o[1], name)]
            for key, _ in owners:
                del self.objects[key]
            for pod in [n for n, (p, _) in self._pods.items() if _job_of(p) == name]:
                threading.Thread(target=self._end, args=(pod, signal.SIGTERM)).start()

    def job(self, name: str) -> dict[str, Any]:
        with self._lock:
            job = self.objects["Job", name]
            done = {
                _index(p) for p, _ in self._pods.values() if p["status"]["phase"] == "Succeeded"
            }
            over = len(done) == job["spec"]["completions"]
            conditions = [{"type": "Complete", "status": "True"}] if over else []
            return {**job, "status": {"conditions": conditions}}

    def pods(self, job: str) -> list[dict[str, Any]]:
        with self._lock:
            return [pod for pod, _ in self._pods.values() if _job_of(pod) == job]

    def log(self, pod: str) -> str:
        file = self.folder / f"{pod}.log"
        if not file.exists():
            raise KeyError(pod)
        return file.read_text()

    # The controller of Jobs, and the nodes.

    def reconcile(self) -> None:
        """Run further controllers, with the lock."""

    def _tend(self) -> None:
        while not self._over.wait(_POLL_S):
            with self._lock:
                self.reconcile()
                for (kind, name), job in list(self.objects.items()):
                    if kind == "Job":
                        self._have_pods(name, job)
                for pod, process in self._pods.values():
                    if process is not None and process.poll() is not None:
                        failed = process.returncode != 0
                        pod["status"] = {"phase": "Failed" if failed else "Succeeded"}
                        pod["status"]["message"] = str(process.returncode)

    def _have_pods(self, name: str, job: dict[str, Any]) -> None:
        pods = self.pods(name)
        if has_failed(job, pods):
            return
        for index in range(job["spec"]["completions"]):
            own = [pod for pod in pods if _index(pod) == index]
            if all(pod["status"]["phase"] == "Failed" for pod in own):
                self._begin(name, index, self._begun[name, index], job)
                self._begun[name, index] += 1
        for pod, process in list(self._pods.values()):
            if process is None and pod["status"]["phase"] == "Pending":
                self._run(pod, job)

    def _begin(self, name: str, index: int, number: int, job: dict[str, Any]) -> None:
        template = job["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{index}-{number:05}",
                "labels": {**template["metadata"]["labels"], "job-name": name},
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        self._pods[pod["metadata"]["name"]] = pod, None

    def _run(self, pod: dict[str, Any], job: dict[str, Any]) -> None:
        if self.is_full:
            message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
            unscheduled = {"type": "PodScheduled", "status": "False", "message": message}
            pod["status"]["conditions"] = [{**unscheduled, "reason": "Unschedulable"}]
            return
        if self.image_fault:
            waiting = {"reason": self.image_fault, "message": "no such image"}
            worker = {"name": "worker", "state": {"waiting": waiting}}
            common = {"ready": False, "restartCount": 0, "image": "", "imageID": ""}
            pod["status"]["containerStatuses"] = [{**worker, **common}]
            return
        mounted = [v["secret"] for v in pod["spec"]["volumes"] if "secret" in v]
        secret = self.objects.get(("Secret", _job_of(pod)))
        if mounted and secret is None:
            return  # the volume cannot be mounted yet
        name = pod["metadata"]["name"]
        volume = self.folder / name
        volume.mkdir(mode=0o700)
        for key, content in secret["stringData"].items() if mounted and secret else ():
            (volume / key).write_text(content)
            (volume / key).chmod(mounted[0]["defaultMode"])
        (container,) = pod["spec"]["containers"]
        words = [*container["command"], *container.get("args", ())]
        command = [word.replace(_WHERE, str(volume)) for word in words]
        env = {v["name"]: self._address(v["value"]) for v in container.get("env", [])}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [shutil.which(command[0]) or command[0], *command[1:]],
                cwd=self.images.get(container["image"]),
                env={**os.environ, **env, "JOB_COMPLETION_INDEX": str(_index(pod))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pod["status"] = {"phase": "Running"}
        self._pods[name] = pod, process

    def _address(self, text: str) -> str:
        """Return the loopback address for the host name of a pod, or the text."""
        host, _, domain = text.partition(".")
        service = self.objects.get(("Service", domain), {"spec": {}})["spec"]
        names = {
            f"{_job_of(pod)}-{_index(pod)}"
            for pod, _ in self._pods.values()
            if service.get("clusterIP") == "None"
            and pod["spec"].get("subdomain") == domain
            and service["selector"].items() <= pod["metadata"]["labels"].items()
        }
        return "127.0.0.1" if host in names else text

    def _end(self, name: str, number: signal.Signals) -> None:
        with self._lock:
            process = self._pods.pop(name)[1]
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def has_failed(job: dict[str, Any], pods: list[dict[str, Any]]) -> bool:
    """Return True if more pods of a Job have failed than its `backoffLimit` allows.

    Exit codes that its `podFailurePolicy` ignores do not count.
    """
    rules = job["spec"].get("podFailurePolicy", {"rules": []})["rules"]
    ignored = {str(v) for rule in rules for v in rule.get("onExitCodes", {"values": []})["values"]}
    failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
    counted = [pod for pod in failed if pod["status"]["message"] not in ignored]
    return len(counted) > job["spec"]["backoffLimit"]


def _owned_by(given: dict[str, Any], job: str) -> bool:
    return any(owner["name"] == job for owner in given["metadata"].get("ownerReferences", ()))


def _job_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["job-name"])


def _index(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


class _Http(ThreadingHTTPServer):
    def __init__(self, double: Server) -> None:
        self.double = double
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        *_, namespace, plural = urlsplit(self.path).path.split("/")
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if plural == self.server.double.denies:
            self._refuse(403, "Forbidden", f'{plural} is forbidden: User "me" cannot create')
            return
        try:
            self._answer(201, self.server.double.create(namespace, self._kind(plural), given))
        except kubernetes_validate.ValidationError as error:
            self.server.double.refused.append(str(error))
            self._refuse(400, "BadRequest", f"strict decoding error: {error.message}")

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        parts = split.path.split("/")
        try:
            if parts[-1] == "pods":
                (selector,) = parse_qs(split.query)["labelSelector"]
                items = self.server.double.pods(selector.removeprefix("job-name="))
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": items})
            elif parts[-1] == "log":
                self._send(200, self.server.double.log(parts[-2]).encode(), "text/plain")
            else:
                self._answer(200, self.server.double.job(parts[-1]))
        except KeyError:
            self._refuse(404, "NotFound", f'"{parts[-1]}" not found')

    def do_DELETE(self) -> None:
        *_, plural, name = urlsplit(self.path).path.split("/")
        assert parse_qs(urlsplit(self.path).query)["propagationPolicy"] == ["Background"]
        try:
            self.server.double.delete(self._kind(plural), name)
        except KeyError:
            self._refuse(404, "NotFound", f'{plural}.batch "{name}" not found')
            return
        self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _kind(self, plural: str) -> str:
        return str(self.server.double.kinds[plural])

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        self._send(code, json.dumps(content).encode(), "application/json")

    def _refuse(self, code: int, reason: str, message: str) -> None:
        own = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        self._answer(code, {**own, "message": message, "reason": reason, "code": code})

    def _send(self, code: int, content: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
