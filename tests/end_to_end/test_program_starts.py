"""Exported programs under several launchers, and their continuation from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import kubernetes
import numpy as np
import psutil
import pytest
import yaml

import nbdist
from nbdist.jobs import folder, kubernetes_files
from nbdist.jobs.launch_files import launch_files
from nbdist.utils.polling import repeat_until
from tests import clusters
from tests.end_to_end.test_exported_programs import (
    LIMIT_S,
    SINGLE_TRAININGS,
    TRAININGS,
    command,
    export,
    launch,
    run_cells,
    with_results,
)
from tests.jobset_double import JobSetServer
from tests.kubernetes_double import Server
from tests.ports import free_port, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOSTS = 2
RARE = ("mirrored step", *SINGLE_TRAININGS)
IMAGE = "registry/train:1"


def of_tensorflow(rank: int, ports: Sequence[int]) -> dict[str, str]:
    workers = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


@pytest.fixture(
    scope="module",
    params=["pjrt step", *(pytest.param(n, marks=pytest.mark.full) for n in RARE)],
)
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Provide an exported program that stores its results, and its results under `nbdist run`."""
    training = {**TRAININGS, **SINGLE_TRAININGS}[request.param]
    target = tmp_path_factory.mktemp("exported") / "train"
    (target.parent / "pods").mkdir()
    framework = "jax" if training.strategy == "pjrt" else "tensorflow"
    with clusters.cluster(hosts=HOSTS, framework=framework) as cluster:
        run_cells(cluster, training)
        chosen: dict[str, Any] = {"run": "", "cell": len(training.cells)}
        pods = nbdist.Batch("kubernetes", image=IMAGE)
        export(cluster, target.parent / "pods" / "train", launch=pods, **chosen)
        export(cluster, target, launch=nbdist.Batch("mpi"), **chosen)
    (target.parent / "pods" / "train" / "job.yaml").rename(target / "job.yaml")
    with_results(target, training)
    ended = launch(target)
    assert ended.returncode == 0, ended.stderr
    (target.parent / "expected").mkdir()
    for rank in range(HOSTS):
        (target / f"result{rank}.npz").rename(target.parent / "expected" / f"result{rank}.npz")
    return target


def assert_results_are_equal(target: Path) -> None:
    for rank in range(HOSTS):
        found, expected = (
            np.load(place / f"result{rank}.npz") for place in (target, target.parent / "expected")
        )
        for name in ("loss", "weights"):
            np.testing.assert_array_equal(found[name], expected[name])
        (target / f"result{rank}.npz").unlink()


def lengthened(target: Path) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Let a program train for 100 epochs.

    Returns:
        Its further arguments, and the results of each rank without a stop.
    """
    path = target / folder.PROGRAM
    text = path.read_text()
    epochs = ("--epochs", "100") if "epochs" in text else ()
    if not epochs:
        path.write_text(text.replace("range(2)", "range(100)"))
    ended = launch(target, *epochs)
    assert ended.returncode == 0, ended.stderr
    expected = [dict(np.load(target / f"result{rank}.npz")) for rank in range(HOSTS)]
    (target / "result0.npz").unlink()
    return epochs, expected


def assert_weights_are(expected: Sequence[dict[str, Any]], target: Path) -> None:
    for rank, values in enumerate(expected):
        found = np.load(target / f"result{rank}.npz")
        np.testing.assert_array_equal(found["weights"], values["weights"])


@pytest.mark.full  # test_program_deaths.py starts ranks by this variable
def test_ranks_find_each_other_by_the_variable_of_tensorflow(program: Path) -> None:
    ports = free_ports(HOSTS)
    ranks = [
        subprocess.Popen(
            [sys.executable, folder.PROGRAM],
            cwd=program,
            env={**os.environ, **of_tensorflow(rank, ports)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(HOSTS)
    ]
    try:
        output = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * HOSTS, output
    assert_results_are_equal(program)


def test_hosts_with_different_texts_are_named(tmp_path: Path) -> None:
    """A folder was copied to each host, and one copy is old."""
    for rank, rate in enumerate((1, 2)):
        place = tmp_path / str(rank)
        (place / "models").mkdir(parents=True)
        (place / folder.PROGRAM).write_text(f"import models\n{STATELESS}")
        (place / "models" / "__init__.py").write_text(f"rate = {rate}\n")
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, folder.PROGRAM],
            cwd=tmp_path / str(rank),
            env={**os.environ, **address, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(HOSTS)
    ]
    try:
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    for text in errors:
        assert (
            "StartError: rank 1 has another text of models/__init__.py than rank 0: copy the "
            "program's folder to all hosts again"
        ) in text


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[kubernetes.client.ApiClient]:
    """Provide a client of the double, as a user's kubeconfig configures it."""
    configuration = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(
        str(server.kubeconfig("research")), client_configuration=configuration
    )
    with kubernetes.client.ApiClient(configuration) as client:
        yield client


