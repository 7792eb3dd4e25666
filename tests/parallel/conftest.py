"""Eight virtual devices in this process."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Raises where a test of another folder has started JAX with less."""
    assert jax.device_count() == 8
