"""JAX with eight virtual devices, in this process or another one.

Most of the time of these tests is compilation by XLA, so this process has a cache of compiled
programs in build/jax-cache. Each version of Python and JAX has its own, because one cannot read the
files of another. Call `set_up` before JAX creates its backend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

COUNT = 8
_VERSIONS = f"python{sys.version_info[0]}.{sys.version_info[1]}-jax{jax.__version__}"
CACHE = Path(__file__).parents[1] / "build" / "jax-cache" / _VERSIONS
MOST_CACHED_BYTES = 1 << 30
LEAST_COMPILE_S = 0.3
"""Programs that compile faster are not cached. A limit of the size makes JAX lock the cache."""


def set_up() -> None:
    """Configure JAX, unless another folder of tests has already done it."""
    if jax.config.jax_num_cpu_devices == COUNT:
        return
    jax.config.update("jax_num_cpu_devices", COUNT)
    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_compilation_cache_max_size", MOST_CACHED_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_S)


def printed_by(program: str) -> Any:
    """Run a program in a process of its own, and return the last line that it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={COUNT}",
            "NPROC": "16",
        },
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
