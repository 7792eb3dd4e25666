"""Rank, number of processes and address of rank 0 from the variables of launchers."""

from __future__ import annotations

import json

import pytest

from nbdist.errors import StartError
from nbdist.worker.script.placement import Placement, find

ADDRESS = {"MASTER_ADDR": "a", "MASTER_PORT": "5"}
WORKERS = ("a:1", "b:1")


def config(kind: str, index: int, **cluster: object) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    ("environment", "placement"),
    [
        ({}, Placement()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Placement()),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS}, Placement(1, 2, "a:5")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Placement(1, 2, "a:6"),  # torchrun listens at MASTER_PORT
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", **ADDRESS},
            Placement(1, 4, "a:5"),
        ),
        (
            {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", **ADDRESS, "MASTER_ADDR": "::1"},
            Placement(2, 3, "[::1]:5"),
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_JOB_ID": "4097",
                "SLURM_STEP_NODELIST": "gpu[07-08,12],cpu1",
            },
            Placement(1, 2, "gpu07:61441"),
        ),
        (config("worker", 1, worker=WORKERS), Placement(1, 2, "a:1", WORKERS)),
        (
            config("worker", 0, chief=["c:1"], worker=WORKERS[:1]),
            Placement(1, 2, "c:1", ("c:1", "a:1")),
        ),
        (config("worker", 0, worker=WORKERS[:1]), Placement()),
    ],
)
def test_placement(environment: dict[str, str], placement: Placement) -> None:
    assert find(environment) == placement


@pytest.mark.parametrize("names", ["n1", "n1,n2", "n[1-2]", "n[1,3],m2", "n[1-2]x"])
def test_first_host_of_slurm(names: str) -> None:
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": names,
    }
    assert find(environment).host == ("n1x" if names.endswith("x") else "n1")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2", **ADDRESS}, "RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "set MASTER_PORT"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG cannot be read"),
        (config("ps", 0, worker=WORKERS), "task ps 0 is no worker"),
        (config("worker", 2, worker=WORKERS), "task worker 2 is no worker"),
    ],
)
def test_wrong_variables(environment: dict[str, str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        find(environment)
