"""Eight virtual devices in this process, set before JAX creates its backend."""

import jax

COUNT = 8


def set_up() -> None:
    """Set the number of CPU devices, unless another folder of tests has already set it."""
    if jax.config.jax_num_cpu_devices != COUNT:
        jax.config.update("jax_num_cpu_devices", COUNT)
