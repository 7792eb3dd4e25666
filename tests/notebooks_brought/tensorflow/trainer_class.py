# framework: tensorflow
# compare: trainer.history; model.get_weights(); test_metrics; logits

# %% [markdown]
# # A reusable trainer class
#
# I copy this class from project to project.

# %%
import dataclasses
from collections import defaultdict

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(55)


# %%
@dataclasses.dataclass
class Config:
    epochs: int = 3
    batch_size: int = 32
    lr: float = 3e-3
    clip_norm: float = 1.0
    aux_weight: float = 0.1


cfg = Config()


# %%
class TwoHeads(keras.Model):
    """A classifier with an auxiliary regression head."""

    def __init__(self, units=16, classes=4):
        super().__init__()
        self.body = keras.layers.Dense(units, activation="relu")
        self.norm = keras.layers.LayerNormalization()
        self.classify = keras.layers.Dense(classes)
        self.regress = keras.layers.Dense(1)

    def call(self, x, training=False):
        h = self.norm(self.body(x))
        return {"logits": self.classify(h), "aux": self.regress(h)}


# %%
class Trainer:
    def __init__(self, model, config):
        self.model = model
        self.config = config
        self.optimizer = keras.optimizers.Adam(config.lr, global_clipnorm=config.clip_norm)
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.mse = keras.losses.MeanSquaredError()
        self.metrics = {
            "loss": keras.metrics.Mean(),
            "ce": keras.metrics.Mean(),
            "aux": keras.metrics.Mean(),
            "acc": keras.metrics.SparseCategoricalAccuracy(),
        }
        self.history = defaultdict(list)

    def compute_losses(self, outputs, batch):
        losses = {
            "ce": self.ce(batch["label"], outputs["logits"]),
            "aux": self.mse(batch["value"], outputs["aux"]),
        }
        losses["loss"] = losses["ce"] + self.config.aux_weight * losses["aux"]
        return losses

    @tf.function
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            outputs = self.model(batch["x"], training=True)
            losses = self.compute_losses(outputs, batch)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(losses["loss"], variables), variables))
        self._update(losses, outputs, batch)

    @tf.function
    def test_step(self, batch):
        outputs = self.model(batch["x"], training=False)
        self._update(self.compute_losses(outputs, batch), outputs, batch)

    def _update(self, losses, outputs, batch):
        for name, value in losses.items():
            self.metrics[name].update_state(value)
        self.metrics["acc"].update_state(batch["label"], outputs["logits"])

    def _pop_metrics(self):
        result = {name: float(m.result()) for name, m in self.metrics.items()}
        for m in self.metrics.values():
            m.reset_state()
        return result

    def fit(self, train_ds, val_ds=None):
        for epoch in range(self.config.epochs):
            for batch in train_ds:
                self.train_step(batch)
            logs = self._pop_metrics()
            if val_ds is not None:
                logs.update({f"val_{k}": v for k, v in self.evaluate(val_ds).items()})
            for k, v in logs.items():
                self.history[k].append(v)
            print(f"[{epoch + 1}/{self.config.epochs}]", logs)

    def evaluate(self, ds):
        for batch in ds:
            self.test_step(batch)
        return self._pop_metrics()


# %%
rng = np.random.default_rng(55)
x = rng.normal(size=(320, 10)).astype("float32")
data = {
    "x": x,
    "label": np.argmax(x[:, :4], axis=1),
    "value": x[:, 4:5] - x[:, 5:6],
}


def make_ds(start, stop):
    part = {k: v[start:stop] for k, v in data.items()}
    return tf.data.Dataset.from_tensor_slices(part).batch(cfg.batch_size)


train_ds, val_ds, test_ds = make_ds(0, 192), make_ds(192, 256), make_ds(256, 320)

# %%
model = TwoHeads()
trainer = Trainer(model, cfg)
trainer.fit(train_ds, val_ds)

# %%
test_metrics = trainer.evaluate(test_ds)
x_test = x[256:]
logits = model(x_test)["logits"].numpy()
logits.argmax(axis=1)[:10]
