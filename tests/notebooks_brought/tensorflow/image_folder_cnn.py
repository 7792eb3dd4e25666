# framework: tensorflow
# compare: history.history["loss"]; history.history["val_loss"]; model.get_weights(); scores

# %% [markdown]
# # Image classification from a folder of pictures
#
# Every class has its own folder. The pictures are drawn here: circles, squares and stripes.

# %%
import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

# %%
SEED = 1337
IMG_SIZE = (24, 24)
BATCH_SIZE = 16
USE_AUGMENTATION = False  # slow without a GPU, turn on for the final run

keras.utils.set_random_seed(SEED)

# %% Draw the pictures
data_dir = tempfile.mkdtemp()
rng = np.random.default_rng(SEED)
yy, xx = np.mgrid[:24, :24]


def draw(kind):
    cx, cy = rng.uniform(8, 16, size=2)
    r = rng.uniform(4, 7)
    if kind == "circle":
        mask = (xx - cx) ** 2 + (yy - cy) ** 2 < r**2
    elif kind == "square":
        mask = (abs(xx - cx) < r) & (abs(yy - cy) < r)
    else:
        mask = (xx + int(cx)) % 6 < 3
    img = rng.integers(0, 80, size=(24, 24, 3))
    img[mask] += 150
    return img.astype("uint8")


for kind in ["circle", "square", "stripes"]:
    os.makedirs(os.path.join(data_dir, kind))
    for i in range(64):
        png = tf.io.encode_png(draw(kind))
        tf.io.write_file(os.path.join(data_dir, kind, f"{i:03d}.png"), png)

# %% [markdown]
# ## Create the data sets

# %%
train_ds = keras.utils.image_dataset_from_directory(
    data_dir,
    validation_split=1 / 3,
    subset="training",
    seed=SEED,
    image_size=IMG_SIZE,
    batch_size=BATCH_SIZE,
)
val_ds = keras.utils.image_dataset_from_directory(
    data_dir,
    validation_split=1 / 3,
    subset="validation",
    seed=SEED,
    image_size=IMG_SIZE,
    batch_size=BATCH_SIZE,
)
class_names = train_ds.class_names
print(class_names)

# %%
for image_batch, labels_batch in train_ds.take(1):
    print(image_batch.shape)
    print(labels_batch.shape)

# %%
AUTOTUNE = tf.data.AUTOTUNE

train_ds = train_ds.cache().prefetch(buffer_size=AUTOTUNE)
val_ds = val_ds.cache().prefetch(buffer_size=AUTOTUNE)

# %%
data_augmentation = keras.Sequential(
    [
        layers.RandomFlip("horizontal"),
        layers.RandomRotation(0.1),
        layers.RandomZoom(0.1),
    ]
)

# %% [markdown]
# ## The network

# %%
inputs = keras.Input(shape=(*IMG_SIZE, 3))
x = layers.Rescaling(1.0 / 255)(inputs)
if USE_AUGMENTATION:
    x = data_augmentation(x)

for filters in [8, 16]:
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.MaxPooling2D()(x)

x = layers.GlobalAveragePooling2D()(x)
outputs = layers.Dense(len(class_names))(x)
model = keras.Model(inputs, outputs)

# %%
model.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
history = model.fit(train_ds, epochs=3, validation_data=val_ds)

# %% Run inference on a new picture
img_array = draw("circle").astype("float32")
img_array = tf.expand_dims(img_array, 0)

predictions = model.predict(img_array)
scores = tf.nn.softmax(predictions[0]).numpy()
print(
    "This image most likely belongs to {} with a {:.2f} percent confidence.".format(
        class_names[np.argmax(scores)], 100 * np.max(scores)
    )
)
