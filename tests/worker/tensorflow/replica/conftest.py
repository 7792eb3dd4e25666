"""Two replicas in this process: logical CPUs of one strategy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replicas import Replicas


@pytest.fixture(scope="package")
def strategy() -> Any:
    """Import TensorFlow late: earlier tests check that the notebook does not load it."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def replicas(strategy: Any) -> Replicas:
    return Replicas(strategy)


@pytest.fixture
def vector(strategy: Any) -> Any:
    import tensorflow as tf

    with strategy.scope():
        return tf.Variable([0.5, -1.0, 2.0, 0.25])