@contextlib.contextmanager
def pods_of(
    image: Path, monkeypatch: pytest.MonkeyPatch, *words: str, failed: int = 0
) -> Iterator[Server]:
    """Apply `job.yaml` to a double of Kubernetes, as kubectl does, and wait until the Job ends.

    The double validates the objects and runs the pods' commands. The body runs after the start.

    Args:
        image: folder of the program in the containers.
        words: further arguments of the program.
        failed: number of pods that must fail before others complete the Job.
    """
    port = free_port()  # a pod has its own network
    path = image / "job.yaml"
    service, job = yaml.safe_load_all(
        path.read_text().replace(str(kubernetes_files.PORT), str(port))
    )
    job["spec"]["template"]["spec"]["containers"][0]["args"] += words
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (image.parent / "kubernetes").mkdir()
    with Server(image.parent / "kubernetes") as server:
        server.images[IMAGE] = image
        with client_of(server) as client:
            kubernetes.utils.create_from_yaml(
                client, yaml_objects=[service, job], namespace="research"
            )
            yield server
            jobs = kubernetes.client.BatchV1Api(client)

            def has_ended() -> bool:
                is_complete = jobs.read_namespaced_job("train", "research").status.conditions
                return bool(is_complete) or len(phases(server)) > 2 * HOSTS

            assert repeat_until(has_ended, LIMIT_S), logs(server)
        assert phases(server) == ["Failed"] * failed + ["Succeeded"] * HOSTS, logs(server)
        assert not server.refused


def phases(server: Server, job: str = "train") -> list[str]:
    """Return the phases of all pods, sorted."""
    return sorted(pod["status"]["phase"] for pod in server.pods(job))


def logs(server: Server, job: str = "train") -> list[str]:
    return [server.log(pod["metadata"]["name"]) for pod in server.pods(job)]


