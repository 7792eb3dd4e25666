"""Source code of the models: a cell of nbdist and a script by hand run the same text."""

from __future__ import annotations

from dataclasses import dataclass

DATA = """
import numpy as np
SAMPLES, FEATURES, CLASSES = {samples}, {features}, 10
random = np.random.default_rng(1)
images = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
labels = random.integers(0, CLASSES, SAMPLES).astype(np.int32)
train = images, labels
"""

MODEL = {
    "mirrored": """
import keras, tensorflow as tf
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((FEATURES,)),
    *[keras.layers.Dense({width}, activation="relu") for _ in range({layers})],
    keras.layers.Dense(CLASSES),
])
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""",
    "pjrt": """
import jax, jax.numpy as jnp
sizes = [FEATURES, *[{width}] * {layers}, CLASSES]
params = [
    (jnp.asarray(random.normal(size=(n, m)) / n**0.5, jnp.float32), jnp.zeros(m))
    for n, m in zip(sizes, sizes[1:])
]
velocity = jax.tree.map(jnp.zeros_like, params)

def loss_of(params, x, y):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), y[:, None], 1).mean()
""",
}

STEP = {
    "mirrored": """
x, y = batch
with tf.GradientTape() as tape:
    loss = loss_of(y, model(x, training=True))
gradients = tape.gradient(loss, model.trainable_variables)
optimizer.apply(gradients, model.trainable_variables)
""",
    "pjrt": """
x, y = batch
loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
params = jax.tree.map(lambda p, v: p - 0.01 * v, params, velocity)
loss
""",
}


CNN = {
    "mirrored": """
import keras, tensorflow as tf
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((FEATURES,)),
    keras.layers.Reshape((32, 32, 3)),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
    keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(CLASSES),
])
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""",
    "pjrt": """
import jax, jax.numpy as jnp
shapes = [(3, 3, 3, 32), (3, 3, 32, 32), (3, 3, 32, 64), (64, CLASSES)]
params = [
    jnp.asarray(random.normal(size=shape) / np.prod(shape[:-1]) ** 0.5, jnp.float32)
    for shape in shapes
]
velocity = jax.tree.map(jnp.zeros_like, params)

def loss_of(params, x, y):
    x = x.reshape(-1, 32, 32, 3)
    for kernel, stride in zip(params[:-1], (1, 2, 2)):
        order = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "VALID", dimension_numbers=order
        )
        x = jax.nn.relu(x)
    logits = x.mean((1, 2)) @ params[-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()
""",
}
"""Models for images of 32 x 32 x 3.

With 38,000 parameters, an all-reduce is short compared to a step.
"""


@dataclass(frozen=True)
class Size:
    """Size of a step.

    Attributes:
        batch: samples in a global batch.
        features: features of a sample.
        width: width of each hidden layer.
        layers: number of hidden layers.
        samples: samples in an epoch.
    """

    batch: int
    features: int
    width: int
    layers: int
    samples: int

    def data(self) -> str:
        return DATA.format(samples=self.samples, features=self.features)

    def model(self, strategy: str) -> str:
        return MODEL[strategy].format(width=self.width, layers=self.layers)


TINY = Size(batch=16, features=8, width=8, layers=1, samples=1 << 10)
"""Size of smoke runs."""
