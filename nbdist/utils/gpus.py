"""The NVIDIA GPUs of a host."""

from __future__ import annotations

import os
import shutil
import subprocess

_NVIDIA_SMI_TIMEOUT_S = 10


def visible_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return tuple(word.strip() for word in allowed.split(",") if word.strip() not in ("", "-1"))
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()
