"""Folder of an exported program. It appears complete, or not at all."""

from __future__ import annotations

import importlib.metadata
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nbdist.errors import UsageError
from nbdist.jobs.launch_files import launch_files
from nbdist.utils import distributions
from nbdist.views import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.jobs.program import Program
    from nbdist.records import ClusterRequest, Plan, ProgramLaunch

PROGRAM, REQUIREMENTS, README = "train.py", "requirements.txt", "README.md"
_SPARE_BYTES = 1 << 20
"""Free space that the files beside the data need at most."""

_FRAMEWORKS = {"mirrored": ("tensorflow", "keras"), "pjrt": ("jax",)}


def check_target(path: str) -> Path:
    """Return the path of a new folder.

    Raises:
        UsageError: it exists, or the folder around it does not.
    """
    target = Path(path).expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise UsageError(f"{path} exists: choose another folder, or remove it first")
    if not target.parent.is_dir():
        raise UsageError(f"{path}: the folder {target.parent} does not exist: create it first")
    return target


def write(
    target: Path,
    program: Program,
    cluster: ClusterRequest,
    remarks: Sequence[str],
    modules: Mapping[Path, Path],
    launch: ProgramLaunch | None = None,
) -> tuple[str, ...]:
    """Write a program to a new folder.

    Args:
        target: path of the folder.
        program: the program.
        cluster: request of the cluster on which its cells ran.
        remarks: notes for the user, such as reasons for other numbers than in the notebook.
        modules: file of each module of the user, by its path beside the program.
        launch: launcher for which to write files; None for none.

    Returns:
        The names of the launch files.

    Raises:
        UsageError: the folder, a table or the launch files cannot be written. Nothing is left of
            the folder.
    """
    launching = launch_files(
        launch,
        name=target.name,
        hosts=[host.name for host in cluster.hosts],
        checkpoint="--checkpoint" in program.flags,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
    )
    sizes = (path.stat().st_size for path in modules.values() if path.exists())
    needed = program.data.size_bytes + sum(sizes) + _SPARE_BYTES
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{target.parent} has {formatting.size(free)} free, and the program needs "
            f"{formatting.size(needed)}: free some space, or choose a folder on another disk"
        )
    if Path(PROGRAM) in modules:
        raise UsageError(
            f"the program imports your module {PROGRAM}, and has that name: rename the module"
        )
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        draft.mkdir()
        if program.data:
            program.data.write(draft)
        texts = {
            PROGRAM: program.text,
            REQUIREMENTS: _requirements(program),
            README: _readme(program, cluster, remarks),
            **launching,
            **{name: _plan_text(plan) for name, plan in program.plans.items()},
        }
        for place, path in modules.items():
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, draft / place)
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        draft.rename(target)
    except OSError as error:
        raise UsageError(
            f"cannot write {target}: {error.strerror or error}; nothing is left of it. Choose "
            "another folder, or free some space"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return tuple(launching)


def _plan_text(plan: Plan) -> str:
    """Return a plan in the format of `%%dist_run --plan`."""
    return msgspec.json.format(msgspec.json.encode(plan)).decode() + "\n"


def _requirements(program: Program) -> str:
    """Return the packages that a program imports, in their installed versions."""
    modules = [m for m in program.imports if m not in sys.stdlib_module_names]
    named = {"nbdist", "numpy", *_FRAMEWORKS[program.strategy]} | distributions.owners(modules)
    lines = sorted(f"{name}=={importlib.metadata.version(name)}" for name in named)
    return "\n".join(lines) + "\n"


def _readme(program: Program, cluster: ClusterRequest, remarks: Sequence[str]) -> str:
    options = "\n".join(f"- `{flag}`: {text}" for flag, text in program.flags.items())
    variables = ", ".join(f"`{name}`" for name in sorted(cluster.env))
    beside = f"\nThe workers of the notebook had these variables: {variables}.\n" * bool(variables)
    beside += "".join(
        f"\n`{name}` is the layout of a cell on {plan.devices} devices ({plan.title}). On another "
        "number of devices, the program plans the layout again.\n"
        for name, plan in program.plans.items()
    )
    beside += "".join(f"\n{text[0].upper()}{text[1:]}.\n" for text in remarks)
    hosts = max(2, len(cluster.hosts))
    return f"""# Training of cell [{program.label}]

nbdist {importlib.metadata.version("nbdist")} exported this program from a notebook.

```
pip install -r requirements.txt
python train.py                          # one process
nbdist run train.py --hosts {hosts}            # {hosts} processes on this machine
```

Files that start it elsewhere, if there are any, contain their own command. Without them, start one
process per host with `TF_CONFIG`, or with `RANK`, `WORLD_SIZE`,
`MASTER_ADDR` and `MASTER_PORT`. Slurm's `srun` needs none of them.

Options:

{options}
{beside}"""
