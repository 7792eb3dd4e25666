# framework: tensorflow
# compare: history.history; model.get_weights(); model.predict(test_inputs, verbose=0); results

# %% [markdown]
# # Predict house prices from numbers and from a small image
#
# The functional API joins two branches: one reads the attributes of the house, the other a picture.

# %%
import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(1)

# %%
rng = np.random.RandomState(7)
n = 320

attributes = rng.normal(size=(n, 6)).astype("float32")
pictures = rng.uniform(size=(n, 16, 16, 3)).astype("float32")
price = (
    attributes @ np.array([0.8, -0.4, 0.3, 0.0, 0.5, -0.2])
    + 2.0 * pictures[:, 4:12, 4:12, 0].mean(axis=(1, 2))
    + 0.05 * rng.normal(size=n)
).astype("float32")
expensive = (price > np.median(price)).astype("float32")

split = 256
train_inputs = {"attributes": attributes[:split], "picture": pictures[:split]}
test_inputs = {"attributes": attributes[split:], "picture": pictures[split:]}
train_targets = {"price": price[:split], "expensive": expensive[:split]}
test_targets = {"price": price[split:], "expensive": expensive[split:]}

# %% [markdown]
# ## Two inputs, two outputs

# %%
attr_in = keras.Input(shape=(6,), name="attributes")
pic_in = keras.Input(shape=(16, 16, 3), name="picture")

a = layers.Dense(8, activation="relu")(attr_in)

p = layers.Conv2D(4, 3, strides=2, activation="relu")(pic_in)
p = layers.GlobalAveragePooling2D()(p)

x = layers.concatenate([a, p])
x = layers.Dense(8, activation="relu")(x)

price_out = layers.Dense(1, name="price")(x)
exp_out = layers.Dense(1, activation="sigmoid", name="expensive")(x)

model = keras.Model(
    inputs={"attributes": attr_in, "picture": pic_in},
    outputs={"price": price_out, "expensive": exp_out},
)

# %%
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "price": keras.losses.MeanSquaredError(),
        "expensive": keras.losses.BinaryCrossentropy(),
    },
    loss_weights={"price": 1.0, "expensive": 0.2},
)

# %%
history = model.fit(train_inputs, train_targets, epochs=3, batch_size=32, shuffle=False, verbose=2)

# %%
results = model.evaluate(test_inputs, test_targets, verbose=0, return_dict=True)
for name, value in results.items():
    print(f"{name:>20}: {value:.4f}")
