"""Reference training by hand on one device. Step cells must produce the same results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    import nbdist

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
    outcomes = {}
    for name, code in json.load(sys.stdin).items():
        reading, writing = os.pipe()
        if os.fork() == 0:
            space = {}
            exec(compile(code, name, "exec"), space)
            with open(writing, "w") as pipe:
                json.dump(space["outcome"], pipe)
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            outcomes[name] = json.load(pipe)
        os.wait()
    print(json.dumps(outcomes))
""")


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
    with tempfile.TemporaryDirectory() as compiled:  # compile once for all optimizers
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": compiled,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=msgspec.json.encode(trainings).decode(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return msgspec.convert(found, dict[str, Outcome])


def plainly(programs: dict[str, str], *modules: str, **env: str) -> dict[str, Any]:
    """Return `outcome` of each program. Each runs in its own process without a cluster.

    Args:
        programs: program texts by name.
        modules: modules that all programs import. The parent process imports them once, before it
            forks.
        env: further environment variables.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PLAIN, *modules],
        input=json.dumps(programs),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


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
