"""Alerts of runs to functions and commands of the user."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from queue import Queue
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist.execution import alerts
from nbdist.execution.alerts import Alert, RunAlerts
from nbdist.records import Finding
from tests.runs import new_state, recover

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.records import RunState

pytestmark = pytest.mark.processes

LIMIT_S = 20
NOT_FINITE = Finding(topic="nan", text="`loss` is nan at step 4, epoch 1", warning=True)
STORE = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"


def diverged(name: str = "") -> RunState:
    return new_state(name=name, findings=(NOT_FINITE,))


@pytest.fixture(autouse=True)
def no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_functions", {})


@pytest.fixture
def received() -> Queue[Alert]:
    queue: Queue[Alert] = Queue()

    @nbdist.on_alert
    def receive(alert: Alert) -> None:
        queue.put(alert)

    return queue


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        ("finished", "", "finished after 1 min 05 s"),
        ("stopped", "", "stopped after 1 min 05 s"),
        ("failed", "ValueError on rank 1\nmore", "failed after 1 min 05 s: ValueError on rank 1"),
    ],
)
def test_the_end_of_a_run_is_an_alert(
    received: Queue[Alert], status: str, error: str, text: str
) -> None:
    state = new_state(
        status=status, error=error, began=100.0, ended=165.0, name="big", notebook="n"
    )
    RunAlerts("").ended(state)
    alert = received.get(timeout=LIMIT_S)
    assert (alert.event, alert.text) == (status, text)
    assert (alert.run, alert.name, alert.notebook) == (state.id, "big", "n")


def test_a_run_whose_kernel_ended_has_no_alert(received: Queue[Alert]) -> None:
    RunAlerts("").ended(new_state(status="lost"))
    RunAlerts("").ended(new_state(status="finished", ended=1e9))
    assert received.get(timeout=LIMIT_S).event == "finished"


def test_a_recovery_is_an_alert(received: Queue[Alert]) -> None:
    RunAlerts("").recovered(new_state(), recover(12, 10, 3.0))
    text = "recovered rank 1 (rank 1 died after step 12), and continues after step 10"
    assert received.get(timeout=LIMIT_S).text == text


def test_the_first_loss_that_is_not_finite_is_an_alert(received: Queue[Alert]) -> None:
    sender = RunAlerts("")
    sender.look(new_state(findings=(Finding(topic="starved", text="slow data"),)))
    for _ in range(3):
        sender.look(diverged())
    sender.ended(new_state(status="finished", ended=1e9))
    events = [received.get(timeout=LIMIT_S).event for _ in range(2)]
    assert events == ["not finite", "finished"]
    assert received.empty()


def test_a_slow_function_receives_alerts_in_order_and_one_at_a_time() -> None:
    calls: Queue[str] = Queue()
    may_end = threading.Event()

    @nbdist.on_alert
    def slow(alert: Alert) -> None:
        calls.put(f"begins {alert.event}")
        if alert.event == "recovered":
            may_end.wait(LIMIT_S)
        calls.put(f"ends {alert.event}")

    sender = RunAlerts("")
    sender.recovered(new_state(), recover(12, 10, 3.0))
    assert calls.get(timeout=LIMIT_S) == "begins recovered"
    sender.look(diverged())
    sender.ended(new_state(status="finished", ended=1e9))
    may_end.set()
    assert [calls.get(timeout=LIMIT_S) for _ in range(5)] == [
        "ends recovered",
        "begins not finite",
        "ends not finite",
        "begins finished",
        "ends finished",
    ]


def test_a_command_receives_the_alert_as_json(tmp_path: Path) -> None:
    target = tmp_path / "an alert"
    RunAlerts(f'"{sys.executable}" -c "{STORE}" "{target}"').look(diverged("it's; $(big)"))
    alerts._wait()
    found = json.loads(target.read_text())
    assert (found["event"], found["name"]) == ("not finite", "it's; $(big)")
    assert found["text"] == NOT_FINITE.text


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/program", "No such file"),
        ('"unclosed', "No closing quotation"),
        (
            f"{sys.executable} -c \"import sys; sys.exit('no mail server')\"",
            "status 1: no mail server",
        ),
    ],
    ids=["missing", "quotes", "status"],
)
def test_a_command_that_fails_prints_one_line(
    capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    RunAlerts(command).look(diverged("big"))
    alerts._wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nbdist: the alert of big was not delivered: ")
    assert reason in line


def test_a_function_that_raises_prints_one_line_and_others_are_called(
    capsys: pytest.CaptureFixture[str], received: Queue[Alert]
) -> None:
    @nbdist.on_alert
    def fail(alert: Alert) -> None:
        raise RuntimeError("no network")

    RunAlerts("").look(diverged("big"))
    assert received.get(timeout=LIMIT_S).event == "not finite"
    alerts._wait()
    (line,) = capsys.readouterr().err.splitlines()
    assert "fail raised RuntimeError: no network" in line


def test_a_function_that_hangs_delays_nothing(received: Queue[Alert]) -> None:
    held = threading.Event()

    @nbdist.on_alert
    def hang(alert: Alert) -> None:
        held.wait(LIMIT_S)

    RunAlerts("").look(diverged())
    assert received.get(timeout=LIMIT_S).event == "not finite"
    held.set()


def test_a_function_replaces_one_of_the_same_name(received: Queue[Alert]) -> None:
    first = list(alerts._functions.values())

    @nbdist.on_alert
    def other(alert: Alert) -> None: ...

    assert len(alerts._functions) == 2
    nbdist.on_alert(first[0])
    assert len(alerts._functions) == 2


def test_other_values_than_functions_are_refused() -> None:
    with pytest.raises(nbdist.UsageError, match="takes a function, not str"):
        nbdist.on_alert("mail me")  # type: ignore[type-var]


def test_a_program_that_ends_delivers_its_last_alert(tmp_path: Path) -> None:
    program = f"""
import time, nbdist
from nbdist.execution.alerts import RunAlerts
from tests.runs import new_state
def slow(alert):
    time.sleep(0.5)
    open({str(tmp_path / "done")!r}, "w").close()
nbdist.on_alert(slow)
RunAlerts("").ended(new_state(status="finished", ended=1e9))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert (tmp_path / "done").exists()
