"""Alerts about runs, for mail and chat: calls of functions, and of a command, of the user."""

from __future__ import annotations

import atexit
import shlex
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from nbdist.errors import UsageError
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.records import RecoveryRecord, RunState

COMMAND_LIMIT_S = 30.0
"""Time limit of the command."""

EXIT_LIMIT_S = 10.0
"""Time that an ending process waits for its last alerts."""

Event = Literal["finished", "stopped", "failed", "interrupted", "recovered", "not finite"]

_Function = TypeVar("_Function", bound="Callable[[Alert], object]")


class Alert(msgspec.Struct, frozen=True):
    """An event of a run.

    Attributes:
        event: end of the run (`finished`, `stopped`, `failed` or `interrupted`), `recovered` after
            workers were replaced, or `not finite` for the first loss that is NaN or infinite.
        run: id of the run.
        name: name of the run.
        text: one line that describes the event.
        notebook: path of the notebook; empty if unknown.
        time: seconds since 1970.
    """

    event: Event
    run: str
    name: str
    text: str
    notebook: str
    time: float


_functions: dict[str, Callable[[Alert], object]] = {}
_threads: dict[str, threading.Thread] = {}
"""Thread of the last alert of each function, by its name, and of each command."""


def on_alert(function: _Function) -> _Function:
    """Call a function when a run ends, fails or recovers, or its loss is not finite.

    The calls have threads of their own, so a slow function does not delay the run. A call begins
    when the function has returned from the call before it. If it raises, one line is printed. A
    function replaces an earlier one of the same name.

    Args:
        function: receives an `Alert` with `event`, `run`, `name`, `text`, `notebook` and `time`.

    Returns:
        The function, so that `on_alert` can be a decorator.

    Raises:
        UsageError: the argument is not callable.

    Examples:
        >>> @nbdist.on_alert
        ... def tell(alert):
        ...     print(alert.event, alert.text)
    """
    if not callable(function):
        raise UsageError(f"nbdist.on_alert takes a function, not {type(function).__name__}")
    _functions[_name(function)] = function
    return function


class RunAlerts:
    """Alerts about one run.

    Args:
        command: command of the user, which receives an alert as JSON; empty for none.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._was_finite = True

    def ended(self, state: RunState) -> None:
        """Send the end of the run."""
        if state.status not in ("finished", "stopped", "failed", "interrupted"):
            return
        text = f"{state.status} after {formatting.duration(state.ended - state.began)}"
        reason = state.error.strip().split("\n")[0]
        self._send(state.status, state, f"{text}: {reason}" if reason else text)

    def recovered(self, state: RunState, recovery: RecoveryRecord) -> None:
        """Send a recovery."""
        lost = f"rank {formatting.ranks(recovery.ranks)}"
        text = f"recovered {lost} ({recovery.reason}), and continues after step {recovery.step:,}"
        self._send("recovered", state, text)

    def look(self, state: RunState) -> None:
        """Send the first finding about a value that is not finite."""
        texts = [finding.text for finding in state.findings if finding.topic == "nan"]
        if texts and self._was_finite:
            self._was_finite = False
            self._send("not finite", state, texts[0])

    def _send(self, event: Event, state: RunState, text: str) -> None:
        name = state.name or state.id
        alert = Alert(event, state.id, name, text, state.notebook, time.time())
        for key, function in _functions.items():
            _start(key, _call, function, alert)
        if self._command:
            _start(self._command, _run, self._command, alert)


def _start(receiver: str, target: Callable[..., None], *arguments: object) -> None:
    """Call a function on a thread, after the last call for the same receiver."""
    before = _threads.get(receiver)

    def work() -> None:
        if before is not None:
            before.join()
        target(*arguments)

    thread = _threads[receiver] = threading.Thread(target=work, name="nbdist-alert", daemon=True)
    thread.start()


def _call(function: Callable[[Alert], object], alert: Alert) -> None:
    try:
        function(alert)
    except Exception as error:  # noqa: BLE001 - the boundary: the user's function
        _complain(alert, f"{_name(function)} raised {type(error).__name__}: {error}")


def _run(command: str, alert: Alert) -> None:
    try:
        done = subprocess.run(  # without a shell
            shlex.split(command),
            input=msgspec.json.encode(alert),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _complain(alert, str(error))
        return
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        _complain(alert, f"the command ended with status {done.returncode}: {last}")


def _complain(alert: Alert, reason: str) -> None:
    sys.stderr.write(f"nbdist: the alert of {alert.name} was not delivered: {reason}\n")


def _name(function: Callable[..., object]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


@atexit.register
def _wait() -> None:
    """Let a process that ends with its run deliver the last alerts."""
    until = time.monotonic() + EXIT_LIMIT_S
    for thread in list(_threads.values()):
        thread.join(max(0.0, until - time.monotonic()))
