"""Eight virtual devices in this process."""

import jax
import pytest

from tests import eight_devices

eight_devices.set_up()


@pytest.fixture(scope="session", autouse=True)
def eight_devices_exist() -> None:
    """Create the devices. Fails if a test of another folder has started JAX with fewer."""
    assert jax.device_count() == eight_devices.COUNT
