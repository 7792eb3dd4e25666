# framework: tensorflow
# compare: model.get_weights(); restored.get_weights(); served; second.history["loss"]

# %% [markdown]
# # Save and load models

# %%
import os

# Keep the output short
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow import keras

# %%
keras.utils.set_random_seed(4)
rng = np.random.default_rng(4)

train_images = rng.random((256, 64), dtype="float32")
train_labels = (train_images[:, :32].sum(1) > train_images[:, 32:].sum(1)).astype("int32")
test_images, test_labels = train_images[:64], train_labels[:64]

workdir = pathlib.Path(tempfile.mkdtemp())


# %%
def create_model():
    model = keras.Sequential(
        [
            keras.layers.Input(shape=(64,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


model = create_model()

# %% Save checkpoints during training
cp_callback = keras.callbacks.ModelCheckpoint(
    filepath=str(workdir / "cp-{epoch:02d}.weights.h5"), save_weights_only=True
)
model.fit(
    train_images,
    train_labels,
    epochs=2,
    batch_size=32,
    shuffle=False,
    callbacks=[cp_callback],
    verbose=0,
)
print(sorted(p.name for p in workdir.iterdir()))

# %% [markdown]
# ## Weights
# A new model with the same architecture can share weights.

# %%
fresh = create_model()
loss, acc = fresh.evaluate(test_images, test_labels, verbose=0)
print(f"Untrained model, accuracy: {100 * acc:5.2f}%")

fresh.load_weights(workdir / "cp-02.weights.h5")
loss, acc = fresh.evaluate(test_images, test_labels, verbose=0)
print(f"Restored model, accuracy: {100 * acc:5.2f}%")

# %% [markdown]
# ## The whole model
# The optimizer state is part of the file, so training goes on where it stopped.

# %%
model.save(workdir / "my_model.keras")

restored = keras.models.load_model(workdir / "my_model.keras")
np.testing.assert_allclose(
    model.predict(test_images, verbose=0), restored.predict(test_images, verbose=0)
)

# %%
second = restored.fit(train_images, train_labels, epochs=1, batch_size=32, shuffle=False, verbose=2)

# %% [markdown]
# ## Export for serving

# %%
export_path = str(workdir / "export")
restored.export(export_path)

reloaded = tf.saved_model.load(export_path)
served = reloaded.serve(tf.constant(test_images[:4])).numpy()
served
