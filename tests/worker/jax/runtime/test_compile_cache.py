"""Restarted workers load programs that were compiled before."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import clusters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import nbdist

COUNT = """
import jax, jax.numpy as jnp
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
"""
COMPILE = """
whole = jax.jit(lambda: jnp.arange(8.0) * 3, out_shardings=jax.NamedSharding(mesh, jax.P("data")))()
total = float(jax.jit(lambda x: (x * x).sum())(whole))
total, sum(e.endswith("/cache_hits") for e in events)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[nbdist.Cluster]:
    with clusters.cluster(hosts=2, framework="jax") as running:
        yield running


def test_restarted_workers_load_compiled_programs(cluster: nbdist.Cluster) -> None:
    """JAX's own cache serves only process 0."""
    cluster.run(COUNT)
    cluster.run(COMPILE)
    cluster.restart()
    cluster.run(COUNT)
    run = cluster.run(COMPILE)
    for rank in range(2):
        total, hits = eval(run.results[rank])
        assert total == 9 * 140
        assert hits >= 2, f"rank {rank} compiled again"


def test_cache_folder_of_the_user_is_used(cluster: nbdist.Cluster, tmp_path: Path) -> None:
    """Also after other compilations; only rank 0 writes to a folder set in JAX."""
    name = f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'own')!r})\n"
    least = "jax.config.update('jax_persistent_cache_min_compile_time_secs', {})\n"
    programs = "".join(f"float(jax.jit(lambda x: x + {n})(1.0))\n" for n in range(3))
    cluster.run(f"import jax\n{name}{least.format(0)}{programs}")
    cluster.run(least.format(1.0) + "jax.config.update('jax_compilation_cache_dir', None)")
    assert list((tmp_path / "own").iterdir())
    cluster.restart()


KILLED = """
import pathlib, resource, signal, sys
from nbdist.worker.jax.runtime.compile_cache import Folder
import jax
from nbdist.worker.jax.runtime import compile_cache
compile_cache.keep_in(sys.argv[1])
kept = Folder(pathlib.Path(sys.argv[1]))
kept.put("small", b"whole")
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
kept.put("large", bytes(1 << 21))
"""


@pytest.mark.processes
def test_cache_file_is_complete_or_missing(tmp_path: Path) -> None:
    """The process is killed during a write; JAX's own cache would leave a corrupt file."""
    folder = tmp_path / "compiled"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGXFSZ
    assert not (folder / "large").exists()
    assert (folder / "small").read_bytes() == b"whole"
