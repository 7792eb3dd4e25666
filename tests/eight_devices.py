"""JAX in this process: eight virtual devices, and a cache of compiled programs in build/jax-cache.

Most of the time of these tests is compilation by XLA. Call `set_up` before JAX creates its backend.
"""

from pathlib import Path

import jax

COUNT = 8
CACHE = Path(__file__).parents[1] / "build" / "jax-cache"
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
