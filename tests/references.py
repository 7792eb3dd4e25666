"""Reference training by hand on one device. Step cells must produce the same results.

Outcomes are stored in build/references, because they depend only on the programs, the environment
and the installed packages. Programs that use nbdist, the tests or temporary files run each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import nbdist

LIMIT_S = 300
STORE = Path(__file__).parents[1] / "build" / "references"
FRAMEWORK_VARIABLES = ("JAX_", "KERAS_", "TF_", "XLA_")
"""Prefixes of environment variables that change the numbers of a program."""

_NOT_STORED = re.compile(rf"\b(nbdist|tests)\b|{re.escape(tempfile.gettempdir())}")

_PROGRAM = textwrap.dedent("""
    import json, sys
    import numpy as np

    def rows(tree, part):
        return tuple(rows(a, part) for a in tree) if isinstance(tree, tuple) else tree[part]

    outcomes = {}
    trainings = json.load(sys.stdin)
    for name, training in trainings.items():
        space = {}
        exec(training["setup"], space)
        step = compile(training["step"], name, "exec")
        reports = {report: [] for report in training["reports"]}
        for epoch in range(training["epochs"]):
            for start in range(0, len(space["train"][1]), training["batch"]):
                space["batch"] = rows(space["train"], slice(start, start + training["batch"]))
                exec(step, space)
                for report, values in reports.items():
                    values.append(float(space[report]))
        outcomes[name] = {"reports": reports, "after": eval(training["after"], space)}
    print(json.dumps(outcomes))
""")


_PLAIN = textwrap.dedent("""
    import importlib, json, os, sys

    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        outcomes = {}
        for name, code in json.loads(line).items():
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(2, 1)
                space = {}
                exec(compile(code, name, "exec"), space)
                with open(writing, "w") as pipe:
                    json.dump(space["outcome"], pipe)
                os._exit(0)
            os.close(writing)
            with open(reading) as pipe:
                outcomes[name] = json.loads(pipe.read() or "null")
            _, status = os.wait()
            if status:
                outcomes = {}
                break
        print(json.dumps(outcomes), flush=True)
""")
"""Program that imports modules once, and runs each program in a fork of itself.

It reads programs by name as a line of JSON and writes their outcomes as a line, which is empty if a
program failed. The programs' own output and errors are in its standard error.
"""


class ForkServer:
    """A process that has imported the modules of programs.

    Args:
        modules: modules that it imports.
        env: further environment variables.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "errors")
        errors = os.open(self._errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PLAIN, *modules],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        os.close(errors)

    def run(self, programs: Mapping[str, str]) -> Any:
        """Return the outcomes of programs by name."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.truncate(self._errors, 0)
        limit = threading.Timer(LIMIT_S, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(programs) + "\n")
            self.process.stdin.flush()
            outcomes = json.loads(self.process.stdout.readline() or "{}")
        finally:
            limit.cancel()
        errors = self._errors.read_text(encoding="utf-8")
        assert outcomes, errors or f"the process ended, perhaps after {LIMIT_S} s"
        return outcomes

    def stop(self) -> None:
        with self.process:
            self.process.kill()
        self._folder.cleanup()


_servers: dict[tuple[Any, ...], ForkServer] = {}
"""Running servers by modules and environment."""


def server_processes() -> list[psutil.Process]:
    """Return the processes that `stop_servers` ends."""
    return [psutil.Process(each.process.pid) for each in _servers.values()]


def stop_servers() -> None:
    while _servers:
        _servers.popitem()[1].stop()


class Training(msgspec.Struct, frozen=True):
    """Texts of a training: a setup that assigns `train`, and a step that reads `batch` and reports.

    Attributes:
        setup: code that runs once.
        step: code that runs for every batch.
        after: expression for the JSON values to compare at the end.
        epochs: number of passes through the data.
        batch: number of samples in a batch.
        reports: names of the scalars that the step reports.
    """

    setup: str
    step: str
    after: str
    epochs: int
    batch: int
    reports: tuple[str, ...] = ("loss",)


class Outcome(msgspec.Struct, frozen=True):
    """Values that every step reported, by name, and the value of `after`."""

    reports: dict[str, list[float]]
    after: Any


def by_hand(trainings: dict[str, Training]) -> dict[str, Outcome]:
    """Run all trainings one after the other in a process without nbdist."""
    texts = msgspec.json.encode(trainings).decode()
    key = _key(_PROGRAM, texts)
    found = _stored(key)
    if found is None:
        found = _train(texts)
        _store(key, found)
    return msgspec.convert(found, dict[str, Outcome])


def _train(trainings: str) -> Any:
    """Return the outcomes of trainings, given and returned as JSON values."""
    with tempfile.TemporaryDirectory() as compiled:  # compile once for all optimizers
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=trainings,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def plainly(programs: dict[str, str], *modules: str, **env: str) -> dict[str, Any]:
    """Return `outcome` of each program. Each runs in its own process without a cluster.

    Args:
        programs: program texts by name.
        modules: modules that all programs import. One process imports them for all programs of the
            suite, which are forks of it.
        env: further environment variables.
    """
    key = _key(_PLAIN, json.dumps(programs), *modules, json.dumps(env))
    found = _stored(key)
    if found is None:
        found = _run(programs, modules, env)
        _store(key, found)
    outcomes: dict[str, Any] = found
    return outcomes


def _run(programs: dict[str, str], modules: Sequence[str], env: dict[str, str]) -> Any:
    variables = {k: v for k, v in os.environ.items() if k.startswith(FRAMEWORK_VARIABLES)}
    key = (*modules, *sorted({**variables, **env}.items()))
    server = _servers.get(key)
    if server is not None and server.process.poll() is not None:  # as after LIMIT_S
        server.stop()
        server = None
    if server is None:
        _servers[key] = server = ForkServer(modules, env)
    return server.run(programs)


def _key(*texts: str) -> str:
    """Return the name of the stored outcome of these texts. Empty if it must not be stored."""
    if any(map(_NOT_STORED.search, texts)):
        return ""
    packages = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    variables = sorted(
        item for item in os.environ.items() if item[0].startswith(FRAMEWORK_VARIABLES)
    )
    parts = [texts, packages, variables, sys.version, os.cpu_count()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stored(key: str) -> Any:
    """Return a stored outcome, or None."""
    path = STORE / f"{key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if key and path.exists() else None


def _store(key: str, outcome: Any) -> None:
    if key:
        STORE.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=STORE, encoding="utf-8", delete=False) as part:
            json.dump(outcome, part)
        Path(part.name).replace(STORE / f"{key}.json")  # another process may read it


def reported(run: nbdist.Run) -> dict[str, list[float]]:
    """Return the values that every step of a run reported, by name: the mean over ranks."""
    found: dict[str, dict[int, list[float]]] = {}
    for m in run.metrics:
        for name, value in (m.own | m.shared).items():
            if m.step > 0:
                found.setdefault(name, {}).setdefault(m.step, []).append(value)
    return {
        name: [float(np.mean(values)) for _, values in sorted(steps.items())]
        for name, steps in found.items()
    }
