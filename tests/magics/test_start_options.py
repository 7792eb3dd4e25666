"""Hosts and scheduler that the options of `%dist_start` and others describe."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.errors import UsageError
from nbdist.magics import framework_detection
from nbdist.magics import start_options as module
from nbdist.magics.start_options import (
    EXAMINING,
    RESIZING,
    STARTING,
    chosen,
    examination,
    names_hosts,
    resized,
    started,
)
from nbdist.records import Batch, Host, Sync

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import Option

FILE = "[hosts.gpu1]\n[hosts.gpu2]\n"


def typed(options: tuple[Option, ...], **given: object) -> Namespace:
    """Return the parsed line of a magic with these values."""
    lists: dict[str, object] = {
        option.name: [] for option in options if option.kind == "list" or option.nargs
    }
    return Namespace(**(dict.fromkeys((o.name for o in options), None) | lists | given))


def requested(monkeypatch: pytest.MonkeyPatch, **given: object) -> dict[str, Any]:
    """Return the arguments with which `%dist_start` creates a cluster."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(module, "Cluster", lambda **arguments: found.update(arguments))
    monkeypatch.setattr(framework_detection, "framework", lambda: "jax")
    started(typed(STARTING, **given))
    return found


def test_options_of_all_magics_have_different_names() -> None:
    for options in (STARTING, RESIZING, EXAMINING):
        names = [option.name for option in options]
        assert len(names) == len(set(names))


def test_a_line_without_hosts_names_none() -> None:
    assert not names_hosts(typed(RESIZING, go_on=True))
    assert not names_hosts(typed(RESIZING, python="/usr/bin/python"))
    for given in ({"host": ["4"]}, {"number": 4}, {"hosts": "file"}, {"profile": "lab"}):
        assert names_hosts(typed(RESIZING, **given))


def test_hosts_are_chosen_by_number_or_name() -> None:
    assert chosen(typed(RESIZING, host=["2"])) == (Host(), Host())
    named = chosen(typed(RESIZING, host=["gpu1"], python="/opt/python"))
    assert named == (Host(name="gpu1", python="/opt/python"),)


@pytest.mark.parametrize("given", [{"host": ["2"]}, {"host": ["2", "hosts"]}, {"number": 2}])
def test_a_number_of_workers_stays_a_number(given: dict[str, Any]) -> None:
    assert resized(typed(RESIZING, **given)) == 2


def test_named_hosts_stay_hosts(tmp_path: Path) -> None:
    assert resized(typed(RESIZING, host=["gpu1"])) == (Host(name="gpu1"),)
    file = tmp_path / "hosts.toml"
    file.write_text(FILE)
    both = (Host(name="gpu1"), Host(name="gpu2"))
    assert resized(typed(RESIZING, hosts=str(file))) == both
    assert resized(typed(RESIZING, host=["2"], hosts=str(file))) == both
    assert resized(typed(RESIZING, number=1, hosts=str(file))) == both[:1]


def test_files_to_examine_may_be_omitted() -> None:
    assert examination(typed(EXAMINING, bench=False)) == {
        "data": "",
        "checkpoint": "",
        "bench": False,
    }
    given = typed(EXAMINING, data="*.npy", checkpoint="/kept", bench=True)
    assert examination(given) == {"data": "*.npy", "checkpoint": "/kept", "bench": True}


def test_a_cluster_on_this_machine_has_the_given_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requested(monkeypatch, host=["2"], env=["A=1", "B=2"], spares=1, seed=0)
    assert found == {
        "hosts": (Host(), Host()),
        "batch": None,
        "framework": "jax",
        "env": {"A": "1", "B": "2"},
        "spares": 1,
        "sync": Sync(),
        "seed": 0,
    }
    assert requested(monkeypatch, host=["2"], no_sync=True)["sync"] is False


def test_python_of_other_hosts_needs_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requested(monkeypatch, host=["gpu1"], python="/opt/python")
    assert found["hosts"] == (Host(name="gpu1", python="/opt/python"),)


def test_a_given_framework_is_not_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested(monkeypatch, number=1, framework="both")["framework"] == "both"


def test_a_scheduler_receives_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requested(
        monkeypatch,
        host=["4", "hosts"],
        launcher="slurm",
        partition="long",
        time="2:00",
        gpus_per_host=2,
        submit=["--account=x"],
        python="/opt/python",
    )
    assert found["hosts"] == 4
    assert found["batch"] == Batch(
        launcher="slurm",
        queue="long",
        time="2:00",
        gpus=2,
        options=("--account=x",),
        python="/opt/python",
    )
    assert requested(monkeypatch, number=2, launcher="mpi")["batch"] == Batch(launcher="mpi")


def test_options_of_a_scheduler_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as refused:
        requested(monkeypatch, host=["2"], partition="long", gpus_per_host=2, submit=["x"])
    assert str(refused.value) == (
        "--partition, --gpus-per-host, --submit without --launcher: choose one from "
        "slurm, pbs, sge, lsf, htcondor, mpi, kubernetes"
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"host": ["gpu1"]},
        {"host": ["4"], "hosts": "file"},
        {"number": 4, "profile": "lab"},
    ],
)
def test_a_scheduler_chooses_the_hosts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"^pbs chooses the hosts: use their number"):
        requested(monkeypatch, launcher="pbs", **given)