def test_pods_of_an_indexed_job_give_the_numbers(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "train"
    shutil.copytree(program, image)
    with pods_of(image, monkeypatch):
        pass
    assert (image / "checkpoints").is_dir()
    shutil.copytree(program.parent / "expected", tmp_path / "expected")
    assert_results_are_equal(image)


@pytest.mark.full
def test_job_continues_after_the_eviction_of_a_pod(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "train"
    shutil.copytree(program, image)
    epochs, expected = lengthened(image)
    with pods_of(image, monkeypatch, *epochs, failed=HOSTS) as server:
        assert repeat_until(
            lambda: len(phases(server)) == HOSTS and "epoch 3 " in "".join(logs(server)), LIMIT_S
        )
        server.kill("train-1-00000", signal.SIGTERM)
    assert_weights_are(expected, image)


@pytest.mark.full  # tests/jobs/test_launch_files.py covers both kinds
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_jobset_starts_all_ranks_again_after_a_death(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Literal["jobset", "trainjob"],
) -> None:
    """Apply both kinds to doubles of their controllers. No checkpoint was saved before."""
    image = tmp_path / "train"
    shutil.copytree(program, image)
    epochs, expected = lengthened(image)
    batch = nbdist.Batch("kubernetes", image=IMAGE, kind=kind)
    common = {"name": "train", "hosts": [""] * HOSTS, "checkpoint": True, "python": "3.11"}
    written = launch_files(batch, **common)["job.yaml"]
    port = free_port()
    objects = [*yaml.safe_load_all(written.replace(str(kubernetes_files.PORT), str(port)))]
    for container in containers_of(objects[0]):
        container["args"] += epochs
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with JobSetServer(tmp_path / "kubernetes") as server:
        server.folder.mkdir()
        server.images[IMAGE] = image
        with client_of(server) as client:
            api = kubernetes.client.CustomObjectsApi(client)
            for given in objects:
                group, version = given["apiVersion"].split("/")
                plural = f"{given['kind'].lower()}s"
                api.create_namespaced_custom_object(group, version, "research", plural, given)
        job = "train-node-0"
        assert repeat_until(
            lambda: len(phases(server, job)) == HOSTS and "epoch 3 " in "".join(logs(server, job)),
            LIMIT_S,
        )
        server.kill(f"{job}-1-00000", signal.SIGKILL)
        done = ["Succeeded"] * HOSTS
        assert repeat_until(lambda: phases(server, job) == done, LIMIT_S), logs(server, job)
        assert server.restarts == {"train": 1}
    assert_weights_are(expected, image)


def containers_of(given: Any) -> Iterator[dict[str, Any]]:
    """Yield the containers in the templates of an object."""
    if isinstance(given, dict):
        yield from given.get("containers", ())
        given = list(given.values())
    for part in given if isinstance(given, list) else ():
        yield from containers_of(part)


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="mpiexec not installed (openmpi-bin)")
def test_open_mpi_starts_a_program(program: Path) -> None:
    folder_of_python = Path(sys.executable).parent
    ended = subprocess.run(
        ["sh", "mpirun.sh"],
        cwd=program,
        env={
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "MASTER_PORT": str(free_port()),
            "PATH": f"{folder_of_python}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert_results_are_equal(program)


@pytest.mark.full  # test_two_trainings.py stops a program and continues it
@pytest.mark.parametrize("receiver", ["rank 1", "nbdist run"])
def test_program_saves_and_exits_after_sigterm(
    program: Path, tmp_path: Path, receiver: str
) -> None:
    """A program that continues after SIGTERM has the numbers and lists of one without a stop."""
    target = tmp_path / "train"
    shutil.copytree(program, target)
    epochs, expected = lengthened(target)
    is_loop = not epochs
    words = (*epochs, "--checkpoint", str(tmp_path / "saved"))
    running = subprocess.Popen(
        command(*words), cwd=target, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    while not (line := running.stdout.readline()).startswith("[0] epoch 3 "):
        assert line, "the program ended"
    process = psutil.Process(running.pid)
    if receiver != "nbdist run":
        (process,) = (c for c in process.children() if c.environ()["RANK"] == receiver[-1])
    process.terminate()
    out, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 75, err
    assert "stopped by SIGTERM after step" in err
    assert not re.search(r"rank \d failed", err)
    assert "epoch 100" not in out
    assert not (target / "result0.npz").exists()
    ended = launch(target, *words)
    assert ended.returncode == 0, ended.stderr
    assert "epoch 3 " not in ended.stdout
    for rank, values in enumerate(expected):
        found = np.load(target / f"result{rank}.npz")
        for name in ("weights", "loss") if is_loop else ("weights",):
            np.testing.assert_array_equal(found[name], values[name])


STATELESS = """
import time
import jax.numpy as jnp
import numpy as np
import nbdist

job = nbdist.script("pjrt", seed=1)
train = np.ones((64, 4), np.float32)


def train_step(batch):
    time.sleep(0.01)
    return jnp.mean(batch)


job.train(train_step, data="train", epochs=100000, batch=16, checkpoint="saved", resume=True)
job.close()
"""
"""Program whose steps carry no arrays, so that it has no checkpoint to continue from."""


@pytest.mark.parametrize("receiver", ["rank 1", pytest.param("nbdist run", marks=pytest.mark.full)])
def test_program_without_a_checkpoint_does_not_ask_for_another_start(
    tmp_path: Path, receiver: str
) -> None:
    (tmp_path / folder.PROGRAM).write_text(STATELESS)
    running = subprocess.Popen(
        command(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    while not (line := running.stdout.readline()).startswith("[0] epoch 3 "):
        assert line, "the program ended"
    process = psutil.Process(running.pid)
    if receiver == "rank 1":
        (process,) = (c for c in process.children() if c.environ().get("RANK") == "1")
    process.terminate()
    _, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 128 + signal.SIGTERM, err
    assert re.search(r"stopped by SIGTERM after step \d+: it has no checkpoint", err)
    assert "failed" not in err


@pytest.mark.full  # test_two_trainings.py continues a program too
def test_program_continues_from_its_checkpoint(program: Path, tmp_path: Path) -> None:
    """One epoch, and then two from its checkpoint, give the weights of two epochs."""
    target = tmp_path / "train"
    shutil.copytree(program, target)
    path = target / folder.PROGRAM
    text = path.read_text()
    for epochs in ("1", "2"):
        words = ["--checkpoint", str(tmp_path / "saved")]
        if '"--epochs"' in text:
            words += ["--epochs", epochs]
        else:
            path.write_text(text.replace("range(2)", f"range({epochs})"))
        ended = launch(target, *words)
        assert ended.returncode == 0, ended.stderr
    for rank in range(HOSTS):
        found = np.load(target / f"result{rank}.npz")
        expected = np.load(program.parent / "expected" / f"result{rank}.npz")
        np.testing.assert_array_equal(found["weights"], expected["weights"])
