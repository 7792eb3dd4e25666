"""The NVIDIA GPUs of a host."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that CUDA uses."""

_NVIDIA_SMI_TIMEOUT_S = 10
_NAME = re.compile(r"\d+|GPU-\S+|MIG-\S+")
_LISTED_GPU = re.compile(r"GPU (\d+): ")
_LISTED_SLICE = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)")


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    A scheduler or the user may have set this variable. As in CUDA, its first invalid name ends the
    list, and an empty value allows no GPU. Without it, GPUs that are divided by MIG count as their
    slices.
    """
    allowed = os.environ.get(VISIBLE_GPUS)
    if allowed is not None:
        words = (word.strip() for word in allowed.split(","))
        return tuple(itertools.takewhile(_NAME.fullmatch, words))
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        answer = subprocess.run(
            [program, "-L"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ()
    return _listed(answer.stdout) if answer.returncode == 0 else ()


def is_slice(gpu: str) -> bool:
    """Return True if a name of CUDA_VISIBLE_DEVICES is that of a MIG slice."""
    return gpu.startswith("MIG-")


def _listed(text: str) -> tuple[str, ...]:
    """Return the GPUs of `nvidia-smi -L`, and the slices in place of a GPU that has some."""
    found: list[str] = []
    whole = ""
    for line in text.splitlines():
        if gpu := _LISTED_GPU.match(line):
            whole = gpu[1]
            found.append(whole)
        elif part := _LISTED_SLICE.match(line):
            if found[-1:] == [whole]:
                found.pop()
            found.append(part[1])
    return tuple(found)
