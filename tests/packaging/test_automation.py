"""Workflow and hooks, which run the commands of the Makefile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_runs_make_on_all_python_versions() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {match[1] for command in commands for match in re.finditer(r"make (\w+)", command)}
    assert targets == {"demo", "test"}
    assert all(f"\n{target}:" in MAKEFILE for target in targets)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    versions = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert all(job["strategy"]["matrix"]["python"] == versions for job in jobs.values())


def test_hooks_run_the_commands_of_make_check() -> None:
    (repo,) = read(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        command = hook["entry"].removesuffix(" --force-exclude")
        assert command.replace(".venv/bin/", "$(BIN)/") in MAKEFILE, hook["id"]
